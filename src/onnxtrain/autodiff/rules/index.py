"""Gather, scatter and slice: the gradient of reading by index is a scatter-add.

Indices that are known at build time need no scatter. Position and token-type embeddings, and window
tables of vision models, are often read by indices that the file computes from constants or repeats
for each row of a batch. Slices read by the same index are summed first; a contiguous run of indices
is a Slice of the table.

The file also has TopK and Unique, OneHot and Range, Slice and Compress, and the Scatter operators
with every reduction. With ``reduction="none"`` the standard forbids duplicate indices, and the
rules rely on that. With ``max`` and ``min``, all elements equal to the result share its gradient
evenly, as in torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.autodiff.rule_registry import vjp, vjp_multi
from onnxtrain.expand.indexing import write_positions
from onnxtrain.graph import builder as Z
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import Size
from onnxtrain.graph.nodes import is_op

_INTEGERS = frozenset({ir.DataType.INT32, ir.DataType.INT64})
_EXACT = frozenset(
    (
        *("Add", "Cast", "Concat", "ConstantOfShape", "Expand", "Flatten", "Gather"),
        *("GatherElements", "Identity", "Mul", "Neg", "Range", "Reshape", "Slice", "Squeeze"),
        *("Sub", "Tile", "Transpose", "Unsqueeze"),
    )
)


def constant_integers(x: ir.Value | None, opset: int) -> np.ndarray | None:
    """Return the integers that a value holds in every run, ``None`` if they are not known."""
    if x is None or x.dtype not in _INTEGERS:
        return None
    chain = _chain(x)
    if chain is None:
        return None
    return S.constant_of(x) if not chain else _evaluate(x, chain, opset)


def expand_pattern(x: ir.Value) -> tuple[ir.Value, int, list[int]] | None:
    """Return the input of an Expand, its number of new axes, and the axes it repeats."""
    node = x.producer()
    if node is None or not is_op(node, "Expand"):
        return None
    source = node.inputs[0]
    have, want = (None, None) if source is None else (S.dims_of(source), S.dims_of(x))
    if source is None or have is None or want is None:
        return None
    new = len(want) - len(have)
    pairs = list(zip(have, want[new:], strict=True))
    if any(a is None or (a != 1 and a != b) for a, b in pairs):
        return None
    return source, new, [i for i, (a, b) in enumerate(pairs) if a == 1 and b != 1]


def equal_axes(indices: np.ndarray) -> list[int]:
    """Return the axes along which all indices are the same."""
    return [
        axis
        for axis, size in enumerate(indices.shape)
        if size > 1 and np.all(indices == np.take(indices, [0], axis))
    ]


def inverse(indices: np.ndarray, size: Any) -> np.ndarray | None:
    """Return the inverse permutation, if each slice is read once."""
    if not isinstance(size, int) or indices.size != size or not size:
        return None
    flat = np.where(indices < 0, indices + size, indices).reshape(-1)
    order = np.argsort(flat)
    return order if np.array_equal(flat[order], np.arange(size)) else None


def _chain(x: ir.Value, most: int = 32) -> list[ir.Node] | None:
    """Return the nodes that compute integers from constants, in order; ``None`` if others do.

    ``None`` as well for more than ``most`` nodes: position lists are simple.
    """
    order: list[ir.Node] = []
    seen: set[int] = set()

    def visit(value: ir.Value | None) -> bool:
        if value is None or S.constant_of(value) is not None:
            return value is None or value.dtype in _INTEGERS
        node = value.producer()
        if node is None or not is_op(node, *_EXACT) or value.dtype not in _INTEGERS:
            return False
        if id(node) in seen:
            return True
        seen.add(id(node))
        if len(seen) > most or not _small(value) or not all(map(visit, node.inputs)):
            return False
        order.append(node)
        return True

    return order if visit(x) else None


def _small(x: ir.Value) -> bool:
    sizes = S.dims_of(x)
    if sizes is None or not all(isinstance(d, int) for d in sizes):
        return False
    return (
        int(np.prod([d for d in sizes if isinstance(d, int)], dtype=np.int64))
        <= T.CONSTANT_INDEX_ELEMENTS
    )


def _evaluate(x: ir.Value, chain: list[ir.Node], opset: int) -> np.ndarray | None:
    made: dict[str, np.ndarray] = {}
    for node in chain:
        given: list[np.ndarray | None] = []
        for value in node.inputs:
            array = None if value is None else made.get(value.name or "")
            given.append(S.constant_of(value) if array is None else array)
        array = _evaluate_node(node, given, opset)
        if array is None:
            return None
        made[node.outputs[0].name or ""] = array
    array = made[x.name or ""]
    same = x.shape is not None and tuple(array.shape) == tuple(x.shape)
    return array if same and array.dtype.kind == "i" else None


def _evaluate_node(node: ir.Node, given: list[np.ndarray | None], opset: int) -> np.ndarray | None:
    if is_op(node, "GatherElements") and given[0] is not None and given[1] is not None:
        return _gather_elements(given[0], given[1], S.attributes_of(node, opset)["axis"])
    names = [x.name or "" for x in node.inputs if x is not None]
    feeds = dict(zip(names, (a for a in given if a is not None), strict=True))
    graph = onnx.GraphProto(name="indices", node=[ir.serde.serialize_node(node)])
    graph.input.extend(onnx.ValueInfoProto(name=name) for name in feeds)
    graph.output.append(onnx.ValueInfoProto(name=node.outputs[0].name))
    model = onnx.ModelProto(
        ir_version=10, graph=graph, opset_import=[onnx.OperatorSetIdProto(version=opset)]
    )
    from onnx.reference import ReferenceEvaluator  # slow to import, rarely needed

    try:
        (array,) = ReferenceEvaluator(model).run(None, feeds)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None  # the gradient reads the indices at run time
    return np.asarray(array)


def _gather_elements(data: np.ndarray, indices: np.ndarray, axis: int) -> np.ndarray | None:
    """Return elements by index; the reference evaluator fails beyond 32 indices."""
    axis %= data.ndim
    size = data.shape[axis]
    if indices.size and not (-size <= indices.min() and indices.max() < size):
        return None
    read = tuple(slice(None if a == axis else n) for a, n in enumerate(indices.shape))
    return np.take_along_axis(data[read], indices, axis)


_NARROW = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


@vjp("Gather")
def gather(op, dy, data, indices, *, axis):
    """Add ``dy`` to the slices that were read.

    Slices with the same index are summed first. For constant indices, a contiguous run needs only a
    Pad, and a permutation only another Gather.
    """
    axis %= op.rank(data)
    total, indices = _repeats_added(op, dy, indices, axis)
    known = constant_integers(indices, op.opset)
    out = None
    if known is not None and known.size:
        equal = equal_axes(known)
        if equal:
            total = op.ReduceSum(upcast_half(op, total), [axis + a for a in equal], keepdims=1)
            known = known[tuple(slice(1) if a in equal else slice(None) for a in range(known.ndim))]
            indices = op.const(known)
        out = _placed_without_scatter(op, total, data, known, axis)
    if out is None:
        out = scatter_rows(op, indices, total, data, axis)
    return op.cast(out, dy.dtype)


def _repeats_added(op, dy, indices: ir.Value, axis: int) -> tuple[ir.Value, ir.Value]:
    """Return the gradient summed over repeated indices, and the indices before the repetition."""
    shared = expand_pattern(indices)
    if shared is None:
        return dy, indices
    source, new, inner = shared
    axes = [axis + i for i in (*range(new), *(new + i for i in inner))]
    if not axes:
        return dy, source
    total = op.ReduceSum(upcast_half(op, dy), axes, keepdims=0 if new else 1)
    if new and inner:
        total = op.Unsqueeze(total, [axis + i for i in inner])
    return total, source


def _placed_without_scatter(op, dy, data, known: np.ndarray, axis: int) -> ir.Value | None:
    """Return the gradient without a scatter, ``None`` if the indices do not allow it."""
    rank, run = op.rank(data), _contiguous_range(known)
    back = None if run else inverse(known, op.dims(data)[axis])
    if run is None and back is None:
        return None
    line = _with_flat_indices(op, dy, known, axis)
    if run is None:
        return op.Gather(line, back, axis=axis)
    start, length = run
    size = op.size(data, axis)
    before = start if start >= 0 else Z.plus(op, size, start)
    pads: list[Size] = [0] * 2 * rank
    pads[axis] = before
    pads[axis + rank] = Z.minus(op, Z.minus(op, size, before), length)
    return op.Pad(line, op.vector(pads))


def _with_flat_indices(op, dy, known: np.ndarray, axis: int) -> ir.Value:
    """Merge all axes of the indices in the gradient."""
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
    """Add ``dy`` to the elements that were read."""
    wide = upcast_half(op, dy)
    zeros = zeros_like(op, data, wide.dtype)
    return op.cast(op.ScatterElements(zeros, indices, wide, axis=axis, reduction="add"), dy.dtype)


@vjp("GatherND")
def gather_nd(op, dy, data, indices, *, batch_dims):
    """Add ``dy`` to the slices that were read; with one index per slice, as for Gather."""
    if not batch_dims and op.dims(indices)[-1] == 1:
        return gather(op, dy, data, op.Squeeze(indices, [-1]), axis=0)
    wide = upcast_half(op, dy)
    where = with_batch_indices(op, indices, batch_dims)
    zeros = zeros_like(op, data, wide.dtype)
    return op.cast(op.ScatterND(zeros, where, wide, reduction="add"), dy.dtype)


@vjp_multi("TopK")
def top_k(op, dys, x, k, *, axis, node):
    """Scatter the gradient of the values to their positions.

    Among equal values, the one that the runtime selected gets the gradient.
    """
    if dys[0] is None:
        return None
    return op.ScatterElements(op.zeros_like(x), op.extra_output(node, 1), dys[0], axis=axis)


@vjp_multi("Unique")
def unique(op, dys, x, *, axis, node):
    """Scatter the gradient to the first occurrence of each value.

    This is the derivative where all values differ. Where some are equal, the number of outputs
    jumps, and the first occurrence gets the gradient.
    """
    if dys[0] is None:
        return None
    first = op.extra_output(node, 1)
    if axis is None:
        return scatter_flat(op, first, dys[0], x)
    return scatter_rows(op, first, dys[0], x, axis, unique=True)


def _narrow(indices: ir.Value) -> ir.Value:
    """Return indices before a cast from int32, because some GPU runtimes lack int64 kernels."""
    source = indices.producer()
    if source is None or source.op_type != "Cast":
        return indices
    given = source.inputs[0]
    return given if given is not None and given.dtype == ir.DataType.INT32 else indices


def scatter_rows(op, indices, dy, data, axis, *, unique: bool = False) -> ir.Value:
    """Return zeros like ``data`` with the slices of ``dy`` added at ``indices`` along ``axis``."""
    rank, k = op.rank(data), op.rank(indices)
    axis %= rank
    # ScatterND writes along leading axes, so the gathered axis is moved to the front.
    to_front = [axis, *(i for i in range(rank) if i != axis)]
    wide = dy if unique else upcast_half(op, dy)
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
    wide = dy if unique else upcast_half(op, dy)
    zeros = op.full([_count(op, x)], 0.0, wide.dtype)
    where, flat = op.Reshape(where, [-1]), op.Reshape(wide, [-1])
    out = op.ScatterElements(zeros, where, flat, axis=0, reduction=None if unique else "add")
    return op.reshape_like(op.cast(out, dy.dtype), x)


def positions(op, x) -> ir.Value:
    """Return an int64 tensor of the shape of ``x`` that counts its elements."""
    count = _count(op, x)
    # A constant of this length would enlarge the file.
    long = isinstance(count, int) and count > T.STORED_INDEX_ELEMENTS
    line = op.Range(0, count, 1) if long else op.iota(count)
    return op.Reshape(line, op.shape_of(x), allowzero=1)


def with_batch_indices(op, indices, batch_dims: int) -> ir.Value:
    """Prepend batch coordinates to the indices of GatherND, so that ``batch_dims`` is 0."""
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


def upcast_half(op, x: ir.Value) -> ir.Value:
    """Cast half precision to float32, for accurate sums and CPU kernels."""
    return op.Cast(x, to=ir.DataType.FLOAT) if x.dtype in _NARROW else x


def _count(op, x: ir.Value) -> Size:
    dims = op.static(x)
    return op.Reshape(op.Size(x), [1]) if dims is None else math.prod(dims)


def _contiguous_range(indices: np.ndarray) -> tuple[int, int] | None:
    """Return start and length if constant indices are consecutive and have the same sign."""
    flat = indices.reshape(-1)
    in_row = np.all(np.diff(flat) == 1) and (flat[0] >= 0 or flat[-1] < 0)
    return (int(flat[0]), flat.size) if in_row else None


@vjp("OneHot", constant_inputs={0: "indices have no gradient", 1: "the depth is a size"})
def one_hot(op, dy, indices, depth, values, *, axis):
    """The sums of ``dy`` over the off positions and over the on positions."""
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


@vjp("Slice")
def slice_(op, dy, x, starts, ends, axes=None, steps=None):
    """Put the gradient at the sliced positions, zeros elsewhere.

    Along an axis with step s: insert s - 1 zeros around each element of ``dy``, with the phase of
    the start, then pad to the size of the input.
    """
    cuts = _cuts(op, dy, x, starts, axes, steps)
    if cuts is None:  # dynamic axes or steps: slice a tensor of positions in the same way
        picked = op.Slice(positions(op, x), starts, ends, axes, steps)
        return scatter_flat(op, picked, dy, x)
    backwards = [c.axis for c in cuts if c.step < 0]
    if backwards:
        n = len(backwards)
        kept, dy = dy.shape, op.Slice(dy, [-1] * n, [-(2**63) + 1] * n, backwards, [-1] * n)
        dy.shape = kept
    dy = _dilate(op, dy, {c.axis: (abs(c.step), c.phase) for c in cuts if abs(c.step) > 1})
    cropped = {c.axis: c.room for c in cuts if c.room is not None}
    if cropped:
        dy = op.Slice(dy, [0] * len(cropped), op.vector(list(cropped.values())), list(cropped))
    pads: list[Size] = [0] * 2 * op.rank(x)
    for c in cuts:
        pads[c.axis], pads[c.axis + op.rank(x)] = c.before, c.after
    return op.Pad(dy, op.vector(pads)) if any(p != 0 for p in pads) else dy


@vjp("Compress")
def compress(op, dy, x, condition, *, axis):
    """Scatter the gradient to the selected elements or slices."""
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
    """Padding that remains after ``before``; negative if too many zeros follow the last element."""
    phase: int = 0
    """Number of inserted zeros before the first element."""


def _cuts(op, dy, x, starts, axes, steps) -> list[_Cut] | None:
    """Return, for each sliced axis, its step and the padding that restores its size."""
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
    start = Z.max_size(op, start, 0)
    if step > 0:
        before = Z.min_size(op, start, size)
    else:
        # the last element is the first one in memory; an empty axis has none
        start = Z.min_size(op, start, Z.plus(op, size, -1))
        before = Z.minus(op, start, Z.times(op, Z.plus(op, kept, -1), -step))
        before = Z.min_size(op, before, size)
    phase = before % abs(step) if isinstance(before, int) else 0
    before = Z.plus(op, before, -phase) if phase else before
    room = Z.minus(op, size, before)
    after = Z.minus(op, room, Z.times(op, kept, abs(step)))
    if abs(step) == 1 or (isinstance(after, int) and after >= 0):
        return _Cut(axis, step, before, after, phase=phase)
    return _Cut(axis, step, before, Z.max_size(op, after, 0), room, phase)


def _dilate(op, dy, steps: dict[int, tuple[int, int]]) -> ir.Value:
    """Insert ``step - 1`` zeros around every element along the axes, ``phase`` before it."""
    if not steps:
        return dy
    rank = op.rank(dy)
    order = sorted(steps)
    at = [a + i + 1 for i, a in enumerate(order)]  # indices of the new axes for the zeros
    wide = op.Unsqueeze(dy, at)
    pads = [0] * 2 * (rank + len(at))
    for i, a in zip(at, order, strict=True):
        step, phase = steps[a]
        pads[i], pads[i + rank + len(at)] = phase, step - 1 - phase
    sizes = [Z.times(op, op.size(dy, a), steps.get(a, (1, 0))[0]) for a in range(rank)]
    return op.Reshape(op.Pad(wide, pads), op.vector(sizes), allowzero=1)  # may be empty


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
    where = write_positions(op, past_cache, update, write_indices, axis, mode)
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
    """Share ``dy`` evenly between all elements equal to the maximum (minimum)."""
    kept = op.Equal(data, y)
    chosen = op.Equal(updates, gather(y))
    counted = ir.DataType.DOUBLE if dy.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    sharing = scatter(op.Cast(kept, to=counted), op.Cast(chosen, to=counted), "add")
    share = op.Div(dy, op.cast(sharing, dy.dtype))
    return op.Where(kept, share, 0.0), None, op.Where(chosen, gather(share), 0.0)


def _product(op, dy, data, updates, scatter: Scatter, gather: Gather):
    """``ddata = dy * p`` and ``dupdate = dy * data * others``.

    ``p`` is the product of all updates at a position, ``others`` that of all but one: ``p /
    update``. For an update of zero it is the product of the nonzero updates, or zero if there is a
    second zero. With two zeros at a position, the gradient is right but its derivative is not (as
    in torch).
    """
    wide = upcast_half(op, updates)
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
