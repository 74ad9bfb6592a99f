"""Batch normalization, on batch statistics (training) or on running ones (inference).

Parts of the gradient have two variants: a plain one and one for CPUs.

bfloat16 images have a rule of their own whose passes read and write bfloat16, because the time of a
pass over images is proportional to its bytes. Everything per channel is float32: statistics, sums,
scales and offsets. Values are rounded once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.autodiff.rule_registry import (
    Choice,
    Choices,
    Gradients,
    Variant,
    Variants,
    select_variant,
    vjp_multi,
)
from onnxtrain.autodiff.rules.norm import center, per_channel, working_dtype
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes import dims as D
from onnxtrain.modes.train_eval import (
    BatchNormParameters,
    has_batch_statistics,
    is_layer_output,
    layer_reads_graph_input,
    mean_and_variance,
    normalize,
    prefers_fused_kernel,
)

_FLOAT = ir.DataType.FLOAT


def bfloat16_gradients(
    op: OpBuilder, dy: ir.Value, x: ir.Value, scale: ir.Value, epsilon: float
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the gradients of image, scale and shift, in training mode.

    ``dx = scale * r * (dy - mean(dy) - (x - mean(x)) * r^2 * mean(dy * (x - mean(x))))`` equals
    ``dy * gain - (x * tilt + shift)`` with three scalars per channel, and
    ``sum(dy * (x - mean)) = sum(dy * x) - mean * sum(dy)``.
    """
    mean, variance = (op.Reshape(v, [-1]) for v in mean_and_variance(op, x))
    r = op.Reciprocal(op.Sqrt(op.Add(variance, epsilon)))
    dbias = _channel_sum(op, dy)
    both = op.Sub(_channel_sum(op, op.Mul(dy, x)), op.Mul(mean, dbias))
    dscale = op.Mul(both, r)
    gain = op.Mul(op.cast(scale, _FLOAT), r)
    share = op.Div(gain, _count(op, x))
    tilt = op.Mul(share, op.Mul(r, dscale))
    shift = op.Sub(op.Mul(share, dbias), op.Mul(tilt, mean))
    gain, tilt, shift = (per_channel(op, op.cast(v, x.dtype), x) for v in (gain, tilt, shift))
    dx = op.Sub(op.Mul(dy, gain), op.Add(op.Mul(x, tilt), shift))
    return dx, dscale, dbias


def _channel_sum(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return the float32 sum of each channel, for images as ``[N * C, positions] @ ones``.

    The matmul accumulates in float32 and is five times as fast as ReduceSum on a GPU.
    """
    sizes = D.static_sizes(op.dims(x)[2:])
    if sizes:
        ones = op.const(np.ones((math.prod(sizes), 1)), x.dtype)
        images = op.MatMul(op.Reshape(x, [0, 0, math.prod(sizes)]), ones)
        images = op.Squeeze(images, [2])
    elif op.rank(x) > 2:
        images = op.ReduceSum(x, list(range(2, op.rank(x))), keepdims=0)
    else:
        images = x
    return op.ReduceSum(op.cast(images, _FLOAT), [0], keepdims=0)


def _count(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return the number of elements per channel, in float32."""
    return op.count(op.cast(x, _FLOAT), [i for i in range(op.rank(x)) if i != 1])


class Statistics(NamedTuple):
    """Statistics of a batch: ``xc = x - mean``, a function that emits ``mean(xc^2)``, the mean."""

    centered: ir.Value
    variance: Callable[[], ir.Value]
    mean: ir.Value | None


def statistics(op: OpBuilder, x: ir.Value, axes: list[int], node: ir.Node) -> Statistics:
    """Return the statistics of each channel. A vector is one channel and has no mean."""
    return select_variant(op, node, STATISTICS_VARIANTS, STATISTICS_CHOICES)(op, x, axes, node)


def _computed(op: OpBuilder, x: ir.Value, axes: list[int], node: ir.Node) -> Statistics:
    if op.rank(x) < 2:  # a vector is one channel
        centered = center(op, x, axes)
        square = op.Mul(centered, centered)
        return Statistics(centered, lambda: op.ReduceMean(square, axes, keepdims=0), None)
    mean, variance = mean_and_variance(op, x)
    flat = op.Reshape(mean, [-1])
    return Statistics(op.Sub(x, mean), lambda: op.Reshape(variance, [-1]), flat)


def _outputs_of_node(op: OpBuilder, x: ir.Value, axes: list[int], node: ir.Node) -> Statistics:
    mean, variance = (op.cast(op.extra_output(node, i), x.dtype) for i in (1, 2))
    return Statistics(op.Sub(x, broadcast_channels(op, mean, x)), lambda: variance, mean)


def _has_outputs(node: ir.Node) -> bool:
    """Return whether mean and variance are outputs of the node; a vector has no channels."""
    x = node.inputs[0]
    return x is not None and S.rank_of(x) > 1 and has_batch_statistics(node)


STATISTICS_VARIANTS: Variants[ir.Node] = {
    "computed": Variant(_computed),
    "outputs": Variant(_outputs_of_node, _has_outputs),
}
STATISTICS_CHOICES: Choices[ir.Node] = [
    Choice("outputs", prefers="batch-statistics-output"),
    Choice("computed"),
]


def broadcast_channels(op: OpBuilder, v: ir.Value, x: ir.Value) -> ir.Value:
    """Reshape a per-channel vector so that it broadcasts against ``x``."""
    return select_variant(
        op, D.static_sizes(op.dims(x)[1:]), BROADCAST_VARIANTS, BROADCAST_CHOICES
    )(op, v, x)


def _expanded(op: OpBuilder, v: ir.Value, x: ir.Value) -> ir.Value:
    """Repeat per-channel values for every position: onnxruntime broadcasts short runs slowly.

    A matmul does it, because onnxruntime would remove an Expand in favor of the broadcast.
    """
    sizes = D.static_sizes(op.dims(x)[1:])
    assert sizes is not None
    ones = op.const(np.ones((1, math.prod(sizes[1:]))), v.dtype)
    return op.Reshape(op.MatMul(op.Reshape(v, [-1, 1]), ones), list(sizes))


Sizes = list[int] | None  # of channels and positions, if they are known

BROADCAST_VARIANTS: Variants[Sizes] = {
    "broadcast": Variant(per_channel),
    "repeated": Variant(_expanded, lambda sizes: sizes is not None),
}
BROADCAST_CHOICES: Choices[Sizes] = [
    Choice(
        "repeated",
        lambda sizes: 1 < math.prod((sizes or ())[1:]) <= T.REPEATED_POSITIONS,
        prefers="expand-channel-vectors",
    ),
    Choice("broadcast"),
]


class Incoming(NamedTuple):
    """Values that the gradient of batch normalization reads."""

    dy: ir.Value
    x: ir.Value
    scale: ir.Value
    statistics: Statistics
    epsilon: float


def input_gradients(
    op: OpBuilder, v: Incoming, axes: list[int]
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the gradients of ``x``, scale and bias, with ``r = 1 / sqrt(variance + epsilon)``.

    ``dx = scale * r * (dy - mean(dy) - xc * r^2 * mean(dy * xc))``, ``dbias = sum(dy)`` and
    ``dscale = r * sum(dy * xc)``.
    """
    return select_variant(op, v.x, GRADIENT_VARIANTS, GRADIENT_CHOICES)(op, v, axes)


def _by_centered(
    op: OpBuilder, v: Incoming, axes: list[int]
) -> tuple[ir.Value, ir.Value, ir.Value]:
    dy, x, centered, size = v.dy, v.x, v.statistics.centered, op.count(v.x, axes)
    r = op.Reciprocal(op.Sqrt(op.Add(v.statistics.variance(), v.epsilon)))
    dbias = op.ReduceSum(dy, axes, keepdims=0)
    dscale = op.Mul(op.ReduceSum(op.Mul(dy, centered), axes, keepdims=0), r)
    tilt = op.Div(op.Mul(r, dscale), size)
    dx = op.Sub(dy, op.Mul(centered, broadcast_channels(op, tilt, x)))
    # The mean of the remainder, not sum(dy) / count, keeps sum(dx) at zero, so that a bias before
    # the normalization gets only rounding noise. On a GPU this would cost another pass.
    dx = scaled_difference(op, dx, op.Mul(v.scale, r), axes, op.Div(dbias, size))
    return dx, dscale, dbias


def _by_affine_map(
    op: OpBuilder, v: Incoming, axes: list[int]
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Read ``x`` without centering it, to save a pass over images.

    ``mean(dy * xc) = mean(dy * x) - mean(x) * mean(dy)``. The term subtracted from ``dy`` is a
    normalization of ``x`` with scale ``r * mean(dy * xc)`` and bias ``mean(dy)``.
    """
    dy, x, size = v.dy, v.x, op.count(v.x, axes)
    mean, variance = v.statistics.mean, v.statistics.variance()
    assert mean is not None
    r = op.Reciprocal(op.Sqrt(op.Add(variance, v.epsilon)))
    dy_mean = op.ReduceMean(dy, axes, keepdims=0)
    together = op.ReduceMean(op.Mul(dy, x), axes, keepdims=0)
    dscale_mean = op.Mul(op.Sub(together, op.Mul(mean, dy_mean)), r)
    subtrahend = normalize(
        op, x, BatchNormParameters(dscale_mean, dy_mean, mean, variance), v.epsilon
    )
    left, gain = op.Sub(dy, subtrahend), op.Mul(v.scale, r)
    if layer_reads_graph_input(x):  # a large mean would multiply the rounding error of the sum
        left = op.Sub(left, op.ReduceMean(left, axes, keepdims=1))
    dx = op.Mul(left, per_channel(op, gain, x))
    return dx, op.Mul(dscale_mean, size), op.Mul(dy_mean, size)


def _near_zero(x: ir.Value) -> bool:
    """Return whether sums of ``dy * x`` without centering are accurate."""
    return S.rank_of(x) > 1 and is_layer_output(x)


GRADIENT_VARIANTS: Variants[ir.Value] = {
    "centered": Variant(_by_centered),
    "one map": Variant(_by_affine_map, _near_zero),
}
GRADIENT_CHOICES: Choices[ir.Value] = [
    Choice("one map", prefers="mean-from-known-sum"),
    Choice("centered"),
]


def scaled_difference(
    op: OpBuilder, x: ir.Value, gain: ir.Value, axes: list[int], mean: ir.Value
) -> ir.Value:
    """Return ``gain * (x - mean(x))``; ``mean`` is ``mean(x)`` up to rounding."""
    facts = Scaled(x, gain, prefers_fused_kernel(op, x))
    return select_variant(op, facts, DIFFERENCE_VARIANTS, DIFFERENCE_CHOICES)(
        op, x, gain, axes, mean
    )


def _subtracted(
    op: OpBuilder, x: ir.Value, gain: ir.Value, axes: list[int], mean: ir.Value
) -> ir.Value:
    return op.Mul(op.Sub(x, op.ReduceMean(x, axes, keepdims=1)), per_channel(op, gain, x))


def _mean_subtracted(
    op: OpBuilder, x: ir.Value, gain: ir.Value, axes: list[int], mean: ir.Value
) -> ir.Value:
    return op.Mul(op.Sub(x, per_channel(op, mean, x)), per_channel(op, gain, x))


def _by_normalization(
    op: OpBuilder, x: ir.Value, gain: ir.Value, axes: list[int], mean: ir.Value
) -> ir.Value:
    """One pass: BatchNormalization in inference mode with a variance of 1."""
    return _by_statistics(op, x, gain, op.ReduceMean(x, axes, keepdims=0))


def _by_mean_normalization(
    op: OpBuilder, x: ir.Value, gain: ir.Value, axes: list[int], mean: ir.Value
) -> ir.Value:
    return _by_statistics(op, x, gain, mean)


def _by_statistics(op: OpBuilder, x: ir.Value, gain: ir.Value, mean: ir.Value) -> ir.Value:
    zero, one = (op.const(np.full(op.static(gain) or (), v), x.dtype) for v in (0.0, 1.0))
    return op.BatchNormalization(x, gain, zero, mean, one, epsilon=0.0)


class Scaled(NamedTuple):
    """The input, its scale, and whether a normalization kernel pays."""

    x: ir.Value
    gain: ir.Value
    worth: bool


def _fits_batch_norm_kernel(v: Scaled) -> bool:
    return (
        v.worth
        and v.x.dtype == ir.DataType.FLOAT
        and S.rank_of(v.x) > 1
        and D.static_sizes(S.dims_of(v.gain) or (None,)) is not None
    )


DIFFERENCE_VARIANTS: Variants[Scaled] = {
    "subtracted": Variant(_subtracted),
    "normalised": Variant(_by_normalization, _fits_batch_norm_kernel),
    "mean subtracted": Variant(_mean_subtracted, lambda v: S.rank_of(v.x) > 1),
    "mean normalised": Variant(_by_mean_normalization, _fits_batch_norm_kernel),
}
DIFFERENCE_CHOICES: Choices[Scaled] = [
    Choice("mean normalised", prefers="mean-from-known-sum"),
    Choice("mean subtracted", prefers="mean-from-known-sum"),
    Choice("normalised", prefers="fused-affine"),
    Choice("subtracted"),
]


@vjp_multi("BatchNormalization")
def batch_normalization(
    op, dys, x, scale, bias, mean, var, *, node, epsilon, momentum, training_mode
) -> Gradients:
    """Frozen: an affine map per channel. Training: the statistics depend on ``x`` as well."""
    inputs = (x, scale, bias, mean, var)
    if not training_mode:
        return _frozen(op, dys, inputs, epsilon, momentum)
    form = select_variant(op, (x, dys), TRAINING_VARIANTS, TRAINING_CHOICES)
    return form(op, dys, inputs, epsilon, momentum, node)


def _frozen(op: OpBuilder, dys, inputs, epsilon: float, momentum: float) -> Gradients:
    """With ``r = 1 / sqrt(var + eps)`` the gradients are ``dx = dy * scale * r``.

    Further ``dscale = sum(dy * (x - mean)) * r``, ``dbias = sum(dy)``,
    ``dmean = -sum(dy) * scale * r`` and ``dvar = -dscale * scale * r^2 / 2``.
    """
    x, scale, _, mean, var = inputs
    dtype = working_dtype(x)
    xw, dy, scale_w, mean_w, var_w = (op.cast(v, dtype) for v in (x, dys[0], scale, mean, var))
    axes = _reduced(op, x)
    r = op.Reciprocal(op.Sqrt(op.Add(var_w, epsilon)))
    gain = op.Mul(scale_w, r)
    dx = op.Mul(dy, per_channel(op, gain, x))
    dbias = op.ReduceSum(dy, axes, keepdims=0)
    product = op.Mul(dy, op.Sub(xw, per_channel(op, mean_w, x)))
    dscale = op.Mul(op.ReduceSum(product, axes, keepdims=0), r)
    dmean = op.Neg(op.Mul(dbias, gain))
    dvar = op.Mul(op.Mul(dscale, op.Mul(gain, r)), -0.5)
    return _as_inputs(op, (dx, dscale, dbias, dmean, dvar), inputs)


def _training(
    op: OpBuilder, dys, inputs, epsilon: float, momentum: float, node: ir.Node
) -> Gradients:
    """The gradient of the result goes through ``input_gradients``.

    The running statistics are ``momentum * old + (1 - momentum) * batch``, with the variance of the
    population; they add ``(1 - momentum) * (drun_mean + 2 * xc * drun_var) / count``.
    """
    x, scale = inputs[:2]
    dy, drun_mean, drun_var = (*dys, None, None)[:3]
    dtype = working_dtype(x)
    xw, scale_w = op.cast(x, dtype), op.cast(scale, dtype)
    axes = _reduced(op, x)
    of_batch = statistics(op, xw, axes, node)
    centered, size = of_batch.centered, op.count(xw, axes)
    dx = dscale = dbias = None
    if dy is not None:
        incoming = Incoming(op.cast(dy, dtype), xw, scale_w, of_batch, epsilon)
        dx, dscale, dbias = input_gradients(op, incoming, axes)
    dmean = dvar = None
    if drun_mean is not None:
        dmean = op.Mul(op.cast(drun_mean, dtype), momentum)
        share = op.Div(op.Mul(op.cast(drun_mean, dtype), 1.0 - momentum), size)
        dx = _plus(op, dx, op.expand_like(per_channel(op, share, x), xw))
    if drun_var is not None:
        dvar = op.Mul(op.cast(drun_var, dtype), momentum)
        share = op.Div(op.Mul(op.cast(drun_var, dtype), 2.0 * (1.0 - momentum)), size)
        dx = _plus(op, dx, op.Mul(centered, per_channel(op, share, x)))
    return _as_inputs(op, (dx, dscale, dbias, dmean, dvar), inputs)


def _training_bfloat16(
    op: OpBuilder, dys, inputs, epsilon: float, momentum: float, node: ir.Node
) -> Gradients:
    """The same, with passes over images in bfloat16."""
    gradients = bfloat16_gradients(op, dys[0], inputs[0], inputs[1], epsilon)
    return _as_inputs(op, (*gradients, None, None), inputs)


def _is_bfloat16(facts: tuple[ir.Value, Sequence[ir.Value | None]]) -> bool:
    """Return whether images are bfloat16 and only the result has a gradient."""
    x, dys = facts
    alone = dys[0] is not None and all(d is None for d in dys[1:])
    return alone and x.dtype == ir.DataType.BFLOAT16 and S.rank_of(x) > 1


TRAINING_VARIANTS: Variants[tuple[ir.Value, Sequence[ir.Value | None]]] = {
    "float32": Variant(_training),
    "bfloat16": Variant(_training_bfloat16, _is_bfloat16),
}
TRAINING_CHOICES: Choices[tuple[ir.Value, Sequence[ir.Value | None]]] = [
    Choice("bfloat16", prefers="bfloat16-conv"),
    Choice("float32"),
]


def _reduced(op: OpBuilder, x: ir.Value) -> list[int]:
    """Return the axes of a channel's elements: all but axis 1; a vector is one channel."""
    return [i for i in range(op.rank(x)) if i != 1]


def _plus(op: OpBuilder, a: ir.Value | None, b: ir.Value) -> ir.Value:
    return b if a is None else op.Add(a, b)


def _as_inputs(op: OpBuilder, gradients, inputs) -> Gradients:
    """Return the gradients in the dtypes of the inputs; those of a vector are summed to [1]."""
    fitted_grads = []
    for g, x in zip(gradients, inputs, strict=True):
        if g is not None:
            g = op.cast(g, x.dtype)
            g = op.reshape_like(g, x) if op.rank(g) != op.rank(x) else g
        fitted_grads.append(g)
    return tuple(fitted_grads)
