"""Gradients of convolutions in which every channel is on its own.

The general forms are slow here, as each channel alone makes too small a product. On small images,
all pairs of input and output positions are computed at once, and a table of zeros and ones says
which pairs belong to which tap.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.windows.geometry import Windows, pad, tap_slices


def weight_by_taps(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """One elementwise product and sum per tap."""
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

    ``pairs[c, t, p, q] = sum over n and h of x[n, c, h * stride + t, p] * dy[n, c, h, q]`` are few
    products of matrices, and ``dW = pairs @ table``. Images of any height are read once per ``t``.
    """
    assert win.static_kernel is not None
    last = win.rank - 1
    upper = Windows(
        (*win.kernel[:-1], 1), (*win.strides[:-1], 1), (*win.dilations[:-1], 1),
        (*win.before[:-1], 0), (*win.after[:-1], 0),
    )  # fmt: skip
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
    """A loop over the batch, of convolutions whose kernel is as wide as the image; for stride 1.

    What one image needs stays in the cache. With one channel per group, no padding and a kernel as
    wide as its input, onnxruntime multiplies in place, without copying windows out.
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
    """``dx = dy @ matrix`` for each channel; the matrix holds the taps where the table says."""
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
    """Return [positions of x * positions of dy, taps]: one where a window at q reads p by the tap.

    Positions and taps are those along some of the windows' axes. It is the product of a small table
    per axis, which the runtime folds to a constant.
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
