"""Slice and Compress: parts of a tensor."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxtrain.autodiff.registry import vjp
from onnxtrain.autodiff.rules.index import positions, scatter_flat, scatter_rows
from onnxtrain.graph.builder import size_arithmetic as Z
from onnxtrain.graph.builder.size_arithmetic import Size


@vjp("Slice")
def slice_(op, dy, x, starts, ends, axes=None, steps=None):
    """Put the gradient back to where it was cut out, zeros elsewhere.

    Along an axis with step s: spread ``dy`` to one element in s, at the place among these where the
    slice starts, then pad it to the old size. So slices that take turns lie side by side.
    """
    cuts = _cuts(op, dy, x, starts, axes, steps)
    if cuts is None:  # axes or steps are only known at run time: cut the positions in the same way
        picked = op.Slice(positions(op, x), starts, ends, axes, steps)
        return scatter_flat(op, picked, dy, x)
    backwards = [c.axis for c in cuts if c.step < 0]
    if backwards:
        n = len(backwards)
        kept, dy = dy.shape, op.Slice(dy, [-1] * n, [-(2**63) + 1] * n, backwards, [-1] * n)
        dy.shape = kept
    dy = _spread(op, dy, {c.axis: (abs(c.step), c.phase) for c in cuts if abs(c.step) > 1})
    cropped = {c.axis: c.room for c in cuts if c.room is not None}
    if cropped:
        dy = op.Slice(dy, [0] * len(cropped), op.vector(list(cropped.values())), list(cropped))
    pads: list[Size] = [0] * 2 * op.rank(x)
    for c in cuts:
        pads[c.axis], pads[c.axis + op.rank(x)] = c.before, c.after
    return op.Pad(dy, op.vector(pads)) if any(p != 0 for p in pads) else dy


@vjp("Compress")
def compress(op, dy, x, condition, *, axis):
    """Put the gradient back to the elements or slices that were kept."""
    if axis is None:
        kept = op.Compress(op.Reshape(positions(op, x), [-1]), condition, axis=0)
        return scatter_flat(op, kept, dy, x)
    kept = op.Compress(op.iota(op.size(x, axis)), condition, axis=0)
    return scatter_rows(op, kept, dy, x, axis, unique=True)


@dataclasses.dataclass(frozen=True)
class _Cut:
    axis: int
    step: int
    before: Size
    after: Size
    room: Size | None = None
    """How much fits behind ``before``, if the zeros behind the last element may be too many."""
    phase: int = 0
    """How many of the zeros between two elements stand before the first one of them."""


def _cuts(op, dy, x, starts, axes, steps) -> list[_Cut] | None:
    """Return for each sliced axis its step and the padding that restores its size."""
    rank = op.rank(x)
    count = op.dims(starts)[0]
    if not isinstance(count, int):
        return None
    where = list(range(count)) if axes is None else op.axes(axes, rank)
    step = op.constant(steps)
    if where is None or (steps is not None and step is None):
        return None
    strides = [1] * count if step is None else [int(s) for s in step]
    return [_cut(op, dy, x, where[i], strides[i], Z.element(op, starts, i)) for i in range(count)]


def _cut(op, dy, x, axis: int, step: int, start: Size) -> _Cut:
    size, kept = op.size(x, axis), op.size(dy, axis)
    if abs(step) == 1 and op.dims(x)[axis] == op.dims(dy)[axis]:
        return _Cut(axis, step, 0, 0)
    if isinstance(start, int):
        start = Z.plus(op, size, start) if start < 0 else start
    else:
        start = op.Where(op.Less(start, [0]), op.Add(start, op.vector([size])), start)
    start = Z.at_least(op, start, 0)
    if step > 0:
        before = Z.at_most(op, start, size)
    else:
        # the last element taken is the first one in memory; nothing is taken from an empty axis
        start = Z.at_most(op, start, Z.plus(op, size, -1))
        before = Z.minus(op, start, Z.times(op, Z.plus(op, kept, -1), -step))
        before = Z.at_most(op, before, size)
    phase = before % abs(step) if isinstance(before, int) else 0
    before = Z.plus(op, before, -phase) if phase else before
    room = Z.minus(op, size, before)
    after = Z.minus(op, room, Z.times(op, kept, abs(step)))
    if abs(step) == 1 or (isinstance(after, int) and after >= 0):
        return _Cut(axis, step, before, after, phase=phase)
    return _Cut(axis, step, before, Z.at_least(op, after, 0), room, phase)


def _spread(op, dy, steps: dict[int, tuple[int, int]]) -> ir.Value:
    """Put ``step - 1`` zeros around every element along the given axes, ``phase`` before it."""
    if not steps:
        return dy
    rank = op.rank(dy)
    order = sorted(steps)
    at = [a + i + 1 for i, a in enumerate(order)]  # where the zeros' axes come to lie
    wide = op.Unsqueeze(dy, at)
    pads = [0] * 2 * (rank + len(at))
    for i, a in zip(at, order, strict=True):
        step, phase = steps[a]
        pads[i], pads[i + rank + len(at)] = phase, step - 1 - phase
    sizes = [Z.times(op, op.size(dy, a), steps.get(a, (1, 0))[0]) for a in range(rank)]
    return op.Reshape(op.Pad(wide, pads), op.vector(sizes), allowzero=1)  # may be empty
