"""Parts of the gradient of a batch normalisation, each in a plain form and in one for CPUs."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.autodiff.rules.norm import center, per_channel
from onnxtrain.autodiff.variants import Choice, Choices, Form, Forms, chosen
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.modes.batch_statistics import (
    mean_and_variance,
    puts_out_batch_statistics,
    worth_a_kernel,
)
from onnxtrain.graph.shapes import dims as D

Statistics = tuple[ir.Value, Callable[[], ir.Value]]


def statistics(op: OpBuilder, x: ir.Value, axes: list[int], node: ir.Node) -> Statistics:
    """Return ``xc = x - mean(x)``, and what emits ``mean(xc^2)`` where that is needed."""
    return chosen(op, node, STATISTICS_FORMS, STATISTICS_CHOICES)(op, x, axes, node)


def _computed(op: OpBuilder, x: ir.Value, axes: list[int], node: ir.Node) -> Statistics:
    if op.rank(x) < 2:  # a vector is one channel
        centered = center(op, x, axes)
        return centered, lambda: op.ReduceMean(op.Mul(centered, centered), axes, keepdims=0)
    mean, variance = mean_and_variance(op, x)
    return op.Sub(x, mean), lambda: op.Reshape(variance, [-1])


def _outputs_of_node(op: OpBuilder, x: ir.Value, axes: list[int], node: ir.Node) -> Statistics:
    mean, variance = (op.cast(op.extra_output(node, i), x.dtype) for i in (1, 2))
    return op.Sub(x, spread(op, mean, x)), lambda: variance


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


def scaled_difference(
    op: OpBuilder, x: ir.Value, gain: ir.Value, axes: list[int], mean: ir.Value | None = None
) -> ir.Value:
    """Return ``gain * (x - mean(x))``; ``mean`` is given per channel, or computed."""
    if op.rank(x) < 2:  # a vector is one channel
        mean = None
    if not worth_a_kernel(op, x):
        return _subtracted(op, x, gain, axes, mean)
    return chosen(op, (x, gain), DIFFERENCE_FORMS, DIFFERENCE_CHOICES)(op, x, gain, axes, mean)


def _subtracted(
    op: OpBuilder, x: ir.Value, gain: ir.Value, axes: list[int], mean: ir.Value | None
) -> ir.Value:
    less = op.ReduceMean(x, axes, keepdims=1) if mean is None else per_channel(op, mean, x)
    return op.Mul(op.Sub(x, less), per_channel(op, gain, x))


def _normalised(
    op: OpBuilder, x: ir.Value, gain: ir.Value, axes: list[int], mean: ir.Value | None
) -> ir.Value:
    """One pass, by the operator for given statistics, with a variance of 1."""
    zero, one = (op.const(np.full(op.static(gain) or (), v), x.dtype) for v in (0.0, 1.0))
    mean = op.ReduceMean(x, axes, keepdims=0) if mean is None else mean
    return op.BatchNormalization(x, gain, zero, mean, one, epsilon=0.0)


Scaled = tuple[ir.Value, ir.Value]  # x and gain

DIFFERENCE_FORMS: Forms[Scaled] = {
    "subtracted": Form(_subtracted),
    "normalised": Form(
        _normalised,
        lambda v: (
            v[0].dtype == ir.DataType.FLOAT
            and S.rank_of(v[0]) > 1
            and D.numbers(S.dims_of(v[1]) or (None,)) is not None
        ),
    ),
}
DIFFERENCE_CHOICES: Choices[Scaled] = [
    Choice("normalised", prefers="affine-in-one-pass"),
    Choice("subtracted"),
]
