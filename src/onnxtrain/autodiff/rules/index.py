"""Gathering by index: the gradient is scattered and added up."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.autodiff.registry import vjp, vjp_multi
from onnxtrain.autodiff.rules.known_indices import (
    equal_axes,
    inverse,
    known_integers,
    repeats,
)
from onnxtrain.graph.builder import size_arithmetic as Z
from onnxtrain.graph.builder.size_arithmetic import Size

_NARROW = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


@vjp("Gather")
def gather(op, dy, data, indices, *, axis):
    """Add ``dy`` to the slices it came from.

    What is read by one index is added up first. Of indices that are known before a run, those in a
    row need a Pad only, and those that read each slice once another Gather.
    """
    axis %= op.rank(data)
    total, indices = _repeats_added(op, dy, indices, axis)
    known = known_integers(indices, op.opset)
    out = None
    if known is not None and known.size:
        equal = equal_axes(known)
        if equal:
            total = op.ReduceSum(widened(op, total), [axis + a for a in equal], keepdims=1)
            known = known[tuple(slice(1) if a in equal else slice(None) for a in range(known.ndim))]
            indices = op.const(known)
        out = _placed(op, total, data, known, axis)
    if out is None:
        out = scatter_rows(op, indices, total, data, axis)
    return op.cast(out, dy.dtype)


def _repeats_added(op, dy, indices: ir.Value, axis: int) -> tuple[ir.Value, ir.Value]:
    """Return the gradient added up where indices were repeated, and the indices before that."""
    shared = repeats(indices)
    if shared is None:
        return dy, indices
    source, new, inner = shared
    axes = [axis + i for i in (*range(new), *(new + i for i in inner))]
    if not axes:
        return dy, source
    total = op.ReduceSum(widened(op, dy), axes, keepdims=0 if new else 1)
    if new and inner:
        total = op.Unsqueeze(total, [axis + i for i in inner])
    return total, source


def _placed(op, dy, data, known: np.ndarray, axis: int) -> ir.Value | None:
    """Return slices put where they belong without scattering, ``None`` if that cannot be done."""
    rank, run = op.rank(data), _run(known)
    back = None if run else inverse(known, op.dims(data)[axis])
    if run is None and back is None:
        return None
    line = _in_line(op, dy, known, axis)
    if run is None:
        return op.Gather(line, back, axis=axis)
    start, length = run
    size = op.size(data, axis)
    before = start if start >= 0 else Z.plus(op, size, start)
    pads: list[Size] = [0] * 2 * rank
    pads[axis] = before
    pads[axis + rank] = Z.minus(op, Z.minus(op, size, before), length)
    return op.Pad(line, op.vector(pads))


def _in_line(op, dy, known: np.ndarray, axis: int) -> ir.Value:
    """Return the gradient with all axes of the indices as one."""
    k = known.ndim
    if k == 1:
        return dy
    if k == 0:
        return op.Unsqueeze(dy, [axis])
    ones = [axis + a for a, size in enumerate(known.shape) if size == 1]
    if len(ones) >= k - 1:
        return op.Squeeze(dy, ones[: k - 1])
    lead, tail = range(axis), range(axis + k, op.rank(dy))
    sizes = [op.size(dy, a) for a in lead], [op.size(dy, a) for a in tail]
    return op.reshape(dy, [*sizes[0], known.size, *sizes[1]])


@vjp("GatherElements")
def gather_elements(op, dy, data, indices, *, axis):
    """Add ``dy`` to the elements it came from."""
    wide = widened(op, dy)
    zeros = zeros_like(op, data, wide.dtype)
    return op.cast(op.ScatterElements(zeros, indices, wide, axis=axis, reduction="add"), dy.dtype)


@vjp("GatherND")
def gather_nd(op, dy, data, indices, *, batch_dims):
    """Add ``dy`` to the slices it came from; with one index each, as of Gather."""
    if not batch_dims and op.dims(indices)[-1] == 1:
        return gather(op, dy, data, op.Squeeze(indices, [-1]), axis=0)
    wide = widened(op, dy)
    where = with_batch_indices(op, indices, batch_dims)
    zeros = zeros_like(op, data, wide.dtype)
    return op.cast(op.ScatterND(zeros, where, wide, reduction="add"), dy.dtype)


@vjp_multi("TopK")
def top_k(op, dys, x, k, *, axis, node):
    """Put the gradient of the values back to where they were found.

    Among equal values the one that the runtime chose gets the gradient.
    """
    if dys[0] is None:
        return None
    return op.ScatterElements(op.zeros_like(x), op.extra_output(node, 1), dys[0], axis=axis)


@vjp_multi("Unique")
def unique(op, dys, x, *, axis, node):
    """Put the gradient back to the first occurrence of each value.

    This is the derivative wherever all values differ. Where some are equal, the number of outputs
    jumps, and the first occurrence stands for all.
    """
    if dys[0] is None:
        return None
    first = op.extra_output(node, 1)
    if axis is None:
        return scatter_flat(op, first, dys[0], x)
    return scatter_rows(op, first, dys[0], x, axis, unique=True)


def _narrow(indices: ir.Value) -> ir.Value:
    """Return indices as they were before a cast from int32: GPUs may move no int64."""
    source = indices.producer()
    if source is None or source.op_type != "Cast":
        return indices
    given = source.inputs[0]
    return given if given is not None and given.dtype == ir.DataType.INT32 else indices


def scatter_rows(op, indices, dy, data, axis, *, unique: bool = False) -> ir.Value:
    """Return zeros like ``data`` with the slices of ``dy`` added at ``indices`` along ``axis``."""
    rank, k = op.rank(data), op.rank(indices)
    axis %= rank
    # ScatterND writes along leading axes, so the gathered axis goes to the front.
    to_front = [axis, *(i for i in range(rank) if i != axis)]
    wide = dy if unique else widened(op, dy)
    if axis:
        lead = [*range(axis, axis + k), *range(axis), *range(axis + k, rank + k - 1)]
        wide = op.Transpose(wide, perm=lead)
        zeros = op.full([op.size(data, a) for a in to_front], 0.0, wide.dtype)
    else:
        zeros = zeros_like(op, data, wide.dtype)
    where = op.cast(op.Unsqueeze(_narrow(indices), [-1]), ir.DataType.INT64)
    out = op.ScatterND(zeros, where, wide, reduction=None if unique else "add")
    if axis:
        out = op.Transpose(out, perm=[to_front.index(i) for i in range(rank)])
    return op.cast(out, dy.dtype)


def scatter_flat(op, where, dy, x, *, unique: bool = True) -> ir.Value:
    """Return zeros like ``x`` with ``dy`` added at ``where``, as :func:`positions` counts."""
    wide = dy if unique else widened(op, dy)
    zeros = op.full([_count(op, x)], 0.0, wide.dtype)
    where, flat = op.Reshape(where, [-1]), op.Reshape(wide, [-1])
    out = op.ScatterElements(zeros, where, flat, axis=0, reduction=None if unique else "add")
    return op.reshape_like(op.cast(out, dy.dtype), x)


def positions(op, x) -> ir.Value:
    """Return an int64 tensor of the shape of ``x`` that counts its elements."""
    count = _count(op, x)
    # A long constant would be stored in the file.
    long = isinstance(count, int) and count > T.STORED_POSITIONS
    line = op.Range(0, count, 1) if long else op.iota(count)
    return op.Reshape(line, op.shape_of(x), allowzero=1)


def with_batch_indices(op, indices, batch_dims: int) -> ir.Value:
    """Put the batch coordinates in front of the indices of GatherND, as if it had no batch."""
    if not batch_dims:
        return indices
    rank = op.rank(indices)
    sizes = [op.size(indices, a) for a in range(rank - 1)]
    grids = []
    for axis in range(batch_dims):
        line = op.reshape(op.iota(sizes[axis]), [1] * axis + [-1] + [1] * (rank - 1 - axis))
        grids.append(op.Expand(line, op.vector([*sizes, 1])))
    return op.Concat(*grids, indices, axis=-1)


def zeros_like(op, x: ir.Value, dtype: ir.DataType | None) -> ir.Value:
    """Return zeros of the shape of ``x`` in another dtype."""
    zeros = op.full(op.shape_of(x), 0.0, dtype)
    zeros.shape = x.shape
    return zeros


def widened(op, x: ir.Value) -> ir.Value:
    """Return a half-precision value in float32, in which sums are made (and have CPU kernels)."""
    return op.Cast(x, to=ir.DataType.FLOAT) if x.dtype in _NARROW else x


def _count(op, x: ir.Value) -> Size:
    dims = op.static(x)
    return op.Reshape(op.Size(x), [1]) if dims is None else math.prod(dims)


def _run(indices: np.ndarray) -> tuple[int, int] | None:
    """Return start and length if constant indices are one or several in a row, all of one sign."""
    flat = indices.reshape(-1)
    in_row = np.all(np.diff(flat) == 1) and (flat[0] >= 0 or flat[-1] < 0)
    return (int(flat[0]), flat.size) if in_row else None
