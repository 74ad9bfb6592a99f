"""Parts of the gradient of a batch normalisation, each in a plain form and in one for CPUs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.autodiff.rules.norm import center, per_channel
from onnxtrain.autodiff.variants import Choice, Choices, Form, Forms, chosen
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.modes.batch_statistics import (
    Channels,
    follows_layer,
    mean_and_variance,
    normalised,
    puts_out_batch_statistics,
    reads_input,
    worth_a_kernel,
)
from onnxtrain.graph.shapes import dims as D


class Statistics(NamedTuple):
    """Of a batch: ``xc = x - mean``, what emits ``mean(xc^2)`` where needed, and the mean."""

    centered: ir.Value
    variance: Callable[[], ir.Value]
    mean: ir.Value | None


def statistics(op: OpBuilder, x: ir.Value, axes: list[int], node: ir.Node) -> Statistics:
    """Return the statistics of each channel; a vector, which is one channel, has no mean."""
    return chosen(op, node, STATISTICS_FORMS, STATISTICS_CHOICES)(op, x, axes, node)


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
    return Statistics(op.Sub(x, spread(op, mean, x)), lambda: variance, mean)


def _has_outputs(node: ir.Node) -> bool:
    """Return whether mean and variance are outputs of the node; a vector has no channels."""
    x = node.inputs[0]
    return x is not None and S.rank_of(x) > 1 and puts_out_batch_statistics(node)


STATISTICS_FORMS: Forms[ir.Node] = {
    "computed": Form(_computed),
    "outputs": Form(_outputs_of_node, _has_outputs),
}
STATISTICS_CHOICES: Choices[ir.Node] = [
    Choice("outputs", prefers="batch-statistics-output"),
    Choice("computed"),
]


def spread(op: OpBuilder, v: ir.Value, x: ir.Value) -> ir.Value:
    """Return a vector of one number per channel so that it broadcasts against ``x``."""
    return chosen(op, D.numbers(op.dims(x)[1:]), SPREAD_FORMS, SPREAD_CHOICES)(op, v, x)


def _repeated(op: OpBuilder, v: ir.Value, x: ir.Value) -> ir.Value:
    """Repeat the numbers for every position, as onnxruntime takes each run of them on its own.

    A product does that, since an Expand would be left to the broadcast.
    """
    sizes = D.numbers(op.dims(x)[1:])
    assert sizes is not None
    ones = op.const(np.ones((1, math.prod(sizes[1:]))), v.dtype)
    return op.Reshape(op.MatMul(op.Reshape(v, [-1, 1]), ones), list(sizes))


Sizes = list[int] | None  # of channels and positions, if they are known

SPREAD_FORMS: Forms[Sizes] = {
    "broadcast": Form(per_channel),
    "repeated": Form(_repeated, lambda sizes: sizes is not None),
}
SPREAD_CHOICES: Choices[Sizes] = [
    Choice(
        "repeated",
        lambda sizes: 1 < math.prod((sizes or ())[1:]) <= T.REPEATED_POSITIONS,
        prefers="repeated-channels",
    ),
    Choice("broadcast"),
]


class Incoming(NamedTuple):
    """What the gradient of a normalised batch is made of."""

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
    return chosen(op, v.x, GRADIENT_FORMS, GRADIENT_CHOICES)(op, v, axes)


def _by_centered(
    op: OpBuilder, v: Incoming, axes: list[int]
) -> tuple[ir.Value, ir.Value, ir.Value]:
    dy, x, centered, size = v.dy, v.x, v.statistics.centered, op.count(v.x, axes)
    r = op.Reciprocal(op.Sqrt(op.Add(v.statistics.variance(), v.epsilon)))
    dbias = op.ReduceSum(dy, axes, keepdims=0)
    dscale = op.Mul(op.ReduceSum(op.Mul(dy, centered), axes, keepdims=0), r)
    tilt = op.Div(op.Mul(r, dscale), size)
    dx = op.Sub(dy, op.Mul(centered, spread(op, tilt, x)))
    # Taking the mean of what is left, not sum(dy) / count, keeps sum(dx) at zero: a bias
    # in front of the normalisation gets rounding noise only. On a GPU that is a pass too many.
    dx = scaled_difference(op, dx, op.Mul(v.scale, r), axes, op.Div(dbias, size))
    return dx, dscale, dbias


def _by_one_map(op: OpBuilder, v: Incoming, axes: list[int]) -> tuple[ir.Value, ir.Value, ir.Value]:
    """``x`` is read as it is, so that nothing of its size is computed but what is subtracted.

    ``mean(dy * xc) = mean(dy * x) - mean(x) * mean(dy)``, and what is subtracted from ``dy`` is a
    normalisation of ``x`` with ``r * mean(dy * xc)`` for its scale and ``mean(dy)`` for its bias.
    """
    dy, x, size = v.dy, v.x, op.count(v.x, axes)
    mean, variance = v.statistics.mean, v.statistics.variance()
    assert mean is not None
    r = op.Reciprocal(op.Sqrt(op.Add(variance, v.epsilon)))
    dy_mean = op.ReduceMean(dy, axes, keepdims=0)
    together = op.ReduceMean(op.Mul(dy, x), axes, keepdims=0)
    slope = op.Mul(op.Sub(together, op.Mul(mean, dy_mean)), r)
    line = normalised(op, x, Channels(slope, dy_mean, mean, variance), v.epsilon)
    left, gain = op.Sub(dy, line), op.Mul(v.scale, r)
    if reads_input(x):  # its mean may be large, and is multiplied by what is left of the sum
        left = op.Sub(left, op.ReduceMean(left, axes, keepdims=1))
    dx = op.Mul(left, per_channel(op, gain, x))
    return dx, op.Mul(slope, size), op.Mul(dy_mean, size)


def _near_zero(x: ir.Value) -> bool:
    """Return whether sums of products with ``x`` as it is keep their digits."""
    return S.rank_of(x) > 1 and follows_layer(x)


GRADIENT_FORMS: Forms[ir.Value] = {
    "centered": Form(_by_centered),
    "one map": Form(_by_one_map, _near_zero),
}
GRADIENT_CHOICES: Choices[ir.Value] = [
    Choice("one map", prefers="given-means"),
    Choice("centered"),
]


def scaled_difference(
    op: OpBuilder, x: ir.Value, gain: ir.Value, axes: list[int], mean: ir.Value
) -> ir.Value:
    """Return ``gain * (x - mean(x))``; ``mean`` is what the mean is up to rounding errors."""
    facts = Scaled(x, gain, worth_a_kernel(op, x))
    return chosen(op, facts, DIFFERENCE_FORMS, DIFFERENCE_CHOICES)(op, x, gain, axes, mean)


def _subtracted(
    op: OpBuilder, x: ir.Value, gain: ir.Value, axes: list[int], mean: ir.Value
) -> ir.Value:
    return op.Mul(op.Sub(x, op.ReduceMean(x, axes, keepdims=1)), per_channel(op, gain, x))


def _mean_subtracted(
    op: OpBuilder, x: ir.Value, gain: ir.Value, axes: list[int], mean: ir.Value
) -> ir.Value:
    return op.Mul(op.Sub(x, per_channel(op, mean, x)), per_channel(op, gain, x))


def _normalised(
    op: OpBuilder, x: ir.Value, gain: ir.Value, axes: list[int], mean: ir.Value
) -> ir.Value:
    """One pass, by the operator for given statistics, with a variance of 1."""
    return _by_statistics(op, x, gain, op.ReduceMean(x, axes, keepdims=0))


def _mean_normalised(
    op: OpBuilder, x: ir.Value, gain: ir.Value, axes: list[int], mean: ir.Value
) -> ir.Value:
    return _by_statistics(op, x, gain, mean)


def _by_statistics(op: OpBuilder, x: ir.Value, gain: ir.Value, mean: ir.Value) -> ir.Value:
    zero, one = (op.const(np.full(op.static(gain) or (), v), x.dtype) for v in (0.0, 1.0))
    return op.BatchNormalization(x, gain, zero, mean, one, epsilon=0.0)


class Scaled(NamedTuple):
    """What is scaled, by what, and whether a kernel of normalisation is worth it."""

    x: ir.Value
    gain: ir.Value
    worth: bool


def _takes_statistics(v: Scaled) -> bool:
    return (
        v.worth
        and v.x.dtype == ir.DataType.FLOAT
        and S.rank_of(v.x) > 1
        and D.numbers(S.dims_of(v.gain) or (None,)) is not None
    )


DIFFERENCE_FORMS: Forms[Scaled] = {
    "subtracted": Form(_subtracted),
    "normalised": Form(_normalised, _takes_statistics),
    "mean subtracted": Form(_mean_subtracted, lambda v: S.rank_of(v.x) > 1),
    "mean normalised": Form(_mean_normalised, _takes_statistics),
}
DIFFERENCE_CHOICES: Choices[Scaled] = [
    Choice("mean normalised", prefers="given-means"),
    Choice("mean subtracted", prefers="given-means"),
    Choice("normalised", prefers="affine-in-one-pass"),
    Choice("subtracted"),
]
