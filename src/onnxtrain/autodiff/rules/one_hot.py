"""Tensors made from a few numbers."""

from __future__ import annotations

from onnxtrain.autodiff.registry import vjp


@vjp("OneHot", constant_inputs={0: "indices have no gradient", 1: "the depth is a size"})
def one_hot(op, dy, indices, depth, values, *, axis):
    """The sum of ``dy`` over the cold places, and over the hot ones."""
    totals = []
    for pair in ([1, 0], [0, 1]):
        place = op.OneHot(indices, depth, op.const(pair, values.dtype), axis=axis)
        totals.append(op.ReduceSum(op.Mul(dy, place), keepdims=0))
    return None, None, op.Concat(*(op.Unsqueeze(t, [0]) for t in totals), axis=0)


@vjp("Range", constant_inputs={1: "the limit only decides on the size"})
def range_(op, dy, start, limit, delta):
    """``y[i] = start + i * delta``."""
    i = op.cast(op.iota(op.size(dy, 0)), dy.dtype)
    return op.ReduceSum(dy, keepdims=0), None, op.ReduceSum(op.Mul(dy, i), keepdims=0)
