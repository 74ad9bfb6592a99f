"""Pad, in all modes."""

from __future__ import annotations

from typing import Literal

import numpy as np

from onnxtrain.autodiff.registry import undefined, vjp
from onnxtrain.autodiff.rules.index import positions, scatter_flat, widened

_END = 2**63 - 1
Mode = Literal["reflect", "edge", "wrap"]


@vjp("Pad")
def pad(op, dy, x, pads, constant_value=None, axes=None, *, mode):
    """Cut the padding off; what it repeats of ``x`` is added to where it came from."""
    if op.rank(x) == 0:
        return dy
    if mode == "constant":
        dx = _crop(op, dy, x, pads, axes)
        if constant_value is None:
            return dx
        # 1 on the padding, 0 inside
        border = op.Pad(op.zeros_like(x), pads, 1.0, axes)
        total = op.ReduceSum(op.Mul(dy, border), keepdims=0)
        return dx, None, op.reshape_like(total, constant_value)
    amounts = _amounts(op, x, pads, axes)
    if amounts is None or not all(
        isinstance(op.dims(x)[a], int) and min(pair) >= 0 for a, pair in amounts.items()
    ):
        # pad the positions in the same way, and add the gradient up by them
        source = op.Pad(positions(op, x), pads, None, axes, mode=mode)
        return scatter_flat(op, source, dy, x, unique=False)
    grad = widened(op, dy)
    for axis, (before, after) in amounts.items():
        if before or after:
            grad = _fold_back(op, grad, axis, op.dims(x)[axis], before, after, mode)
    return op.cast(grad, dy.dtype)


def _crop(op, dy, x, pads, axes):
    """Undo constant padding: cut off what was added, put zeros where something was cut off."""
    amounts = _amounts(op, x, pads, axes)
    if amounts is None:
        return _crop_at_run_time(op, dy, pads, axes)
    added = {a: (max(b, 0), max(e, 0)) for a, (b, e) in amounts.items() if b > 0 or e > 0}
    removed = [0] * 2 * op.rank(x)
    for axis, (before, after) in amounts.items():
        size = op.dims(x)[axis]
        if isinstance(size, int) and (before + size < 0 or after + size < 0):
            return undefined(f"axis {axis} of size {size} is padded by {before} and {after}")
        removed[axis], removed[axis + op.rank(x)] = max(-before, 0), max(-after, 0)
    if added:
        starts = [before for before, _ in added.values()]
        ends = [-after if after else _END for _, after in added.values()]
        dy = op.Slice(dy, starts, ends, list(added))
    if any(removed):
        dy = op.Pad(dy, removed)
    elif added:
        dy.shape = x.shape
    return dy


def _crop_at_run_time(op, dy, pads, axes):
    """The same with nodes; nobody checks that no more is cut off than there is."""
    n = op.rank(dy) if axes is None else op.dims(axes)[0]
    sizes = op.shape_of(dy) if axes is None else op.Gather(op.shape_of(dy), axes)
    added = op.Max(pads, 0)
    before, after = op.Split(added, axis=0, num_outputs=2, _outputs=2)
    where = op.const(list(range(n))) if axes is None else axes
    inside = op.Slice(dy, before, op.Sub(sizes, after), where)
    return op.Pad(inside, op.Sub(added, pads), None, axes)


def _amounts(op, x, pads, axes) -> dict[int, tuple[int, int]] | None:
    """Return (before, after) by axis, ``None`` if they are only known at run time."""
    amounts = op.constant(pads)
    where = op.axes(axes, op.rank(x))
    if amounts is None or where is None:
        return None
    n = len(where)
    return {a: (int(amounts[i]), int(amounts[i + n])) for i, a in enumerate(where)}


def _fold_back(op, dy, axis: int, size: int, before: int, after: int, mode: Mode):
    """Undo padding along one axis: the inside, plus the border added to where it was taken from."""
    source = np.pad(np.arange(size), (before, after), mode=mode)
    border = [*range(before), *range(before + size, before + size + after)]
    inside = op.Slice(dy, [before], [before + size], [axis])
    strip = op.Gather(dy, border, axis=axis)
    line = op.reshape(
        op.const(source[border].astype(np.int64)),
        [1] * axis + [-1] + [1] * (op.rank(dy) - 1 - axis),
    )
    where = op.expand_like(line, strip)
    return op.ScatterElements(inside, where, strip, axis=axis, reduction="add")
