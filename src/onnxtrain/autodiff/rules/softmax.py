"""Softmax and its relatives."""

from __future__ import annotations

from onnxtrain.autodiff.registry import vjp, zero_gradient

zero_gradient("Hardmax", why="the result is constant between its steps")


@vjp("Softmax")
def softmax(op, dy, x, *, y, axis):
    """``dx = y (dy - sum(dy y))`` along ``axis``."""
    total = op.ReduceSum(op.Mul(dy, y), [axis], keepdims=1)
    return op.Mul(y, op.Sub(dy, total))


@vjp("LogSoftmax")
def log_softmax(op, dy, x, *, y, axis):
    """``dx = dy - e^y sum(dy)`` along ``axis``."""
    return op.Sub(dy, op.Mul(op.Exp(y), op.ReduceSum(dy, [axis], keepdims=1)))
