"""Sums over sliding windows, transposed: each window's value back to all that it read.

A window sum is a product with one matrix of zeros and ones per axis, so its transpose is a product
with the transposed matrices, whatever the padding, dilation or rounding. The matrices are constants
if the sizes are known, else they are computed at run time. On large images a transposed
convolution is cheaper.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.autodiff.rules.conv.conv import input_gradient
from onnxtrain.errors import ShapeError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.shape_ops import Size
from onnxtrain.graph.windows.geometry import Windows, fixed_padding, same_pads

_TABLE = 1 << 24  # elements of a table of what windows read


@dataclasses.dataclass(frozen=True)
class Axis:
    """The windows along one axis."""

    size: Size
    count: Size
    """How many windows there are."""
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
        x: what the windows slide over.
        y: has the shape of ``dy``.
        win: the windows.
        auto_pad: how ``x`` is padded.
        ceil_mode: whether the last window may hang over.
        divide: by how many elements a window's value is divided first: "" by none, "inside" by
            those inside ``x``, "padded" by those inside ``x`` and its padding.
    """
    axes = _axes(op, x, y, win, auto_pad, ceil_mode)
    fixed = fixed_padding(op, x, y, win, auto_pad)
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
        # Join the axes behind this one: [N, C, ..., here, rest]
        at = op.rank(x) - 2 - back
        flat = op.MatMul(left, op.Reshape(dx, [*[0] * (at + 1), -1]))
        sizes = [op.size(dx, i) for i in range(op.rank(x))]
        sizes[at] = axis.size
        dx = op.reshape(flat, sizes)
    return dx


def _axes(
    op: OpBuilder, x: ir.Value, y: ir.Value, win: Windows, auto_pad: str, ceil_mode: int
) -> list[Axis]:
    fixed = fixed_padding(op, x, y, win, auto_pad)
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
    """Return [windows, positions] with a one, or one over the count, where a window reads."""
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
    # The table is built in the orientation in which it is used.
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
    """Return the positions that each window reads, outside ones included: [windows, kernel]."""
    if _number(axis.count) * axis.kernel > _TABLE:
        raise ShapeError(
            f"{axis.count} windows of {axis.kernel} along one axis: too many for a table of what "
            "they read\nhint: give the axis a size by name, it is then computed at run time"
        )
    starts = np.arange(_number(axis.count)) * axis.stride - _number(axis.before)
    return starts[:, None] + np.arange(axis.kernel) * axis.dilation


def _counts(axis: Axis, divide: str) -> np.ndarray:
    """Return how many elements count in each window."""
    reads, size = _reads(axis), _number(axis.size)
    inside = (reads >= 0) & (reads < size)
    padded = reads < size + _number(axis.after)
    return (inside if divide == "inside" else padded).sum(1)
