"""Pad by slices that are joined."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.lowering.registry import lower


@lower("Pad")
def pad(op, x, pads, value=None, axes=None, *, mode):
    """Axis after axis: what is cut off, then what is added in front and behind."""
    amounts = op.constant(pads)
    chosen = op.axes(axes, op.rank(x)) if axes is not None else list(range(op.rank(x)))
    filler = op.constant(value) if value is not None else np.zeros(())
    if amounts is None or chosen is None or (mode == "constant" and filler is None):
        return None
    count = len(chosen)
    y = x
    for i, axis in enumerate(chosen):
        before, after = int(amounts[i]), int(amounts[i + count])
        if before or after:
            y = _along(op, y, axis, before, after, mode, filler)
            if y is None:
                return None
    return op.Identity(x) if y is x else y


def _along(
    op: OpBuilder, x: ir.Value, axis: int, before: int, after: int, mode: str, filler
) -> ir.Value | None:
    n = op.dims(x)[axis]
    if before < 0 or after < 0:
        end = np.iinfo(np.int64).max if after >= 0 else after
        x = op.Slice(x, [max(-before, 0)], [end], [axis])
        before, after = max(before, 0), max(after, 0)
        n = op.dims(x)[axis]
    parts = [x]
    if mode == "constant":
        for count, front in ((before, True), (after, False)):
            if count:
                block = _block(op, x, axis, count, filler)
                if block is None:
                    return None
                parts.insert(0 if front else len(parts), block)
    elif isinstance(n, int):
        padding: Any = mode
        where = np.pad(np.arange(n), (before, after), mode=padding)
        front = [_one(op, x, axis, int(w)) for w in where[:before]]
        back = [_one(op, x, axis, int(w)) for w in where[before + n :]]
        parts = [*front, x, *back]
    elif mode == "edge":
        first = _one(op, x, axis, 0)
        last = op.Slice(x, [-1], [np.iinfo(np.int64).max], [axis])
        parts = [*[first] * before, x, *[last] * after]
    elif mode == "reflect":
        front = [_one(op, x, axis, i) for i in range(before, 0, -1)]
        back = [op.Slice(x, [-i - 1], [-i], [axis]) for i in range(1, after + 1)]
        parts = [*front, x, *back]
    else:
        return None
    return op.Concat(*parts, axis=axis) if len(parts) > 1 else x


def _one(op: OpBuilder, x: ir.Value, axis: int, i: int) -> ir.Value:
    return op.Slice(x, [i], [i + 1], [axis])


def _block(op: OpBuilder, x: ir.Value, axis: int, count: int, filler) -> ir.Value | None:
    """Return ``count`` slices of one value."""
    assert x.dtype is not None
    dims: list[Any] = list(op.dims(x))
    dims[axis] = count
    number = np.asarray(filler).reshape(())
    if all(isinstance(d, int) for d in dims):
        return op.const(np.full(dims, number), x.dtype)
    sizes = [count if i == axis else op.size(x, i) for i in range(len(dims))]
    one = op.const(np.full([1] * len(dims), number), x.dtype)
    return op.Tile(one, op.vector(sizes))
