"""Reductions and running sums."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.lowering.registry import lower


@lower(
    *(
        f"Reduce{r}"
        for r in [
            "L1",
            "L2",
            "LogSum",
            "LogSumExp",
            "Max",
            "Mean",
            "Min",
            "Prod",
            "Sum",
            "SumSquare",
        ]
    )
)
def over_no_axes(op, x, axes=None, *, keepdims, noop_with_empty_axes, node):
    """With ``noop_with_empty_axes`` and none given, only the elementwise part is left."""
    chosen = op.axes(axes, op.rank(x)) if axes is not None else []
    if not noop_with_empty_axes or chosen != []:
        return None
    kind = node.op_type.removeprefix("Reduce")
    if kind in ("L1", "L2"):
        return op.Abs(x)
    if kind == "LogSum":
        return op.Log(x)
    return op.Mul(x, x) if kind == "SumSquare" else op.Identity(x)


@lower("ReduceL2")
def reduce_l2(op, x, axes=None, *, keepdims, noop_with_empty_axes):
    """``sqrt(sum(x^2))``."""
    if noop_with_empty_axes:
        return None
    return op.Sqrt(op.ReduceSum(op.Mul(x, x), axes, keepdims=keepdims))


@lower("ReduceL1")
def reduce_l1(op, x, axes=None, *, keepdims, noop_with_empty_axes):
    """``sum(|x|)``."""
    return None if noop_with_empty_axes else op.ReduceSum(op.Abs(x), axes, keepdims=keepdims)


@lower("ReduceSumSquare")
def reduce_sum_square(op, x, axes=None, *, keepdims, noop_with_empty_axes):
    """``sum(x^2)``."""
    return None if noop_with_empty_axes else op.ReduceSum(op.Mul(x, x), axes, keepdims=keepdims)


@lower("ReduceLogSum")
def reduce_log_sum(op, x, axes=None, *, keepdims, noop_with_empty_axes):
    """``log(sum(x))``."""
    return None if noop_with_empty_axes else op.Log(op.ReduceSum(x, axes, keepdims=keepdims))


@lower("ReduceLogSumExp")
def reduce_log_sum_exp(op, x, axes=None, *, keepdims, noop_with_empty_axes):
    """``log(sum(exp(x - max))) + max``."""
    if noop_with_empty_axes:
        return None
    top = op.ReduceMax(x, axes, keepdims=1)
    total = op.Log(op.ReduceSum(op.Exp(op.Sub(x, top)), axes, keepdims=keepdims))
    return op.Add(total, top if keepdims else op.ReduceMax(x, axes, keepdims=0))


@lower("ReduceMean")
def reduce_mean(op, x, axes=None, *, keepdims, noop_with_empty_axes):
    """``sum(x) / count``; the count has to be known."""
    chosen = op.axes(axes, op.rank(x))
    if noop_with_empty_axes or chosen is None:
        return None
    sizes = [op.dims(x)[a] for a in chosen]
    if not all(isinstance(s, int) and s for s in sizes):
        return None
    total = op.ReduceSum(x, axes, keepdims=keepdims)
    return op.Mul(total, 1.0 / float(np.prod(sizes)))


@lower("ReduceMax", "ReduceMin")
def of_booleans(op, x, axes=None, *, keepdims, noop_with_empty_axes, node):
    """Any and all of booleans, as numbers."""
    if x.dtype != ir.DataType.BOOL or noop_with_empty_axes:
        return None
    y = op.emit(node.op_type, op.Cast(x, to=ir.DataType.INT32), axes, keepdims=keepdims)
    return op.Cast(y, to=ir.DataType.BOOL)


@lower("ReduceMax", "ReduceMin")
def of_integers(op, x, axes=None, *, keepdims, noop_with_empty_axes, node):
    """Small integers by way of int32, others have to be known to the target."""
    if x.dtype not in (ir.DataType.INT8, ir.DataType.UINT8) or noop_with_empty_axes:
        return None
    y = op.emit(node.op_type, op.Cast(x, to=ir.DataType.INT32), axes, keepdims=keepdims)
    return op.Cast(y, to=x.dtype)


@lower("GlobalAveragePool")
def global_average_pool(op, x):
    """The mean over all axes behind the channels."""
    return op.ReduceMean(x, list(range(2, op.rank(x))), keepdims=1)


@lower("GlobalMaxPool")
def global_max_pool(op, x):
    """The largest over all axes behind the channels."""
    return op.ReduceMax(x, list(range(2, op.rank(x))), keepdims=1)


@lower("CumSum")
def cum_sum(op, x, axis, *, exclusive, reverse):
    """Add shifted copies: after shifts by 1, 2, 4 ... each element has all before it.

    No product with a triangular matrix, in which 0 times infinity would spoil other elements.
    """
    where = op.constant(axis)
    if where is None:
        return None
    at = int(where.reshape(())) % op.rank(x)
    n = op.dims(x)[at]
    if not isinstance(n, int) or n < 1 + bool(exclusive):
        return None

    def shifted(v, k):
        kept = op.Slice(v, [k], [n], [at]) if reverse else op.Slice(v, [0], [n - k], [at])
        return op.Pad(kept, [0, k] if reverse else [k, 0], op.const(0, x.dtype), [at])

    y, k = x, 1
    while k < n:
        y = op.Add(y, shifted(y, k))
        k *= 2
    if exclusive:
        y = shifted(y, 1)
    return op.Identity(y) if y is x else y
