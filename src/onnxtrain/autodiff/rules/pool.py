"""Pooling: average, Lp and maximum, MaxUnpool, Col2Im, and the transposed window sum they share.

Of equal maxima in a window, the first one in the order of the axes gets the gradient, as in torch.

A window sum is a matmul with one 0/1 matrix per axis, so its transpose is a matmul with the
transposed matrices, whatever the padding, dilation or rounding. The matrices are constants if the
sizes are static; otherwise the graph computes them. On large images a transposed convolution is
cheaper.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.autodiff.rule_registry import (
    Choice,
    Choices,
    Gradients,
    Variant,
    Variants,
    select_variant,
    vjp,
)
from onnxtrain.autodiff.rules.conv import input_gradient
from onnxtrain.autodiff.rules.index import upcast_half
from onnxtrain.errors import ShapeError
from onnxtrain.expand.conv import can_decompose_max_pool
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, Size
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.windows import (
    Windows,
    crop_like,
    pad,
    pad_dynamic,
    resolve_auto_pad,
    same_pads,
    tap_slices,
    window_geometry,
)
from onnxtrain.modes.mixed_precision import BFLOAT16_CONV_OPSET

_EXACT = 1 << 24
"""Largest integer below which float32 represents all integers."""


@vjp("MaxPool")
def max_pool(
    op: OpBuilder,
    dy: ir.Value,
    x: ir.Value,
    *,
    y: ir.Value,
    node: ir.Node,
    auto_pad: str,
    dilations: list[int] | None,
    kernel_shape: list[int],
    pads: list[int] | None,
    storage_order: int,
    strides: list[int] | None,
) -> Gradients:
    """Scatter ``dy`` to the positions of the maxima."""
    win = window_geometry(kernel_shape, strides, dilations, pads if auto_pad == "NOTSET" else None)
    fixed = resolve_auto_pad(op, x, y, win, auto_pad)
    pooling = _Pooling(
        *(x, y, node, win, fixed, auto_pad),
        by_columns=storage_order != 0,
        composed=op.opset >= BFLOAT16_CONV_OPSET and can_decompose_max_pool(node, op.opset),
    )
    return select_variant(op, pooling, POOLING_VARIANTS, POOLING_CHOICES)(op, dy, pooling)


@dataclasses.dataclass(frozen=True)
class _Pooling:
    """A MaxPool node."""

    x: ir.Value
    y: ir.Value
    node: ir.Node
    win: Windows
    fixed: Windows | None
    """The windows with explicit padding, if static."""
    auto_pad: str
    by_columns: bool
    """Whether the indices are in column-major order."""
    composed: bool = False
    """Whether the node will be decomposed into operators without indices."""

    def indices(self, op: OpBuilder) -> ir.Value:
        """Return the flat positions of the maxima, in row-major order."""
        if not self.by_columns:
            return op.extra_output(self.node, 1)
        kept = {k: v.value for k, v in self.node.attributes.items() if k != "storage_order"}
        return op.MaxPool(self.x, _outputs=2, **kept)[1]


def _by_scatter(op: OpBuilder, dy: ir.Value, pooling: _Pooling) -> ir.Value:
    """``dx[index[w]] = sum of dy[w]`` over the windows w, on zeros, flattened."""
    return op.reshape_like(_scatter(op, dy, pooling.indices(op), pooling.x), pooling.x)


def _by_positions(op: OpBuilder, dy: ir.Value, pooling: _Pooling) -> ir.Value:
    """Scatter to the first maxima; find them by comparing tap by tap, from the last tap."""
    x, y, win = pooling.x, pooling.y, pooling.fixed
    sizes, counts = _sizes(x), _sizes(y)
    assert win is not None
    # As rows, so that the backward pass does not share slices with the forward pass.
    rows = op.Reshape(x, [-1, 1, *sizes[2:]])
    maxima = op.cast(op.Reshape(y, [-1, 1, *counts[2:]]), ir.DataType.FLOAT)
    taps = tap_slices(op, pad(op, rows, win, float("-inf")), win, like=y)
    places = [op.const(p, ir.DataType.FLOAT) for p in _window_positions(win, sizes[2:], counts[2:])]
    place = places[-1]
    for tap, here in reversed(list(zip(taps, places, strict=True))):
        match = op.Equal(op.cast(tap, ir.DataType.FLOAT), maxima)
        place = op.Where(match, here, place)
    images = np.arange(sizes[0] * sizes[1]) * int(np.prod(sizes[2:]))
    starts = op.const(images.reshape(-1, *[1] * (win.rank + 1)), ir.DataType.INT64)
    indices = op.Add(op.Cast(place, to=ir.DataType.INT64), starts)
    return op.reshape_like(_scatter(op, dy, indices, x), x)


def _window_positions(
    win: Windows, sizes: Sequence[int], counts: Sequence[int]
) -> list[np.ndarray]:
    """Return, for each tap, the flat position that each window reads, clamped to the image.

    Padding is never the maximum, unless a window has no finite element.
    """
    tables = []
    for tap in win.taps():
        flat: np.ndarray = np.zeros((), np.int64)
        for i, (size, count) in enumerate(zip(sizes, counts, strict=True)):
            at = np.arange(count) * win.strides[i] - win.before[i] + tap[i]
            flat = flat[..., None] * size + np.clip(at, 0, size - 1)
        tables.append(flat)
    return tables


def _sizes(x: ir.Value) -> list[int]:
    sizes = D.static_sizes(S.dims_of(x) or (None,))
    assert sizes is not None
    return sizes


def _has_static_positions(pooling: _Pooling) -> bool:
    """Return whether sizes are static and float32 represents all positions."""
    sizes, counts = (D.static_sizes(S.dims_of(v) or (None,)) for v in (pooling.x, pooling.y))
    if sizes is None or counts is None or pooling.fixed is None:
        return False
    return pooling.win.static_kernel is not None and int(np.prod(sizes[2:])) <= _EXACT


def _by_unpooling(op: OpBuilder, dy: ir.Value, pooling: _Pooling) -> ir.Value:
    """MaxUnpool writes each value to one position; for windows that do not overlap."""
    assert pooling.fixed is not None
    return op.MaxUnpool(
        dy,
        pooling.indices(op),
        kernel_shape=_unpooling_kernel(pooling.x, pooling.y, pooling.fixed),
        pads=[*pooling.fixed.before, *[0] * pooling.win.rank],
        strides=pooling.win.strides,
    )


def _unpooling_kernel(x: ir.Value, y: ir.Value, win: Windows) -> list[int] | None:
    """Return the kernel for which MaxUnpool has an output of the size of ``x``.

    ``None`` if windows overlap, because MaxUnpool does not accumulate, or if sizes are dynamic.
    """
    if any(s < (win.extent(i) or 0) for i, s in enumerate(win.strides)):
        return None
    sizes, counts = (
        D.static_sizes((S.dims_of(x) or ())[2:]),
        D.static_sizes((S.dims_of(y) or ())[2:]),
    )
    if sizes is None or counts is None:
        return None
    return [
        size + before - (count - 1) * stride
        for size, count, stride, before in zip(sizes, counts, win.strides, win.before, strict=True)
    ]


def _scatter(op: OpBuilder, dy: ir.Value, indices: ir.Value, x: ir.Value) -> ir.Value:
    """Scatter-add ``dy`` at flat positions of a tensor with the size of ``x``."""
    assert x.dtype is not None
    # CPUs have no kernel for float16; bfloat16 is for GPUs, which have one.
    dy = upcast_half(op, dy) if dy.dtype == ir.DataType.FLOAT16 else dy
    updates = op.Reshape(dy, [-1])
    assert updates.dtype is not None
    flat = op.full(_vector(op, _size(op, x)), 0.0, updates.dtype)
    where = op.Reshape(indices, [-1])
    return op.cast(op.ScatterElements(flat, where, updates, axis=0, reduction="add"), x.dtype)


def _by_first_match(op: OpBuilder, dy: ir.Value, pooling: _Pooling) -> ir.Value:
    """Compare windows with their maxima, tap by tap; the first match gets ``dy``."""
    x, y, win, fixed = pooling.x, pooling.y, pooling.win, pooling.fixed
    if x.dtype == ir.DataType.BFLOAT16:  # no comparison of bfloat16 on CUDA
        dy, x, y = (op.cast(v, ir.DataType.FLOAT) for v in (dy, x, y))
        dx = _by_first_match(op, dy, dataclasses.replace(pooling, x=x, y=y))
        return op.cast(dx, ir.DataType.BFLOAT16)
    rows = op.reshape(x, [-1, 1, *(op.size(x, a) for a in win.axes)])
    # Different from every maximum, so never matched.
    lowest = -65504.0 if x.dtype == ir.DataType.FLOAT16 else -3.4e38
    if fixed is not None:
        image, before = pad(op, rows, _reaching(op, rows, y, fixed), lowest), None
    else:
        before, after = same_pads(op, x, y, win, upper=pooling.auto_pad == "SAME_UPPER")
        image = pad_dynamic(op, rows, before, after, lowest)
    sizes = [op.size(y, a) for a in win.axes]
    maxima, dy = op.reshape(y, [-1, 1, *sizes]), op.reshape(dy, [-1, 1, *sizes])
    free, taken = None, []
    for tap in tap_slices(op, image, win, like=y):
        match = op.Cast(op.Equal(tap, maxima), to=x.dtype)
        first = match if free is None else op.Mul(match, free)
        free = op.Sub(1.0, match) if free is None else op.Sub(free, first)
        taken.append(first)
    parts = op.Mul(taken[0] if len(taken) == 1 else op.Concat(*taken, axis=1), dy)
    kernel = np.eye(len(taken)).reshape(len(taken), 1, *(win.static_kernel or ()))
    place = op.const(kernel, x.dtype)
    if fixed is not None:
        dx = input_gradient(op, parts, place, rows, fixed)
    else:
        assert before is not None
        dx = crop_like(op, input_gradient(op, parts, place, image, win), before, rows)
    return op.reshape_like(dx, x)


def _reaching(op: OpBuilder, x: ir.Value, y: ir.Value, win: Windows) -> Windows:
    """Return windows padded to the end of the last one, which ceil_mode may extend."""
    after = []
    for i, (size, count) in enumerate(zip(op.dims(x)[2:], op.dims(y)[2:], strict=True)):
        stride, extent = win.strides[i], win.extent(i)
        assert extent is not None
        if isinstance(size, int) and isinstance(count, int):
            needed = stride * (count - 1) + extent - win.before[i] - size
            after.append(max(needed, 0))
        else:
            after.append(win.after[i] + stride - 1)
    return window_geometry(win.kernel, win.strides, win.dilations, [*win.before, *after])


def _unpools(pooling: _Pooling) -> bool:
    """Return whether MaxUnpool (float32 only) can restore the size of the input."""
    if pooling.x.dtype != ir.DataType.FLOAT or pooling.fixed is None:
        return False
    return _unpooling_kernel(pooling.x, pooling.y, pooling.fixed) is not None


POOLING_VARIANTS: Variants[_Pooling] = {
    "scatter": Variant(_by_scatter),
    "unpool": Variant(_by_unpooling, _unpools),
    "first_match": Variant(_by_first_match),
    "places": Variant(_by_positions, _has_static_positions),
}
POOLING_CHOICES: Choices[_Pooling] = [
    Choice("first_match", lacks="MaxPool.Indices"),
    Choice("places", lambda p: p.composed, lacks="MaxPool.opset22"),
    Choice("first_match", lambda p: p.composed, lacks="MaxPool.opset22"),
    Choice("scatter", lacks="MaxUnpool"),
    Choice("unpool"),
    Choice("scatter"),
]


@vjp("GlobalMaxPool")
def global_max_pool(op: OpBuilder, dy: ir.Value, x: ir.Value) -> Gradients:
    """Scatter ``dy`` to the positions of the maxima."""
    rows = op.Reshape(x, [0, 0, -1])
    where = op.ArgMax(rows, axis=2, keepdims=1)
    hit = op.Equal(op.iota(op.size(rows, 2)), where)
    dx = op.Where(hit, op.Reshape(dy, [0, 0, 1]), 0.0)
    return op.reshape_like(dx, x)


@vjp("MaxUnpool")
def max_unpool(
    op: OpBuilder,
    dy: ir.Value,
    x: ir.Value,
    indices: ir.Value,
    output_shape: ir.Value | None = None,
    *,
    kernel_shape: list[int],
    strides: list[int] | None,
) -> Gradients:
    """Gather ``dy`` at the indices.

    Indices are positions in the flattened output, as in onnxruntime. With overlapping windows,
    several elements may have the same position: the last one is written and gets the gradient.
    """
    dx = op.Gather(op.Reshape(dy, [-1]), indices)
    steps = strides or [1] * len(kernel_shape)
    if all(s >= k for s, k in zip(steps, kernel_shape, strict=True)):
        return dx
    flat = op.Reshape(indices, [-1])
    number = op.iota(_size(op, indices))
    nobody = op.full(_vector(op, _size(op, dy)), -1, ir.DataType.INT64)
    last = op.ScatterElements(nobody, flat, number, axis=0, reduction="max")
    stays = op.Equal(op.Gather(last, indices), op.reshape_like(number, indices))
    return op.Where(stays, dx, 0.0)


def _size(op: OpBuilder, x: ir.Value) -> Size:
    """Return the number of elements."""
    static = op.static(x)
    return op.Reshape(op.Size(x), [1]) if static is None else int(np.prod(static))


def _vector(op: OpBuilder, size: Size) -> ir.Value:
    return op.const([size]) if isinstance(size, int) else size


_TABLE = 1 << 24  # maximum number of elements of a window matrix


@dataclasses.dataclass(frozen=True)
class Axis:
    """The windows along one axis."""

    size: Size
    count: Size
    """Number of windows."""
    kernel: int
    stride: int
    dilation: int
    before: Size
    after: Size
    ceil: bool


def window_sum_transpose(
    op: OpBuilder,
    dy: ir.Value,
    x: ir.Value,
    y: ir.Value,
    win: Windows,
    auto_pad: str,
    ceil_mode: int,
    divide: str = "",
) -> ir.Value:
    """Return, for each element of ``x``, the sum of ``dy`` over the windows of ``y`` that read it.

    Args:
        op: the builder.
        dy: a value per window.
        x: the input that the windows slide over.
        y: the output, with the shape of ``dy``.
        win: the windows.
        auto_pad: the padding mode of ``x``.
        ceil_mode: whether the last window may exceed the padding.
        divide: elements to divide the value of a window by: "" for none, "inside" for those inside
            ``x``, "padded" for those inside ``x`` and its padding.
    """
    axes = _axes(op, x, y, win, auto_pad, ceil_mode)
    fixed = resolve_auto_pad(op, x, y, win, auto_pad)
    static = op.static(x) is not None or all(isinstance(a.size, int) for a in axes)
    largest = max(_number(a.size) for a in axes) if static else 0
    if fixed is not None and largest > T.WINDOW_MATRIX_SIZE:
        return _by_convolution(op, dy, x, axes, fixed, divide)
    return _by_matrices(op, dy, x, axes, divide)


def _by_convolution(
    op: OpBuilder, dy: ir.Value, x: ir.Value, axes: list[Axis], win: Windows, divide: str
) -> ir.Value:
    if divide:
        counts = [_counts(a, divide) for a in axes]
        total = np.ones(())
        for count in counts:
            total = total[..., None] * count
        uniform = total.size and (total == total.flat[0]).all()
        dy = op.Mul(dy, 1.0 / (float(total.flat[0]) if uniform else total))
    rows = op.reshape(x, [-1, 1, *(a.size for a in axes)])
    values = op.reshape(dy, [-1, 1, *(a.count for a in axes)])
    ones = op.const(np.ones((1, 1, *(a.kernel for a in axes))), x.dtype)
    return op.reshape_like(input_gradient(op, values, ones, rows, win), x)


def _by_matrices(
    op: OpBuilder, dy: ir.Value, x: ir.Value, axes: list[Axis], divide: str
) -> ir.Value:
    *outer, last = axes
    dx = op.MatMul(dy, _matrix(op, last, x.dtype, divide))
    for back, axis in enumerate(reversed(outer)):
        left = _matrix(op, axis, x.dtype, divide, transposed=True)
        if back == 0:
            dx = op.MatMul(left, dx)
            continue
        # Merge the axes after this one: [N, C, ..., axis, rest]
        at = op.rank(x) - 2 - back
        flat = op.MatMul(left, op.Reshape(dx, [*[0] * (at + 1), -1]))
        sizes = [op.size(dx, i) for i in range(op.rank(x))]
        sizes[at] = axis.size
        dx = op.reshape(flat, sizes)
    return dx


def _axes(
    op: OpBuilder, x: ir.Value, y: ir.Value, win: Windows, auto_pad: str, ceil_mode: int
) -> list[Axis]:
    fixed = resolve_auto_pad(op, x, y, win, auto_pad)
    if fixed is None:
        pads = same_pads(op, x, y, win, upper=auto_pad == "SAME_UPPER")
        before, after = ([op.Slice(p, [i], [i + 1]) for i in range(win.rank)] for p in pads)
    else:
        before, after = list(fixed.before), list(fixed.after)
    assert win.static_kernel is not None
    return [
        Axis(
            op.size(x, a),
            op.size(y, a),
            win.static_kernel[i],
            win.strides[i],
            win.dilations[i],
            before[i],
            after[i],
            bool(ceil_mode),
        )
        for i, a in enumerate(win.axes)
    ]


def _matrix(
    op: OpBuilder, axis: Axis, dtype: ir.DataType | None, divide: str, transposed: bool = False
) -> ir.Value:
    """Return [windows, positions] with 1, or 1 / count, where a window reads."""
    sizes = (axis.size, axis.count, axis.before, axis.after)
    if all(isinstance(s, int) for s in sizes):
        reads = _reads(axis)
        positions = np.arange(_number(axis.size))
        table = (reads[:, :, None] == positions).sum(1).astype(np.float64)
        table = table / _counts(axis, divide)[:, None] if divide else table
        return op.const(table.T if transposed else table, dtype)
    starts = op.Mul(op.iota(axis.count), axis.stride)
    starts = op.Sub(starts, axis.before)
    here = op.iota(axis.size)
    # Built in the orientation that the matmul reads, to save a transpose.
    offset = (
        op.Sub(op.Unsqueeze(here, [1]), starts)
        if transposed
        else op.Sub(here, op.Unsqueeze(starts, [1]))
    )
    reach = (axis.kernel - 1) * axis.dilation
    reads = op.And(op.GreaterOrEqual(offset, 0), op.LessOrEqual(offset, reach))
    if axis.dilation > 1:
        reads = op.And(reads, op.Equal(op.Mod(offset, axis.dilation), 0))
    table = op.Cast(reads, to=dtype)
    if divide == "inside":
        count = op.ReduceSum(table, [0 if transposed else 1], keepdims=1)
        return op.Div(table, count)
    if divide == "padded" and axis.ceil:
        end = op.Add(_value(op, axis.size), _value(op, axis.after))
        room = op.Div(op.Add(op.Sub(end, starts), axis.dilation - 1), axis.dilation)
        count = op.Cast(op.Min(room, op.const([axis.kernel])), to=dtype)
        return op.Div(table, count if transposed else op.Unsqueeze(count, [1]))
    return op.Mul(table, 1.0 / axis.kernel) if divide else table


def _value(op: OpBuilder, size: Size) -> ir.Value:
    return op.const([size]) if isinstance(size, int) else size


def _number(size: Size) -> int:
    assert isinstance(size, int)
    return size


def _reads(axis: Axis) -> np.ndarray:
    """Return the positions that each window reads, including padding: [windows, kernel]."""
    if _number(axis.count) * axis.kernel > _TABLE:
        raise ShapeError(
            f"too many windows for a constant matrix: {axis.count} windows of size {axis.kernel}\n"
            "hint: make the size of the axis symbolic, then the graph computes the matrix"
        )
    starts = np.arange(_number(axis.count)) * axis.stride - _number(axis.before)
    return starts[:, None] + np.arange(axis.kernel) * axis.dilation


def _counts(axis: Axis, divide: str) -> np.ndarray:
    """Return the number of elements of each window."""
    reads, size = _reads(axis), _number(axis.size)
    inside = (reads >= 0) & (reads < size)
    padded = reads < size + _number(axis.after)
    return (inside if divide == "inside" else padded).sum(1)


@vjp("AveragePool")
def average_pool(
    op: OpBuilder,
    dy: ir.Value,
    x: ir.Value,
    *,
    y: ir.Value,
    auto_pad: str,
    ceil_mode: int,
    count_include_pad: int,
    dilations: list[int] | None,
    kernel_shape: list[int],
    pads: list[int] | None,
    strides: list[int] | None,
) -> Gradients:
    """``dx`` is, for each element, the sum of ``dy / count`` over the windows that contain it."""
    win = window_geometry(kernel_shape, strides, dilations, pads if auto_pad == "NOTSET" else None)
    divide = "padded" if count_include_pad else "inside"
    return window_sum_transpose(op, dy, x, y, win, auto_pad, ceil_mode, divide)


@vjp("LpPool")
def lp_pool(
    op: OpBuilder,
    dy: ir.Value,
    x: ir.Value,
    *,
    y: ir.Value,
    auto_pad: str,
    ceil_mode: int,
    dilations: list[int] | None,
    kernel_shape: list[int],
    p: int,
    pads: list[int] | None,
    strides: list[int] | None,
) -> Gradients:
    """``dx = sign(x) |x|^(p-1) * sum of dy y^(1-p)`` over the windows; 0 where a norm is 0."""
    win = window_geometry(kernel_shape, strides, dilations, pads if auto_pad == "NOTSET" else None)
    total = window_sum_transpose(op, _over_norm(op, dy, y, p), x, y, win, auto_pad, ceil_mode)
    return op.Mul(_signed_power(op, x, p - 1), total)


@vjp("GlobalLpPool")
def global_lp_pool(op: OpBuilder, dy: ir.Value, x: ir.Value, *, y: ir.Value, p: int) -> Gradients:
    """``dx = sign(x) |x|^(p-1) * dy y^(1-p)``; 0 where the norm is 0."""
    return op.Mul(_signed_power(op, x, p - 1), _over_norm(op, dy, y, p))


@vjp("GlobalAveragePool")
def global_average_pool(op: OpBuilder, dy: ir.Value, x: ir.Value) -> Gradients:
    """``dx = dy / count``, the same for all elements of a channel."""
    count = op.count(x, list(range(2, op.rank(x))))
    return op.expand_like(op.Div(dy, count), x)


def _over_norm(op: OpBuilder, dy: ir.Value, y: ir.Value, p: int) -> ir.Value:
    """Return ``dy y^(1-p)``, finite where y is 0: x is 0 there, so the result is 0, too."""
    if p == 1:
        return dy
    norm = op.Where(op.Equal(y, 0.0), 1.0, y)
    return op.Div(dy, norm if p == 2 else op.Pow(norm, float(p - 1)))


def _signed_power(op: OpBuilder, x: ir.Value, exponent: int) -> ir.Value:
    """Return ``sign(x) |x|^exponent``."""
    if exponent == 0:
        return op.sign(x)
    if exponent == 1:
        return x
    if exponent % 2:
        return op.Pow(x, float(exponent))
    return op.Mul(x, op.Pow(op.Abs(x), float(exponent - 1)))


@vjp("Col2Im")
def col2im(
    op: OpBuilder,
    dy: ir.Value,
    x: ir.Value,
    image_shape: ir.Value,
    block_shape: ir.Value,
    *,
    dilations: list[int] | None,
    pads: list[int] | None,
    strides: list[int] | None,
) -> Gradients:
    """``dx = im2col(dy)``: each block reads the positions it was added to.

    [N, C, *image] -> [N, C, *block, *positions] -> [N, C * block, positions]
    """
    n = op.rank(dy) - 2
    win = window_geometry([None] * n, strides, dilations, pads)
    columns = pad(op, dy, win)
    blocks = _block_sizes(op, block_shape, n)
    for i in range(n):
        # Axis i of the image becomes the axes block i and position i.
        axis = 2 + 2 * i
        size = op.size(columns, axis)
        reads = _positions(op, size, blocks[i], win.strides[i], win.dilations[i])
        columns = op.Gather(columns, reads, axis=axis)
    order = [*range(2, 2 + 2 * n, 2), *range(3, 3 + 2 * n, 2)]
    if n > 1:
        columns = op.Transpose(columns, perm=[0, 1, *order])
    return op.reshape_like(columns, x)


def _block_sizes(op: OpBuilder, block_shape: ir.Value, n: int) -> list[Size]:
    known = op.constant(block_shape)
    if known is not None:
        return [int(k) for k in known]
    return [op.Slice(block_shape, [i], [i + 1]) for i in range(n)]


def _positions(op: OpBuilder, size: Size, block: Size, stride: int, dilation: int) -> ir.Value:
    """Return [block, positions]: the position of each element of each block on an axis."""
    if isinstance(size, int) and isinstance(block, int):
        count = (size - (block - 1) * dilation - 1) // stride + 1
        table = np.arange(block)[:, None] * dilation + np.arange(count) * stride
        return op.const(table.astype(np.int64))
    if isinstance(block, int):
        reach: Size = (block - 1) * dilation + 1
    else:
        reach = op.Add(op.Mul(op.Sub(block, 1), dilation), 1)
    room = op.Sub(op.const([size]) if isinstance(size, int) else size, reach)
    count = op.Add(op.Div(room, stride), 1)
    starts = op.Mul(op.iota(count), stride)
    return op.Add(op.Unsqueeze(op.Mul(op.iota(block), dilation), [1]), starts)
