"""Deformable convolution: every window samples at learned offsets.

``y = W @ columns``. For each tap and position, the columns hold the image sampled bilinearly at the
tap's position plus an offset, times a mask. The image is zero outside its borders.

Shapes: N images, D offset groups, K taps, P positions, C channels per offset group.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.rule_registry import Gradients, vjp
from onnxtrain.errors import UndifferentiableError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, Size
from onnxtrain.graph.windows import Windows, window_geometry


@dataclasses.dataclass(frozen=True)
class Corner:
    """One of the four image elements around each sampled position."""

    row: ir.Value
    """[N, D, K, P]: its row in the table of pixels."""
    across: ir.Value
    """Its weight along the vertical axis, [N, D, K, P]."""
    along: ir.Value
    """Its weight along the horizontal axis; zero if it is outside the image."""
    across_derivative: float
    along_derivative: float
    inside: ir.Value
    """One inside the image, else zero."""


@vjp("DeformConv")
def deform_conv(
    op: OpBuilder,
    dy: ir.Value,
    x: ir.Value,
    w: ir.Value,
    offset: ir.Value,
    b: ir.Value | None = None,
    mask: ir.Value | None = None,
    *,
    node: ir.Node,
    dilations: list[int] | None,
    group: int,
    kernel_shape: list[int] | None,
    offset_group: int,
    pads: list[int] | None,
    strides: list[int] | None,
) -> Gradients:
    """Differentiate the product with W, the mask, and the bilinear samples.

    The derivative of a sample jumps at integer positions; there the right derivative is used.
    """
    win = window_geometry(kernel_shape or op.dims(w)[2:], strides, dilations, pads)
    if win.rank != 2 or win.count is None:
        raise UndifferentiableError(
            f"no gradient for node {node.name!r}: only two spatial axes and a static kernel size "
            f"are supported\n  {S.describe(node)}"
        )
    taps, images, channels = win.count, op.size(x, 0), op.size(x, 1)
    per_offset = divide(op, channels, offset_group)
    grid = [images, offset_group, taps, -1]

    pixels = _pixel_rows(op, x, offset_group, per_offset)
    corners = _corners(op, x, dy, offset, win, offset_group)
    values = [op.Gather(pixels, c.row) for c in corners]  # [N, D, K, P, C]
    weights = [op.Mul(c.across, c.along) for c in corners]
    sample = _total(op, [op.Mul(_column(op, k), v) for k, v in zip(weights, values, strict=True)])
    factor = None if mask is None else _column(op, op.reshape(mask, grid))
    masked = sample if factor is None else op.Mul(sample, factor)

    rows = op.reshape(dy, [images, group, divide(op, op.size(w, 0), group), -1])
    columns = op.reshape(
        op.Transpose(masked, perm=[0, 1, 4, 2, 3]),
        [images, group, times(op, divide(op, channels, group), taps), _positions(op, dy)],
    )
    dw = op.ReduceSum(op.MatMul(rows, op.mT(columns)), [0], keepdims=0)
    kernel = op.reshape(w, [group, divide(op, op.size(w, 0), group), -1])
    spread = op.reshape(
        op.MatMul(op.mT(kernel), rows), [images, offset_group, per_offset, taps, _positions(op, dy)]
    )
    d_masked = op.Transpose(spread, perm=[0, 1, 3, 4, 2])
    d_sample = d_masked if factor is None else op.Mul(d_masked, factor)

    dx = _image_gradient(op, x, pixels, corners, weights, d_sample, offset_group, per_offset)
    d_offset = _offset_gradient(op, corners, values, d_sample)
    d_mask = None
    if mask is not None:
        d_mask = op.reshape_like(op.ReduceSum(op.Mul(d_masked, sample), [-1], keepdims=0), mask)
    db = None if b is None else op.ReduceSum(dy, [0, 2, 3], keepdims=0)
    return dx, op.reshape_like(dw, w), op.reshape_like(d_offset, offset), db, d_mask


def _pixel_rows(op: OpBuilder, x: ir.Value, offset_group: int, per_offset: Size) -> ir.Value:
    """Return the image as a table with a row of C channels per image, offset group and pixel."""
    split = op.reshape(x, [op.size(x, 0), offset_group, per_offset, _positions(op, x)])
    return op.reshape(op.Transpose(split, perm=[0, 1, 3, 2]), [-1, per_offset])


def _image_gradient(
    op: OpBuilder,
    x: ir.Value,
    pixels: ir.Value,
    corners: list[Corner],
    weights: list[ir.Value],
    d_sample: ir.Value,
    offset_group: int,
    per_offset: Size,
) -> ir.Value:
    """Sum, for each pixel, the gradients of the samples that read it."""
    table = op.zeros_like(pixels)
    for corner, weight in zip(corners, weights, strict=True):
        updates = op.reshape(op.Mul(d_sample, _column(op, weight)), [-1, per_offset])
        where = op.Reshape(corner.row, [-1, 1])
        table = op.ScatterND(table, where, updates, reduction="add")
    split = op.reshape(table, [op.size(x, 0), offset_group, _positions(op, x), per_offset])
    return op.reshape_like(op.Transpose(split, perm=[0, 1, 3, 2]), x)


def _offset_gradient(
    op: OpBuilder, corners: list[Corner], values: list[ir.Value], d_sample: ir.Value
) -> ir.Value:
    """Return the derivatives of the samples along both axes, [N, D, K, 2, P]."""
    inner = [op.ReduceSum(op.Mul(d_sample, v), [-1], keepdims=0) for v in values]
    across = [
        op.Mul(op.Mul(i, c.along), c.across_derivative) for i, c in zip(inner, corners, strict=True)
    ]
    along = [
        op.Mul(op.Mul(i, op.Mul(c.across, c.inside)), c.along_derivative)
        for i, c in zip(inner, corners, strict=True)
    ]
    return op.Concat(*(op.Unsqueeze(_total(op, part), [3]) for part in (across, along)), axis=3)


def _corners(
    op: OpBuilder, x: ir.Value, dy: ir.Value, offset: ir.Value, win: Windows, offset_group: int
) -> list[Corner]:
    """Return the four pixels around each sampled position, with their weights."""
    images, height, width = op.size(x, 0), op.size(x, 2), op.size(x, 3)
    moved = op.reshape(offset, [images, offset_group, win.count or 1, 2, -1])
    starts = _tap_positions(op, dy, win, x.dtype)
    floors, parts = [], []
    for i in range(2):
        at = op.Add(op.Gather(moved, i, axis=3), starts[i])
        floors.append(op.Floor(at))
        parts.append(op.Sub(at, floors[-1]))
    area = times(op, height, width)
    table = op.reshape(
        op.Mul(op.iota(times(op, images, offset_group)), area), [images, offset_group, 1, 1]
    )
    corners = []
    for down in (0, 1):
        for right in (0, 1):
            y = op.Add(floors[0], 1.0) if down else floors[0]
            z = op.Add(floors[1], 1.0) if right else floors[1]
            inside = op.Mul(_within(op, y, height), _within(op, z, width))
            line = op.Mul(_clip(op, y, height), width)
            corners.append(
                Corner(
                    row=op.Add(op.Add(line, _clip(op, z, width)), table),
                    across=parts[0] if down else op.Sub(1.0, parts[0]),
                    along=op.Mul(parts[1] if right else op.Sub(1.0, parts[1]), inside),
                    across_derivative=1.0 if down else -1.0,
                    along_derivative=1.0 if right else -1.0,
                    inside=inside,
                )
            )
    return corners


def _tap_positions(
    op: OpBuilder, dy: ir.Value, win: Windows, dtype: ir.DataType | None
) -> list[ir.Value]:
    """Return the position of each tap of each window without offset: [K, P] per axis."""
    assert win.static_kernel is not None
    sizes = [op.size(dy, 2), op.size(dy, 3)]
    positions = []
    for i in range(2):
        shape = [1, 1, 1, 1]
        shape[i] = win.static_kernel[i]
        taps = np.arange(win.static_kernel[i]) * win.dilations[i] - win.before[i]
        place = [1, 1, 1, 1]
        place[2 + i] = -1
        starts = op.Reshape(op.Mul(op.iota(sizes[i]), win.strides[i]), place)
        both = op.Add(op.const(taps.reshape(shape).astype(np.int64)), starts)
        both = op.Expand(both, op.vector([*win.static_kernel, *sizes]))
        positions.append(op.Cast(op.Reshape(both, [win.count or 1, -1]), to=dtype))
    return positions


def _within(op: OpBuilder, at: ir.Value, size: Size) -> ir.Value:
    """Return 1 where ``0 <= at < size``, else 0."""
    last = op.cast(_scalar(op, _last(op, size)), at.dtype)
    return op.Cast(op.And(op.GreaterOrEqual(at, 0.0), op.LessOrEqual(at, last)), to=at.dtype)


def _clip(op: OpBuilder, at: ir.Value, size: Size) -> ir.Value:
    """Return positions clamped to the axis, as integers."""
    last = op.cast(_scalar(op, _last(op, size)), at.dtype)
    return op.Cast(op.Clip(at, 0.0, last), to=ir.DataType.INT64)


def _last(op: OpBuilder, size: Size) -> Size:
    """Return the last index of an axis."""
    return size - 1 if isinstance(size, int) else op.Sub(size, 1)


def _scalar(op: OpBuilder, size: Size) -> ir.Value:
    return op.const(size) if isinstance(size, int) else op.Squeeze(size, [0])


def _positions(op: OpBuilder, image: ir.Value) -> Size:
    return times(op, op.size(image, 2), op.size(image, 3))


def times(op: OpBuilder, a: Size, b: Size) -> Size:
    """Multiply two sizes."""
    return a * b if isinstance(a, int) and isinstance(b, int) else op.Mul(a, b)


def divide(op: OpBuilder, a: Size, b: int) -> Size:
    """Divide a size by one of its divisors."""
    return a // b if isinstance(a, int) else a if b == 1 else op.Div(a, b)


def _column(op: OpBuilder, x: ir.Value) -> ir.Value:
    return op.Unsqueeze(x, [-1])


def _total(op: OpBuilder, parts: list[ir.Value]) -> ir.Value:
    total = parts[0]
    for part in parts[1:]:
        total = op.Add(total, part)
    return total
