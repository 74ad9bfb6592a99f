"""Softmax and its relatives."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.registry import vjp, zero_gradient

zero_gradient("Hardmax", why="the result is constant between its steps")


@vjp("Softmax")
def softmax(op, dy, x, *, y, axis):
    """``dx = y (dy - sum(dy y))`` along ``axis``."""
    if _is_guarded(y):
        y = op.Where(op.IsNaN(y), 0.0, y)
    total = op.ReduceSum(op.Mul(dy, y), [axis], keepdims=1)
    return op.Mul(y, op.Sub(dy, total))


def _is_guarded(y: ir.Value) -> bool:
    """Return whether a Where overwrites part of ``y``.

    Attention does so for rows that are masked as a whole: their softmax is NaN, their ``dy`` zero,
    and the product must not come back as NaN.
    """
    readers = [use.node for use in y.uses()]
    return any(
        n.op_type in ("Where", "IsNaN") or (n.op_type == "Cast" and _is_guarded(n.outputs[0]))
        for n in readers
    )


@vjp("LogSoftmax")
def log_softmax(op, dy, x, *, y, axis):
    """``dx = dy - e^y sum(dy)`` along ``axis``."""
    return op.Sub(dy, op.Mul(op.Exp(y), op.ReduceSum(dy, [axis], keepdims=1)))
