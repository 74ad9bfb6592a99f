"""Softmax and its kin."""

from __future__ import annotations

from onnxtrain.lowering.registry import lower


@lower("Softmax", "LogSoftmax", "Hardmax")
def along_the_last_axis(op, x, *, axis, node):
    """Before opset 13 these flatten all axes from ``axis`` on: make it the last one."""
    last = op.rank(x) - 1
    if axis % op.rank(x) == last:
        return None
    moved = op.emit(node.op_type, op.move_axis(x, axis, last), axis=last)
    return op.move_axis(moved, last, axis)


@lower("LogSoftmax")
def log_softmax(op, x, *, axis):
    """``z - log(sum(exp(z)))`` with ``z = x - max(x)``."""
    z = op.Sub(x, op.ReduceMax(x, [axis], keepdims=1))
    return op.Sub(z, op.Log(op.ReduceSum(op.Exp(z), [axis], keepdims=1)))


@lower("Softmax")
def softmax(op, x, *, axis):
    """``exp(z) / sum(exp(z))`` with ``z = x - max(x)``."""
    e = op.Exp(op.Sub(x, op.ReduceMax(x, [axis], keepdims=1)))
    return op.Div(e, op.ReduceSum(e, [axis], keepdims=1))
