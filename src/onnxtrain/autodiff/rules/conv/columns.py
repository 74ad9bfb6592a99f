"""Gradients of a convolution as products over the whole batch; see ``graph/windows/columns.py``."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.windows.columns import channels_second, columns
from onnxtrain.graph.windows.conv_shape import one_to_one
from onnxtrain.graph.windows.geometry import Windows, windows


def weight_by_columns(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """``dW = dy^T @ columns``; a forward convolution that is a product shares the columns."""
    return op.reshape_like(op.MatMul(_rows(op, dy), columns(op, x, win, by_tap=False)), w)


def weight_by_tap_columns(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """``dW = dy^T @ columns`` with the taps in front, put in order afterwards."""
    dw = op.MatMul(_rows(op, dy), columns(op, x, win, by_tap=True))
    if win.count == 1:
        return op.reshape_like(dw, w)
    # A Reshape at the end would be a copy, as the result is an output of the graph.
    outs, channels, *kernel = op.dims(w)
    return op.Transpose(op.Reshape(dw, [outs, *kernel, channels]), perm=channels_second(win.rank))


def weight_by_shifts(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """Columns hold what a row of each window reads; the rows are shifts of ``dy``, all one product.

    With a 3x3 kernel ``x`` and ``dy`` are copied three times each, instead of ``x`` nine times.
    """
    sizes = D.numbers(op.dims(w))
    assert sizes is not None
    outs, channels, height, width = sizes
    pads = [0, win.before[1], 0, win.after[1]]
    row = columns(op, x, windows([1, width], None, None, pads), by_tap=True)
    turned = op.Transpose(dy, perm=[1, 0, 2, 3])
    parts = [_moved_down(op, turned, i - win.before[0]) for i in range(height)]
    rows = op.Reshape(op.Concat(*parts, axis=0), [height * outs, -1])
    dw = op.Reshape(op.MatMul(rows, row), [height, outs, width, channels])
    return op.Transpose(dw, perm=[1, 3, 0, 2])


def _moved_down(op: OpBuilder, x: ir.Value, by: int) -> ir.Value:
    """Return ``x`` with its rows moved down, or up by a negative number; zeros come in."""
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
    """``dW = dy^T @ columns`` for each group, all groups in one product."""
    sizes, image, count = (D.numbers(d) for d in (op.dims(w), op.dims(x)[2:], op.dims(dy)[2:]))
    assert sizes is not None
    assert image is not None
    assert count is not None
    outs, channels, *kernel = sizes
    axes = range(3, 3 + win.rank)
    split = op.reshape(x, [op.size(x, 0), group, channels, *image])
    images = op.reshape(op.Transpose(split, perm=[1, 0, 2, *axes]), [-1, channels, *image])
    taps = columns(op, images, win, by_tap=True)
    rows = op.reshape(dy, [op.size(dy, 0), group, outs // group, *count])
    rows = op.reshape(op.Transpose(rows, perm=[1, 2, 0, *axes]), [group, outs // group, -1])
    dw = op.MatMul(rows, op.reshape(taps, [group, -1, math.prod(kernel) * channels]))
    dw = op.reshape(dw, [outs, *kernel, channels])
    return op.Transpose(dw, perm=channels_second(win.rank))


def weight_by_signal_columns(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """``dW = x^T @ columns`` of windows over ``dy``, for stride 1 and fewer outputs than channels.

    ``dW[o, c, t] = sum over q of x[c, q] * dy[o, q + before - t * dilation]``: what a position of
    ``x`` meets is a window over ``dy`` with its taps in reverse order. The columns are the largest
    part of the work and of the memory, and as wide as the tensor that they are made of.
    """
    outs, channels, *kernel = op.dims(w)
    reach = [(win.extent(i) or 1) - 1 for i in range(win.rank)]
    turned = dataclasses.replace(
        win,
        before=tuple(r - p for r, p in zip(reach, win.before, strict=True)),
        after=tuple(r - p for r, p in zip(reach, win.after, strict=True)),
    )
    dw = op.MatMul(_rows(op, x), columns(op, dy, turned, by_tap=True))
    n, end = win.rank, np.iinfo(np.int64).min
    dw = op.Reshape(dw, [channels, *kernel, outs])
    dw = op.Slice(dw, [-1] * n, [end] * n, list(range(1, 1 + n)), [-1] * n)
    return op.Transpose(dw, perm=[1 + n, 0, *range(1, 1 + n)])


def input_by_columns(
    op: OpBuilder, dy: ir.Value, w: ir.Value, x: ir.Value, win: Windows, group: int
) -> ir.Value:
    """``dy @ W`` is the gradient of the columns; Col2Im adds up what several windows read."""
    outs, channels = op.dims(w)[:2]
    positions, image = op.dims(dy)[2:], op.dims(x)[2:]
    rows = op.Reshape(op.Transpose(dy, perm=[0, *win.axes, 1]), [-1, outs])
    d_columns = op.MatMul(rows, op.Reshape(w, [outs, -1]))
    n = win.rank
    if one_to_one(win):
        d_columns = op.Reshape(d_columns, [-1, *positions, channels])
        return op.Transpose(d_columns, perm=channels_second(n))
    assert win.static_kernel is not None
    count = D.numbers(positions)
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
