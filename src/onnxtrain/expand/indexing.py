"""Gather, Scatter, TensorScatter and TopK by computed positions."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.expand.expansions import LOWERING, TRAINING, expansion, on_target, raise_unsupported
from onnxtrain.expand.value_range import may_be_infinite
from onnxtrain.graph.builder import OpBuilder

_INT64 = ir.DataType.INT64


@expansion("GatherElements", when=LOWERING)
def gather_elements(op, x, indices, *, axis):
    """Gather at flat positions."""
    shape, out = op.static(x), op.static(indices)
    if shape is None or out is None:
        return None
    axis %= len(shape)
    strides = _strides(shape)
    grid = np.indices(out).reshape(len(out), *out)
    base = sum(grid[i] * strides[i] for i in range(len(out)) if i != axis)
    index = _wrap_negative(op, indices, shape[axis])
    flat = op.Add(op.Mul(index, op.const(strides[axis])), op.const(np.asarray(base, np.int64)))
    return op.Gather(op.Reshape(x, [-1]), flat, axis=0)


@expansion("GatherND", when=LOWERING)
def gather_nd(op, x, indices, *, batch_dims):
    """Gather at flat positions among the rows that the indices address."""
    shape = op.dims(x)
    depth = op.dims(indices)[-1]
    if not isinstance(depth, int):
        return None
    rows = shape[: batch_dims + depth]
    if not all(isinstance(d, int) for d in rows):
        return None
    strides = _strides(tuple(rows))
    flat = None
    for i in range(depth):
        part = op.Squeeze(op.Slice(indices, [i], [i + 1], [-1]), [op.rank(indices) - 1])
        term = op.Mul(
            _wrap_negative(op, part, rows[batch_dims + i]), op.const(strides[batch_dims + i])
        )
        flat = term if flat is None else op.Add(flat, term)
    if flat is None:
        return None
    for i in range(batch_dims):
        number = np.arange(rows[i]) * strides[i]
        lifted = number.reshape([-1, *[1] * (op.rank(flat) - 1 - i)])
        flat = op.Add(flat, op.const(np.asarray(lifted, np.int64)))
    rest = list(shape[batch_dims + depth :])
    if not all(isinstance(d, int) for d in rest):
        return None
    return op.Gather(op.Reshape(x, [int(np.prod(rows)), *rest]), flat, axis=0)


@expansion("com.microsoft::GatherND", when=TRAINING)
def contrib_gather_nd(op, data, indices):
    """The standard operator of the same name."""
    return op.GatherND(data, op.cast(indices, _INT64))


@expansion("com.microsoft::TorchEmbedding", when=TRAINING)
def torch_embedding(op, weight, indices, padding_idx=None, scale_grad_by_freq=None, *, node):
    """Gather rows of the table."""
    if padding_idx is not None or scale_grad_by_freq is not None:
        raise_unsupported(node, "padding_idx and scale_grad_by_freq are not supported")
    return op.Gather(weight, indices, axis=0)


@expansion("ai.onnx.ml::ArrayFeatureExtractor", when=TRAINING)
def array_feature_extractor(op, x, at):
    """Gather along the last axis; a vector becomes a row."""
    flat = op.Reshape(at, op.const([-1]))
    columns = op.Gather(x, flat, axis=op.rank(x) - 1)
    return columns if op.rank(x) > 1 else op.Unsqueeze(columns, [0])


@expansion("com.microsoft::WordConvEmbedding", when=TRAINING)
def word_conv_embedding(
    op,
    words,
    weight,
    bias,
    table,
    *,
    conv_window_size=None,
    embedding_size=None,
    char_embedding_size=None,
    node,
):
    """The maximum of ``tanh(conv(letters))`` over the windows of each word; 0 ends a word.

    Empty words give zeros.
    """
    width = op.dims(weight)[2]
    if not isinstance(width, int):
        raise_unsupported(node, "the window width must be static")
    letters = op.Unsqueeze(op.Gather(table, words, axis=0), [1])  # [words, 1, length, size]
    heights = op.Tanh(op.Squeeze(op.Conv(letters, weight, bias), [3]))  # [words, filters, windows]
    real = op.Cast(op.Greater(words, op.const(0, words.dtype)), to=_INT64)
    count = op.ReduceSum(real, [1], keepdims=1)
    last = op.Sub(op.Max(count, width), width)
    hidden = op.Greater(op.iota(op.size(heights, 2)), op.Unsqueeze(last, [2]))
    largest = op.ReduceMax(op.Where(hidden, -2.0, heights), [2], keepdims=0)  # tanh is above -1
    begun = op.Greater(op.Slice(words, [0], [1], [1]), op.const(0, words.dtype))
    return op.Where(begun, largest, 0.0)


@expansion("ScatterElements", when=LOWERING)
def scatter_elements(op, x, indices, updates, *, axis, reduction):
    """Scatter to flat positions by :func:`_scatter_rows`."""
    shape, at = op.static(x), op.static(indices)
    if shape is None or at is None:
        return None
    axis %= len(shape)
    strides = _strides(shape)
    grid = np.indices(at)
    base = sum(grid[i] * strides[i] for i in range(len(at)) if i != axis)
    index = _wrap_negative(op, indices, shape[axis])
    flat = op.Add(op.Mul(index, op.const(strides[axis])), op.const(np.asarray(base, np.int64)))
    y = _scatter_rows(
        op, op.Reshape(x, [-1, 1]), op.Reshape(flat, [-1]), op.Reshape(updates, [-1, 1]), reduction
    )
    return None if y is None else op.Reshape(y, list(shape))


@expansion("ScatterND", when=LOWERING)
def scatter_nd(op, x, indices, updates, *, reduction):
    """Scatter to the rows that the indices address by :func:`_scatter_rows`."""
    shape, at = op.static(x), op.static(indices)
    if shape is None or at is None:
        return None
    depth = at[-1]
    strides = _strides(shape[:depth])
    flat = None
    for i in range(depth):
        part = op.Squeeze(op.Slice(indices, [i], [i + 1], [-1]), [len(at) - 1])
        term = op.Mul(_wrap_negative(op, part, shape[i]), op.const(strides[i]))
        flat = term if flat is None else op.Add(flat, term)
    if flat is None:
        return None
    count, width = int(np.prod(shape[:depth])), int(np.prod(shape[depth:]))
    y = _scatter_rows(
        op,
        op.Reshape(x, [count, width]),
        op.Reshape(flat, [-1]),
        op.Reshape(updates, [-1, width]),
        reduction,
    )
    return None if y is None else op.Reshape(y, list(shape))


@expansion("ScatterND", when=on_target(lacks="ScatterND.reduction"))
def scatter_nd_by_elements(op, x, indices, updates, *, reduction):
    """Add rows by ScatterElements, with one index per element."""
    depth, shape = op.dims(indices)[-1], op.dims(x)
    if reduction == "none" or not isinstance(depth, int) or not isinstance(shape[0], int | str):
        return None
    tail = [d for d in shape[1:] if isinstance(d, int)]
    if len(tail) < len(shape) - 1:
        return None
    width = int(np.prod(tail[depth - 1 :]))
    rows = op.Reshape(indices, [-1, depth])
    if depth > 1:
        # A negative first index needs no care: it counts from the end of all rows as well.
        first, *others = (op.Slice(rows, [i], [i + 1], [1]) for i in range(depth))
        strides = _strides((1, *tail[: depth - 1]))
        rows = op.Mul(first, op.const(strides[0]))
        for part, size, stride in zip(others, tail, strides[1:], strict=False):
            rows = op.Add(rows, op.Mul(_wrap_negative(op, part, size), op.const(stride)))
    y = op.ScatterElements(
        op.Reshape(x, [-1, width]),
        rows if width == 1 else op.Expand(rows, op.const(np.array([1, width], np.int64))),
        op.Reshape(updates, [-1, width]),
        axis=0,
        reduction=reduction,
    )
    return op.reshape_like(y, x)


_MAX_SCATTER_ELEMENTS = 1 << 22


def _scatter_rows(
    op: OpBuilder, x: ir.Value, rows: ir.Value, updates: ir.Value, reduction: str
) -> ir.Value | None:
    """Write [M, W] updates to rows of [N, W], by comparing every row with every update.

    ``add`` multiplies by the 0/1 matrix [N, M]; ``none`` gathers the last update of each row;
    ``max`` and ``min`` reduce all [N, M, W] pairs.
    """
    (n, width), m = op.dims(x), op.dims(updates)[0]
    if not isinstance(n, int) or not isinstance(m, int) or not isinstance(width, int):
        return None
    if not m or n * m * width > _MAX_SCATTER_ELEMENTS:
        return None
    dtype = x.dtype
    assert dtype is not None
    hit = op.Equal(op.const(np.arange(n).reshape(n, 1)), op.Reshape(rows, [1, m]))  # [N, M]
    if reduction == "add":
        if not dtype.is_floating_point():
            return None
        return op.Add(x, op.MatMul(op.Cast(hit, to=dtype), updates))
    if reduction == "none":
        # 1 + the index of the last update of each row, 0 without one.
        float32 = ir.DataType.FLOAT
        number = op.Mul(op.Cast(hit, to=float32), op.const(np.arange(1.0, m + 1)[None], float32))
        padded = op.Concat(op.const(np.zeros((n, 1)), float32), number, axis=1)
        last = op.ArgMax(padded, axis=1, keepdims=1)
        # Row i of x or update j, as a position in one table [N + M, W].
        table = op.Concat(x, updates, axis=0)
        own = np.arange(n).reshape(n, 1)
        index = op.Where(op.Greater(last, 0), op.Add(last, n - 1), op.const(own))
        return op.Gather(table, op.Reshape(index, [-1]), axis=0)
    if reduction in ("max", "min"):
        worst = -np.inf if reduction == "max" else np.inf
        wide = op.Where(
            op.Reshape(hit, [n, m, 1]), op.Reshape(updates, [1, m, width]), op.const(worst, dtype)
        )
        reduce = op.ReduceMax if reduction == "max" else op.ReduceMin
        best = reduce(wide, [1], keepdims=0)
        return op.Max(x, best) if reduction == "max" else op.Min(x, best)
    return None


@expansion("TensorScatter", when=TRAINING)
def tensor_scatter(op, past_cache, update, write_indices=None, *, axis=-2, mode="linear"):
    """ScatterElements at the write positions."""
    where = write_positions(op, past_cache, update, write_indices, axis, mode)
    return op.ScatterElements(past_cache, where, update, axis=axis)


def write_positions(
    op: OpBuilder,
    cache: ir.Value,
    update: ir.Value,
    write_indices: ir.Value | None,
    axis: int,
    mode: str,
) -> ir.Value:
    """Return the position along ``axis`` of each element of ``update``."""
    rank = op.rank(cache)
    axis %= rank
    line = op.reshape(op.iota(op.size(update, axis)), [-1] + [1] * (rank - 1 - axis))
    if write_indices is not None:
        line = op.Add(op.reshape(write_indices, [-1] + [1] * (rank - 1)), line)
    if mode == "circular":
        line = op.Mod(line, op.vector([op.size(cache, axis)]))
    return op.expand_like(line, update)


def _strides(shape: tuple[int, ...]) -> list[int]:
    strides, step = [], 1
    for d in reversed(shape):
        strides.insert(0, step)
        step *= d
    return strides


def _wrap_negative(op: OpBuilder, indices: ir.Value, size: int) -> ir.Value:
    """Return indices with ``size`` added to negative ones."""
    index = op.cast(indices, _INT64)
    array = op.constant(index)
    if array is not None:
        return op.const(np.where(array < 0, array + size, array))
    below = op.Cast(op.Less(index, 0), to=_INT64)
    return op.Add(index, op.Mul(below, size))


_MAX_TOP_K = 64  # elements; each takes one ArgMax


_MAX_TOP_K_WIDTH = 1024  # the mask table has the square of this


@expansion("TopK", when=LOWERING)
def top_k(op, x, k, *, axis, largest, sorted):
    """``k`` times: ArgMax, then add -inf at that position.

    Equal elements keep their order, as in TopK. Not for elements that may be infinite.
    """
    count, last = op.constant(k), op.rank(x) - 1
    n = op.dims(x)[axis % op.rank(x)]
    if count is None or not isinstance(n, int) or n > _MAX_TOP_K_WIDTH:
        return None
    count = int(count.reshape(()))
    if not 0 < count <= min(_MAX_TOP_K, n) or not x.dtype.is_floating_point() or may_be_infinite(x):
        return None
    left = op.move_axis(x if largest else op.Neg(x), axis % op.rank(x), last)
    out = op.const(np.where(np.eye(n, dtype=bool), -np.inf, 0.0), x.dtype)
    values, positions = [], []
    for i in range(count):
        position = op.ArgMax(left, axis=last, keepdims=0)
        values.append(op.ReduceMax(left, [last], keepdims=1))
        positions.append(op.Unsqueeze(position, [last]))
        if i + 1 < count:
            left = op.Add(left, op.Gather(out, position, axis=0))
    value = op.Concat(*values, axis=last) if count > 1 else values[0]
    where = op.Concat(*positions, axis=last) if count > 1 else positions[0]
    back = [op.move_axis(v, last, axis % op.rank(x)) for v in (value, where)]
    return (back[0] if largest else op.Neg(back[0])), back[1]
