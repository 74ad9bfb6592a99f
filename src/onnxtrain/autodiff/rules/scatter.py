"""Writing by index, with every reduction.

With ``reduction="none"`` the standard forbids an index that occurs twice; the rules rely on that.
With ``max`` and ``min``, all that equal the result share its gradient evenly, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from onnxtrain.autodiff.registry import vjp
from onnxtrain.autodiff.rules.index import widened
from onnxtrain.graph.prepare.decompositions.tensor_scatter import written

Scatter = Callable[..., Any]
Gather = Callable[[ir.Value], ir.Value]


@vjp("ScatterElements")
def scatter_elements(op, dy, data, indices, updates, *, y, axis, reduction):
    """``dupdates`` is gathered from ``dy``; ``ddata`` is ``dy`` where data was kept."""

    def scatter(into, values, how="none"):
        return op.ScatterElements(into, indices, values, axis=axis, reduction=how)

    def gather(source):
        out = op.GatherElements(source, indices, axis=axis)
        out.shape = updates.shape
        return out

    return _scattered(op, dy, data, updates, y, reduction, scatter, gather)


@vjp("ScatterND")
def scatter_nd(op, dy, data, indices, updates, *, y, reduction):
    """``dupdates`` is gathered from ``dy``; ``ddata`` is ``dy`` where data was kept."""

    def scatter(into, values, how="none"):
        return op.ScatterND(into, indices, values, reduction=how)

    def gather(source):
        out = op.GatherND(source, indices)
        out.shape = updates.shape
        return out

    return _scattered(op, dy, data, updates, y, reduction, scatter, gather)


@vjp("TensorScatter")
def tensor_scatter(op, dy, past_cache, update, write_indices=None, *, axis, mode):
    """As ScatterElements without reduction."""
    where = written(op, past_cache, update, write_indices, axis, mode)
    kept = op.ScatterElements(dy, where, op.zeros_like(update), axis=axis)
    taken = op.GatherElements(dy, where, axis=axis)
    taken.shape = update.shape
    return kept, taken


def _scattered(op, dy, data, updates, y, reduction: str, scatter: Scatter, gather: Gather):
    if reduction == "none":
        return scatter(dy, op.zeros_like(updates)), None, gather(dy)
    if reduction == "add":
        return dy, None, gather(dy)
    if reduction == "mul":
        return _product(op, dy, data, updates, scatter, gather)
    return _extremum(op, dy, data, updates, y, scatter, gather)


def _extremum(op, dy, data, updates, y, scatter: Scatter, gather: Gather):
    """Share ``dy`` between all that equal the largest (smallest) one."""
    kept = op.Equal(data, y)
    chosen = op.Equal(updates, gather(y))
    counted = ir.DataType.DOUBLE if dy.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    sharing = scatter(op.Cast(kept, to=counted), op.Cast(chosen, to=counted), "add")
    share = op.Div(dy, op.cast(sharing, dy.dtype))
    return op.Where(kept, share, 0.0), None, op.Where(chosen, gather(share), 0.0)


def _product(op, dy, data, updates, scatter: Scatter, gather: Gather):
    """``ddata = dy * p`` and ``dupdate = dy * data * others``.

    Here p is the product of all updates at a place, and others that of all but one: ``p / update``;
    for an update of zero, the product of those that are not zero, or zero if a second one is zero.
    Where two zeros meet at one place this is right, but its own derivative is not (as in torch).
    """
    wide = widened(op, updates)
    ones = op.full(op.shape_of(data), 1.0, wide.dtype)
    zero = op.Equal(wide, 0.0)
    nonzero = op.Where(zero, 1.0, wide)
    zeros = scatter(
        op.full(op.shape_of(data), 0.0, wide.dtype), op.Cast(zero, to=wide.dtype), "add"
    )
    product = scatter(ones, wide, "mul")
    others_of_zero = op.Where(op.Greater(zeros, 1.5), 0.0, scatter(ones, nonzero, "mul"))
    others = op.Where(zero, gather(others_of_zero), op.Div(gather(product), nonzero))
    ddata = op.Mul(dy, op.cast(product, dy.dtype))
    return ddata, None, op.Mul(gather(op.Mul(dy, data)), op.cast(others, dy.dtype))
