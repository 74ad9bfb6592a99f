"""A contract about BatchNormalization in training mode: when its outputs are the batch's own.

The operator puts out ``momentum * old + (1 - momentum) * batch`` for mean and variance. With
momentum 0 that is the mean and the (population's) variance of the batch, whatever the old values.

``running_statistics`` makes nodes so, on targets that prefer it, and averages behind the node; the
gradient rule reads the batch's statistics from such a node, and does not compute them again.

Where a runtime has no such kernel, :func:`mean_and_variance` computes both.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_op
from onnxtrain.graph.shapes import dims as D

_BATCH_ONLY = 0.0
_DEFAULT = 0.9  # the standard's
_MOVES = (
    *("Cast", "Concat", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze"),
    *("Transpose", "Unsqueeze"),
)


def momentum_of(node: ir.Node) -> float:
    """Return which part of the old statistics a BatchNormalization keeps."""
    momentum = node.attributes.get("momentum")
    return _DEFAULT if momentum is None else momentum.as_float()


def put_out_batch_statistics(node: ir.Node) -> None:
    """Make a BatchNormalization put out the statistics of the batch, and nothing of the old."""
    node.attributes["momentum"] = ir.AttrFloat32("momentum", _BATCH_ONLY)


def puts_out_batch_statistics(node: ir.Node) -> bool:
    """Return whether outputs 1 and 2 of a training node are the batch's mean and variance."""
    return momentum_of(node) == _BATCH_ONLY


def worth_a_kernel(op: OpBuilder, x: ir.Value) -> bool:
    """Return whether kernels of normalisation are faster than plain passes, by the size of images.

    On CPUs they always are.
    """
    if x.dtype != ir.DataType.FLOAT:
        return False
    return not op.target.gpu or _large(op, x)


def _large(op: OpBuilder, x: ir.Value) -> bool:
    sizes = D.numbers(op.dims(x)[2:])
    return bool(sizes) and math.prod(sizes or ()) >= T.NORMALISED_POSITIONS


def follows_layer(x: ir.Value) -> bool:
    """Return whether a layer with weights made a value, in 32 bits.

    Means of such values are seldom larger than deviations by orders of magnitude, so that products
    of what is not centered keep their digits; inputs of a model may be years, or prices.
    """
    layer = x.producer()
    if layer is None or x.dtype != ir.DataType.FLOAT:
        return False
    return is_op(layer, "Conv", "ConvTranspose", "Gemm", "MatMul")


def reads_input(x: ir.Value) -> bool:
    """Return whether the layer that made a value reads an input of the model, and pads nothing.

    Its weight's gradient multiplies the mean of that input by the sum of a gradient, which is zero
    but for rounding errors. With padding there is no such mean.
    """
    layer = x.producer()
    source = None if layer is None else layer.inputs[0]
    while source is not None and (node := source.producer()) is not None:
        if not is_op(node, *_MOVES):
            return False
        source = node.inputs[0]
    if layer is None or source is None or not source.is_graph_input():
        return False
    pads, auto = (layer.attributes.get(name) for name in ("pads", "auto_pad"))
    padded = (pads is not None and any(pads.as_ints())) or (
        auto is not None and auto.as_string().startswith("SAME")
    )
    return not padded


class Channels(NamedTuple):
    """Numbers of each channel, as BatchNormalization takes them."""

    scale: ir.Value
    bias: ir.Value
    mean: ir.Value
    variance: ir.Value


def normalised(op: OpBuilder, x: ir.Value, given: Channels, epsilon: float) -> ir.Value:
    """Return ``scale * (x - mean) / sqrt(variance + epsilon) + bias``.

    By the operator, or as ``x * slope + (bias - mean * slope)`` where plain passes are faster.
    """
    if worth_a_kernel(op, x):
        return op.BatchNormalization(x, *given, epsilon=epsilon)
    slope = op.Div(given.scale, op.Sqrt(op.Add(given.variance, epsilon)))
    level = op.Sub(given.bias, op.Mul(given.mean, slope))
    column = [-1, *[1] * (op.rank(x) - 2)]
    return op.Add(op.Mul(x, op.Reshape(slope, column)), op.Reshape(level, column))


def mean_and_variance(op: OpBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return mean and (the population's) variance of each channel, as ``[C, 1, ...]``.

    Of bfloat16 images they are float32.
    """
    rank = op.rank(x)
    axes = [i for i in range(rank) if i != 1]
    sizes = D.numbers(op.dims(x)[2:])
    half = x.dtype == ir.DataType.BFLOAT16
    kernel = _large(op, x) if half else worth_a_kernel(op, x)
    if op.target.prefers("statistics-by-layer-norm") and sizes and kernel:
        mean, var = _joined(op, x, math.prod(sizes))
        column = [-1, *[1] * (rank - 2)]
        return op.Reshape(mean, column), op.Reshape(var, column)
    x = op.cast(x, ir.DataType.FLOAT) if half else x
    mean = op.ReduceMean(x, axes, keepdims=1)
    centered = op.Sub(x, mean)
    return mean, op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)


def _joined(op: OpBuilder, x: ir.Value, positions: int) -> tuple[ir.Value, ir.Value]:
    """Return the statistics of a batch from those of its images.

    LayerNormalization computes mean and ``1 / deviation`` of an image in one pass; what it puts out
    besides is not used. The batch's variance is the mean of ``var + (mean - mean of means)^2``.
    """
    images = op.Reshape(x, [0, 0, positions])
    one = op.const(np.ones(positions), x.dtype)
    y, means, r = op.LayerNormalization(images, one, axis=2, epsilon=0.0, _outputs=3)
    # onnxruntime keeps what nothing reads until the run ends: as much again as all activations.
    unread = op.Slice(y, [0, 0, 0], [1, 1, 1], [0, 1, 2])
    means = op.Where(op.const([False]), op.cast(unread, means.dtype), means)
    mean = op.ReduceMean(means, [0], keepdims=1)
    away = op.Sub(means, mean)
    # Of an image of equal values r is infinite, and this 0.
    spread = op.Reciprocal(op.Mul(r, r))
    return mean, op.ReduceMean(op.Add(spread, op.Mul(away, away)), [0], keepdims=1)


__all__ = [
    "Channels",
    "follows_layer",
    "mean_and_variance",
    "momentum_of",
    "normalised",
    "put_out_batch_statistics",
    "puts_out_batch_statistics",
    "reads_input",
]
