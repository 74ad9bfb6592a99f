"""The weight gradient of a convolution, in several variants.

``dW[o, c, t] = sum over n and p of x[n, c, p * stride - before + t * dilation] * dy[n, o, p]``, for
output channel o, input channel c, tap t, batch n and position p.

All variants compute the same values; their speed differs by factors between runtimes. The choices
list which variant to use where; the first match wins.

Depthwise convolutions have variants of their own, because a matmul per channel is too small. On
small images, all pairs of input and output positions are computed at once, and a 0/1 matrix assigns
each pair to its tap. The im2col variants multiply over the whole batch; see ``graph/windows.py``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.autodiff.rule_registry import Choice, Choices, Variant, Variants, select_variant_name
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.windows import (
    ConvShape,
    Windows,
    can_use_im2col,
    channels_first_perm,
    conv_shape_of,
    im2col,
    is_pointwise,
    pad,
    prefers_im2col_matmul,
    tap_slices,
    window_geometry,
)
from onnxtrain.targets import Target


def weight_by_taps(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """One elementwise multiplication and sum per tap."""
    axes = [0, *win.axes]
    pieces = tap_slices(op, pad(op, x, win), win)
    parts = [op.ReduceSum(op.Mul(p, dy), axes, keepdims=0) for p in pieces]
    if len(parts) == 1:
        return op.reshape_like(parts[0], w)
    stacked = op.reshape(op.Concat(*parts, axis=0), [len(parts), -1])
    return op.reshape_like(op.Transpose(stacked, perm=[1, 0]), w)


def weight_by_pairs(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """``dW = pairs @ table``, ``pairs[c, p, q] = sum over n of x[n, c, p] * dy[n, c, q]``."""
    left = op.Transpose(op.Reshape(x, [0, 0, -1]), perm=[1, 2, 0])
    right = op.Transpose(op.Reshape(dy, [0, 0, -1]), perm=[1, 0, 2])
    pairs = op.MatMul(left, right)
    table = _table(op, x, dy, win, range(win.rank))
    return op.reshape_like(op.MatMul(op.reshape(pairs, [group, -1]), table), w)


def weight_by_row_pairs(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """Pairs of positions along the last axis only; the taps of the others are slices.

    ``pairs[c, t, p, q] = sum over n and h of x[n, c, h * stride + t, p] * dy[n, c, h, q]`` takes
    few matmuls, and ``dW = pairs @ table``. Images of any height are read once per ``t``.
    """
    assert win.static_kernel is not None
    last = win.rank - 1
    upper = Windows(
        (*win.kernel[:-1], 1),
        (*win.strides[:-1], 1),
        (*win.dilations[:-1], 1),
        (*win.before[:-1], 0),
        (*win.after[:-1], 0),
    )
    order = [1, 0, *win.axes]
    padded = pad(op, op.Transpose(x, perm=order), upper)
    width, count = (op.size(v, win.rank + 1) for v in (x, dy))
    right = op.reshape(op.Transpose(dy, perm=order), [group, -1, count])
    slices = tap_slices(op, padded, upper)
    rows = [op.mT(op.reshape(p, [group, -1, width])) for p in slices]
    parts = [op.reshape(op.MatMul(r, right), [group, 1, -1]) for r in rows]
    pairs = parts[0] if len(parts) == 1 else op.Concat(*parts, axis=1)
    return op.reshape_like(op.MatMul(pairs, _table(op, x, dy, win, [last])), w)


def weight_by_scan(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """A loop over the batch of convolutions whose kernel is as wide as the image; for stride 1.

    The data of one image fits the cache. With one channel per group, no padding and a kernel as
    wide as its input, onnxruntime multiplies in place, without an im2col copy.
    """
    assert win.static_kernel is not None
    assert w.dtype is not None
    start = op.full([1, group, *win.static_kernel], 0.0, w.dtype)
    image, signal = (
        ir.Value(name="one", type=v.type, shape=ir.Shape(list(v.shape or ())[1:])) for v in (x, dy)
    )
    inner = op.body([start, image, signal], stem="each")
    total, one_x, one_dy = inner.graph.inputs
    kernel = inner.Unsqueeze(one_dy, [1])  # [C, 1, ...]
    padded = pad(inner, inner.Unsqueeze(one_x, [0]), win)
    width = op.dims(dy)[-1]
    assert isinstance(width, int)
    columns = []
    for t in range(win.static_kernel[-1]):
        at = t * win.dilations[-1]
        strip = inner.Slice(padded, [at], [at + width], [win.rank + 1])
        strides = [*win.dilations[:-1], 1]
        columns.append(inner.Conv(strip, kernel, group=group, strides=strides))
    one = columns[0] if len(columns) == 1 else inner.Concat(*columns, axis=-1)
    inner.graph.outputs.append(inner.Add(total, one))
    dw = op.Scan(start, x, dy, body=inner.graph, num_scan_inputs=2)
    return op.reshape_like(dw, w)


def input_by_pairs(
    op: OpBuilder, dy: ir.Value, w: ir.Value, x: ir.Value, win: Windows, group: int
) -> ir.Value:
    """``dx = dy @ matrix`` for each channel; the table places the taps in the matrix."""
    positions = op.dims(x)[2:], op.dims(dy)[2:]
    sizes = [int(np.prod([int(d) for d in dims])) for dims in positions]  # type: ignore[arg-type]
    taps = op.reshape(w, [group, -1])
    matrix = op.reshape(
        op.MatMul(taps, op.mT(_table(op, x, dy, win, range(win.rank)))), [group, *sizes]
    )
    rows = op.Transpose(op.Reshape(dy, [0, 0, -1]), perm=[1, 0, 2])
    dx = op.Transpose(op.MatMul(rows, op.mT(matrix)), perm=[1, 0, 2])
    return op.reshape_like(dx, x)


def input_by_flipped_conv(
    op: OpBuilder, dy: ir.Value, w: ir.Value, x: ir.Value, win: Windows, group: int
) -> ir.Value:
    """A convolution of ``dy`` with the flipped weight, for stride 1."""
    n = win.rank
    flipped = w
    if win.count != 1:
        flipped = op.Slice(w, [-1] * n, [np.iinfo(np.int64).min] * n, win.axes, [-1] * n)
    reach = [(win.extent(i) or 1) - 1 for i in range(n)]
    pads = [r - p for r, p in zip(reach * 2, win.pads, strict=True)]
    return op.Conv(dy, flipped, dilations=win.dilations, group=group, pads=pads)


def _table(op: OpBuilder, x: ir.Value, dy: ir.Value, win: Windows, axes: Sequence[int]) -> ir.Value:
    """Return [positions of x * positions of dy, taps]: 1 where a window at q reads p by the tap.

    Positions and taps are those along some axes. The table is the product of small tables per axis,
    which the runtime folds to a constant.
    """
    assert win.static_kernel is not None
    n, table = len(axes), None
    for at, i in enumerate(axes):
        size, count = op.dims(x)[2 + i], op.dims(dy)[2 + i]
        assert isinstance(size, int)
        assert isinstance(count, int)
        starts = np.arange(count) * win.strides[i] - win.before[i]
        reads = starts[:, None] + np.arange(win.static_kernel[i]) * win.dilations[i]
        hits = reads == np.arange(size)[:, None, None]  # [p, q, t]
        shape = [1] * (3 * n)
        shape[at], shape[n + at], shape[2 * n + at] = hits.shape
        axis = op.const(hits.reshape(shape).astype(np.float64), x.dtype)
        table = axis if table is None else op.Mul(table, axis)
    assert table is not None
    return op.reshape(table, [-1, int(np.prod([win.static_kernel[i] for i in axes]))])


def weight_by_columns(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """``dW = dy^T @ columns``; a forward convolution as matmul shares the columns."""
    return op.reshape_like(op.MatMul(_rows(op, dy), im2col(op, x, win, taps_first=False)), w)


def weight_by_tap_columns(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """``dW = dy^T @ columns`` with the taps first; a transpose restores the order."""
    dw = op.MatMul(_rows(op, dy), im2col(op, x, win, taps_first=True))
    if win.count == 1:
        return op.reshape_like(dw, w)
    # A Reshape at the end would be a copy, as the result is an output of the graph.
    outs, channels, *kernel = op.dims(w)
    return op.Transpose(
        op.Reshape(dw, [outs, *kernel, channels]), perm=channels_first_perm(win.rank)
    )


def weight_by_shifts(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """Columns for one kernel row, against ``dy`` shifted for every row, in one matmul.

    With a 3x3 kernel ``x`` and ``dy`` are copied three times each, instead of ``x`` nine times.
    """
    sizes = D.static_sizes(op.dims(w))
    assert sizes is not None
    outs, channels, height, width = sizes
    pads = [0, win.before[1], 0, win.after[1]]
    row = im2col(op, x, window_geometry([1, width], None, None, pads), taps_first=True)
    turned = op.Transpose(dy, perm=[1, 0, 2, 3])
    parts = [_moved_down(op, turned, i - win.before[0]) for i in range(height)]
    rows = op.Reshape(op.Concat(*parts, axis=0), [height * outs, -1])
    dw = op.Reshape(op.MatMul(rows, row), [height, outs, width, channels])
    return op.Transpose(dw, perm=[1, 3, 0, 2])


def _moved_down(op: OpBuilder, x: ir.Value, by: int) -> ir.Value:
    """Shift the rows of ``x`` down (up if negative) and fill with zeros."""
    if by == 0:
        return x
    outs, batch, height, width = (op.size(x, i) for i in range(4))
    assert isinstance(height, int)
    assert x.dtype is not None
    zeros = op.full([outs, batch, abs(by), width], 0.0, x.dtype)
    if by > 0:
        return op.Concat(zeros, op.Slice(x, [0], [height - by], [2]), axis=2)
    return op.Concat(op.Slice(x, [-by], [height], [2]), zeros, axis=2)


def weight_by_group_columns(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """``dW = dy^T @ columns`` for each group, as one batched matmul."""
    sizes, image, count = (D.static_sizes(d) for d in (op.dims(w), op.dims(x)[2:], op.dims(dy)[2:]))
    assert sizes is not None
    assert image is not None
    assert count is not None
    outs, channels, *kernel = sizes
    axes = range(3, 3 + win.rank)
    split = op.reshape(x, [op.size(x, 0), group, channels, *image])
    images = op.reshape(op.Transpose(split, perm=[1, 0, 2, *axes]), [-1, channels, *image])
    taps = im2col(op, images, win, taps_first=True)
    rows = op.reshape(dy, [op.size(dy, 0), group, outs // group, *count])
    rows = op.reshape(op.Transpose(rows, perm=[1, 2, 0, *axes]), [group, outs // group, -1])
    dw = op.MatMul(rows, op.reshape(taps, [group, -1, math.prod(kernel) * channels]))
    dw = op.reshape(dw, [outs, *kernel, channels])
    return op.Transpose(dw, perm=channels_first_perm(win.rank))


def weight_by_signal_columns(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """``dW = x^T @ columns`` of windows over ``dy``, for stride 1 and fewer outputs than channels.

    ``dW[o, c, t] = sum over q of x[c, q] * dy[o, q + before - t * dilation]``: a position of ``x``
    is multiplied with a window over ``dy`` whose taps are reversed. The columns dominate time and
    memory, and their width follows the tensor that they are taken from.
    """
    outs, channels, *kernel = op.dims(w)
    reach = [(win.extent(i) or 1) - 1 for i in range(win.rank)]
    turned = dataclasses.replace(
        win,
        before=tuple(r - p for r, p in zip(reach, win.before, strict=True)),
        after=tuple(r - p for r, p in zip(reach, win.after, strict=True)),
    )
    dw = op.MatMul(_rows(op, x), im2col(op, dy, turned, taps_first=True))
    n, end = win.rank, np.iinfo(np.int64).min
    dw = op.Reshape(dw, [channels, *kernel, outs])
    dw = op.Slice(dw, [-1] * n, [end] * n, list(range(1, 1 + n)), [-1] * n)
    return op.Transpose(dw, perm=[1 + n, 0, *range(1, 1 + n)])


def input_by_columns(
    op: OpBuilder, dy: ir.Value, w: ir.Value, x: ir.Value, win: Windows, group: int
) -> ir.Value:
    """``dy @ W`` is the gradient of the columns; Col2Im sums overlapping windows."""
    outs, channels = op.dims(w)[:2]
    positions, image = op.dims(dy)[2:], op.dims(x)[2:]
    rows = op.Reshape(op.Transpose(dy, perm=[0, *win.axes, 1]), [-1, outs])
    d_columns = op.MatMul(rows, op.Reshape(w, [outs, -1]))
    n = win.rank
    if is_pointwise(win):
        d_columns = op.Reshape(d_columns, [-1, *positions, channels])
        return op.Transpose(d_columns, perm=channels_first_perm(n))
    assert win.static_kernel is not None
    count = D.static_sizes(positions)
    assert count is not None
    d_columns = op.Reshape(d_columns, [-1, math.prod(count), op.dims(d_columns)[1]])
    return op.Col2Im(
        op.Transpose(d_columns, perm=[0, 2, 1]),
        op.const(list(image)),
        op.const(list(win.static_kernel)),
        dilations=win.dilations,
        pads=win.pads,
        strides=win.strides,
    )


def _rows(op: OpBuilder, dy: ir.Value) -> ir.Value:
    """[N, C, ...] -> [C, N * positions]."""
    swapped = op.Transpose(dy, perm=[1, 0, *range(2, op.rank(dy))])
    return op.Reshape(swapped, [op.dims(dy)[1], -1])


def weight_gradient(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """Return the gradient of ``w`` in ``y = Conv(x, w)``."""
    name = choose(op.target, conv_shape_of(op, x, dy, w, win, group))
    return WEIGHT_GRAD_VARIANTS[name].build(op, x, dy, w, win, group)


def by_taps(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """One matmul ``dy @ x_t^T`` per tap, summed over the batch."""
    pieces = [_flatten(op, p, win.rank) for p in _tap_slices(op, x, win, group)]
    rows = _flatten(op, _split_channels(op, dy, group), win.rank)
    parts = [op.ReduceSum(op.MatMul(rows, op.mT(p)), [0], keepdims=0) for p in pieces]
    return _from_taps(op, parts, w)


def by_merged_taps(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """One matmul per tap over batch and positions: few large matmuls, no sum afterwards."""
    order = [1, 0, *win.axes]
    slices = tap_slices(op, op.Transpose(pad(op, x, win), perm=order), win)
    rows = _merged_rows(op, op.Transpose(dy, perm=order), group)
    parts = [op.MatMul(rows, op.mT(_merged_rows(op, p, group))) for p in slices]
    return _from_taps(op, parts, w)


def _merged_rows(op: OpBuilder, x: ir.Value, group: int) -> ir.Value:
    """[C, N, ...] -> [C, N * positions], or [group, C / group, N * positions]."""
    rows = op.Reshape(x, [0, -1])
    if group == 1:
        return rows
    channels = op.dims(x)[0]
    if isinstance(channels, int):
        return op.reshape(rows, [group, channels // group, -1])
    return op.reshape(rows, [group, -1, op.size(rows, 1)])


def by_im2col(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """One matmul ``dy @ columns^T``; the columns hold the elements of every window."""
    pieces = _tap_slices(op, x, win, group)
    channel = -1 - win.rank
    columns = pieces[0] if len(pieces) == 1 else op.Concat(*pieces, axis=channel)
    columns = _flatten(op, columns, win.rank)
    rows = _flatten(op, _split_channels(op, dy, group), win.rank)
    dw = op.ReduceSum(op.MatMul(rows, op.mT(columns)), [0], keepdims=0)  # [(group,) out, taps * in]
    if len(pieces) == 1:
        return op.reshape_like(dw, w)
    sizes = D.static_sizes(op.dims(w))
    if sizes is None:
        dw = op.Transpose(op.reshape(dw, [op.size(w, 0), len(pieces), -1]), perm=[0, 2, 1])
        return op.reshape_like(dw, w)
    # A Reshape at the end would be moved in front by onnxruntime, and the order of nodes with it.
    outs, channels, *kernel = sizes
    return op.Transpose(
        op.Reshape(dw, [outs, *kernel, channels]), perm=channels_first_perm(win.rank)
    )


def by_lifted_conv(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """One convolution with an extra axis: the batch is the channel, the channel is a spatial axis.

    ``x`` becomes [1, group * N, C, ...], ``dy`` the weight [O, N, 1, ...]; strides are dilations.
    """
    if group == 1:
        image = op.Unsqueeze(x, [0])
    else:
        split = _split_channels(op, x, group)
        split = op.Transpose(split, perm=[1, 0, *range(2, op.rank(split))])
        image = _merge(op, split, 0, lead=1)
    kernel = op.Unsqueeze(op.Transpose(dy, perm=[1, 0, *win.axes]), [2])
    dw = op.Conv(
        image,
        kernel,
        dilations=[1, *win.strides],
        group=group,
        pads=[0, *win.before, 0, *win.after],
        strides=[1, *win.dilations],
    )
    return op.Squeeze(_cut(op, dw, w, offset=1), [0])


def by_swapped_conv(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """One convolution with batch and channel swapped, and stride and dilation swapped.

    ``x`` becomes [C, group * N, ...], ``dy`` the weight [O, N, ...].
    """
    if group == 1:
        image = op.Transpose(x, perm=[1, 0, *win.axes])
    else:
        split = _split_channels(op, x, group)
        split = op.Transpose(split, perm=[2, 1, 0, *range(3, op.rank(split))])
        image = _merge(op, split, 1)
    kernel = op.Transpose(dy, perm=[1, 0, *win.axes])
    dw = op.Conv(
        image,
        kernel,
        dilations=win.strides,
        group=group,
        pads=win.pads,
        strides=win.dilations,
    )
    return op.Transpose(_cut(op, dw, w, offset=0), perm=[1, 0, *win.axes])


WEIGHT_GRAD_VARIANTS: Variants[ConvShape] = {
    "taps": Variant(by_taps, lambda f: f.taps is not None),
    "merged": Variant(by_merged_taps, lambda f: f.taps is not None),
    "im2col": Variant(by_im2col, lambda f: f.taps is not None),
    "columns": Variant(weight_by_columns, can_use_im2col),
    "tap_columns": Variant(weight_by_tap_columns, can_use_im2col),
    "shifts": Variant(weight_by_shifts, lambda f: f.shiftable),
    "group_columns": Variant(
        weight_by_group_columns, lambda f: _has_window_table(f) and not f.depthwise
    ),
    "signal_columns": Variant(
        weight_by_signal_columns,
        lambda f: can_use_im2col(f) and not f.strided and f.positions is not None,
    ),
    "lifted": Variant(by_lifted_conv),
    "swapped": Variant(by_swapped_conv),
    "depthwise": Variant(weight_by_taps, lambda f: f.depthwise),
    "pairs": Variant(weight_by_pairs, lambda f: f.depthwise and f.pairs is not None),
    "row_pairs": Variant(
        weight_by_row_pairs,
        lambda f: f.depthwise and f.line_pairs is not None and f.pairs is not None,
    ),
    "scan": Variant(
        weight_by_scan, lambda f: f.depthwise and not f.strided and f.pairs is not None
    ),
}

_CPU: list[Choice[ConvShape]] = [
    Choice("pairs", lambda f: f.strided and f.pairs_up_to(T.DEPTHWISE_WEIGHT_GRAD_PAIRS_STRIDED)),
    Choice("pairs", lambda f: not f.strided and f.pairs_up_to(T.DEPTHWISE_WEIGHT_GRAD_PAIRS)),
    Choice("scan"),
    Choice("swapped", lambda f: f.depthwise and f.strided),
    Choice("depthwise"),
    Choice("lifted", lambda f: not f.few_taps),
    Choice("lifted", lambda f: f.group > 1 and f.strided),
    Choice("columns", prefers_im2col_matmul),
    Choice("tap_columns", lambda f: f.dense and f.small_kernel and _few_positions(f)),
    Choice("tap_columns", lambda f: f.dense and f.small_kernel and f.taps != 1 and f.strided),
    Choice("lifted", lambda f: f.small_image and f.tiny_image and not f.strided),
    Choice("merged", lambda f: f.small_image),
    Choice("im2col", lambda f: f.taps == 1),
    Choice("lifted", lambda f: f.narrow and f.strided and not f.small_kernel),
    Choice("im2col", lambda f: f.narrow),
    Choice("merged", lambda f: f.group == 1),
    Choice("taps"),
]
# Matmuls instead of a convolution whose kernel has the size of the image: it loses precision on
# WebGPU.
_MATMUL: list[Choice[ConvShape]] = [
    Choice("pairs", lambda f: f.pairs_up_to(T.DEPTHWISE_WEIGHT_GRAD_PAIRS_MATMUL)),
    Choice("depthwise"),
    Choice("im2col"),
    Choice("swapped"),
]
# On a GPU a kernel of the size of the image takes a hundred times as long as a matmul.
# The first match wins: choices for fewer sizes stand first.
_CUDA: list[Choice[ConvShape]] = [
    Choice("pairs", lambda f: f.pairs_up_to(T.DEPTHWISE_WEIGHT_GRAD_PAIRS_GPU)),
    Choice("row_pairs", lambda f: f.line_pairs_up_to(T.DEPTHWISE_WEIGHT_GRAD_ROW_PAIRS_GPU)),
    Choice("tap_columns", lambda f: f.taps == 1 and not f.strided and _narrowing(f)),
    Choice("merged", lambda f: f.taps == 1 and f.small_image),
    Choice("im2col", lambda f: f.taps == 1),
    Choice("group_columns", lambda f: f.group > 1),
    Choice("im2col", lambda f: f.narrow and _joinable(f)),
    Choice("signal_columns", lambda f: _is_output_narrower(f)),
    Choice("shifts", lambda f: f.small_kernel),
    Choice("tap_columns"),
    Choice("im2col", lambda f: _joinable(f)),
    Choice("depthwise"),
    Choice("taps", lambda f: f.few_taps),
    Choice("swapped"),
]


def _narrowing(facts: ConvShape) -> bool:
    """Return whether images are small and have more input than output channels."""
    wide = facts.channels is not None and facts.outs is not None and facts.channels > facts.outs
    return wide and facts.small_image


def _has_window_table(facts: ConvShape) -> bool:
    """Return whether sizes are static, so that a table can map windows to positions."""
    known = None not in (facts.taps, facts.channels, facts.outs, facts.image, facts.positions)
    return known and (facts.taps or 0) * (facts.positions or 0) <= T.WINDOW_TABLE_ELEMENTS


def _is_output_narrower(facts: ConvShape) -> bool:
    """Return whether windows over the output are at most half as wide as those over the input."""
    if facts.channels is None or facts.outs is None or facts.taps == 1:
        return False
    return 2 * facts.outs <= facts.channels


def _joinable(facts: ConvShape) -> bool:
    return facts.taps is not None and facts.taps <= T.CUDA_GRAPH_CONCAT_INPUTS


WEIGHT_GRAD_CHOICES: dict[str, Choices[ConvShape]] = {  # by family of targets
    "cpu": _CPU,
    "wasm": [Choice("im2col", lambda f: f.group == 1 and f.few_taps), *_CPU],
    "cuda": _CUDA,
    "products": _MATMUL,
}


def _few_positions(facts: ConvShape) -> bool:
    one_tap = facts.taps == 1
    return facts.positions_up_to(
        T.IM2COL_WEIGHT_GRAD_POSITIONS_ONE_TAP if one_tap else T.IM2COL_WEIGHT_GRAD_POSITIONS
    )


def choose(target: Target, facts: ConvShape) -> str:
    """Return the name of the variant for a target."""
    return select_variant_name(
        target, facts, WEIGHT_GRAD_VARIANTS, WEIGHT_GRAD_CHOICES.get(target.family, _MATMUL)
    )


def _split_channels(op: OpBuilder, x: ir.Value, group: int) -> ir.Value:
    """[N, group * C, ...] -> [N, group, C, ...]; untouched if there is one group."""
    if group == 1:
        return x
    channels, *rest = op.dims(x)[1:]
    if isinstance(channels, int):
        split = [group, channels // group]
        unknown = sum(not isinstance(d, int) for d in rest)
        sizes = [
            -1 if unknown == 1 and not isinstance(d, int) else op.size(x, 2 + i)
            for i, d in enumerate(rest)
        ]
    else:
        split = [group, -1]
        sizes = [op.size(x, 2 + i) for i in range(len(rest))]
    return op.Reshape(x, op.vector([0, *split, *sizes]))  # 0: the batch, as it is


def _merge(op: OpBuilder, x: ir.Value, axis: int, lead: int = 0) -> ir.Value:
    """Merge axes ``axis`` and ``axis + 1``; prepend ``lead`` axes of size 1."""
    dims = op.dims(x)
    sizes = [op.size(x, i) for i in range(len(dims)) if i not in (axis, axis + 1)]
    left, right = dims[axis], dims[axis + 1]
    sizes.insert(axis, left * right if isinstance(left, int) and isinstance(right, int) else -1)
    return op.Reshape(x, op.vector([*[1] * lead, *sizes]))


def _tap_slices(op: OpBuilder, x: ir.Value, win: Windows, group: int) -> list[ir.Value]:
    """Return the elements that the windows read at each tap: [N, C, ...] or [N, group, C, ...]."""
    split = _split_channels(op, pad(op, x, win), group)
    axes = list(range(op.rank(split) - win.rank, op.rank(split)))
    return tap_slices(op, split, win, axes)


def _flatten(op: OpBuilder, x: ir.Value, spatial: int) -> ir.Value:
    """Merge the last axes."""
    return x if spatial == 1 else op.Reshape(x, [*[0] * (op.rank(x) - spatial), -1])


def _from_taps(op: OpBuilder, parts: list[ir.Value], w: ir.Value) -> ir.Value:
    """Return a weight from its values at each tap."""
    if len(parts) == 1:
        return op.reshape_like(parts[0], w)
    stacked = op.reshape(op.Concat(*parts, axis=0), [len(parts), -1])
    return op.reshape_like(op.Transpose(stacked, perm=[1, 0]), w)


def _cut(op: OpBuilder, dw: ir.Value, w: ir.Value, offset: int) -> ir.Value:
    """Slice the spatial axes to the size of the kernel; the stride may leave a remainder."""
    have, want = op.dims(dw)[2 + offset :], op.dims(w)[2:]
    axes = [i for i, (a, b) in enumerate(zip(have, want, strict=True)) if a != b]
    if not axes:
        return dw
    ends = op.vector([op.size(w, 2 + i) for i in axes])
    return op.Slice(dw, [0] * len(axes), ends, [2 + offset + i for i in axes])
