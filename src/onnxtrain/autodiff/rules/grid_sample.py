"""GridSample: sample an image at given positions, in two, three or more dimensions.

An output pixel ``q`` sums over taps: ``y[n, c, q] = sum_t w[n, q, t] * x[n, c, index[n, q, t]]``.
Weights are products over the axes and indices are sums, so each axis is computed alone (K taps,
``[N, Q, K]``) and broadcast against the others. Borders follow torch: outside pixels are zero, and
coordinates beyond the border are clamped or reflected. Clamped coordinates have zero gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.rule_registry import Gradients, vjp
from onnxtrain.autodiff.rules.norm import working_dtype
from onnxtrain.graph.builder import OpBuilder

# Weights of the taps as polynomials of the fraction: one row per power, one column per tap.
_A = -0.75
_CUBIC = [
    [0.0, 1.0, 0.0, 0.0],
    [_A, 0.0, -_A, 0.0],
    [-2 * _A, -(_A + 3), 2 * _A + 3, _A],
    [_A, _A + 2, -(_A + 2), -_A],
]
_POLYNOMIALS = {"linear": [[1.0, 0.0], [-1.0, 1.0]], "cubic": _CUBIC, "nearest": [[1.0]]}
_FIRST_TAP = {"linear": 0.0, "cubic": -1.0, "nearest": 0.0}
_OLD_NAMES = {"bilinear": "linear", "bicubic": "cubic"}


@dataclass(frozen=True)
class _Axis:
    """The taps along one axis, [N, Q, K], and how they depend on the grid."""

    index: ir.Value
    weight: ir.Value
    """0 for taps outside."""
    derivative: ir.Value
    """Derivative of the weight with respect to the grid's coordinate."""


@vjp("GridSample")
def grid_sample(op, dy, x, grid, *, mode: str, padding_mode: str, align_corners) -> Gradients:
    """``dx`` adds ``w * dy`` at the taps; ``dgrid`` sums ``dy * x[tap] * dw/dgrid`` over them."""
    mode = _OLD_NAMES.get(mode, mode)
    spatial = op.rank(x) - 2
    dtype = working_dtype(x)
    xw, dyw, gridw = (op.cast(v, dtype) for v in (x, dy, grid))
    axes = []
    for s in range(spatial):
        # The grid's last axis is (x, y, z), the image's axes are (z, y, x).
        g = op.Reshape(op.Gather(gridw, spatial - 1 - s, axis=-1), [0, -1])
        length = _length(op, x, s + 2, dtype)
        axes.append(_axis(op, g, length, mode, padding_mode, bool(align_corners)))

    rows = op.Transpose(op.Reshape(xw, [0, 0, -1]), perm=[0, 2, 1])  # [N, P, C]
    flat = op.reshape(rows, [-1, op.size(x, 1)])  # [N * P, C]
    index = _flat_index(op, axes, x, rows)  # [N, Q, T]
    dyt = op.Transpose(op.Reshape(dyw, [0, 0, -1]), perm=[0, 2, 1])  # [N, Q, C]

    weight = op.Reshape(_product(op, [a.weight for a in axes]), [0, 0, -1])
    updates = op.Mul(op.Unsqueeze(weight, [3]), op.Unsqueeze(dyt, [2]))
    added = op.ScatterND(op.zeros_like(flat), op.Unsqueeze(index, [3]), updates, reduction="add")
    dx = op.Transpose(op.reshape_like(added, rows), perm=[0, 2, 1])
    dx = op.cast(op.reshape_like(dx, xw), x.dtype)
    if mode == "nearest":
        return dx, None  # piecewise constant in the grid

    taps = op.MatMul(op.Gather(flat, index, axis=0), op.Unsqueeze(dyt, [3]))  # [N, Q, T, 1]
    count = len(_POLYNOMIALS[mode][0])
    taps = op.Reshape(taps, [0, 0, *[count] * spatial])
    parts = []
    for s in reversed(range(spatial)):
        turned = [a.derivative if i == s else a.weight for i, a in enumerate(axes)]
        total = op.Mul(taps, _product(op, turned))
        part = op.ReduceSum(total, list(range(2, 2 + spatial)), keepdims=0)
        parts.append(op.Unsqueeze(part, [2]))
    dgrid = op.reshape_like(op.Concat(*parts, axis=2), gridw)
    return dx, op.cast(dgrid, grid.dtype)


def _length(op: OpBuilder, x: ir.Value, axis: int, dtype: ir.DataType) -> ir.Value:
    size = op.size(x, axis)
    if isinstance(size, int):
        return op.const(float(size), dtype)
    return op.Cast(op.Reshape(size, op.const([], ir.DataType.INT64)), to=dtype)


def _axis(
    op: OpBuilder, g: ir.Value, length: ir.Value, mode: str, padding: str, align: bool
) -> _Axis:
    """Return the taps along one axis for the coordinates ``g``, [N, Q]."""
    last = op.Sub(length, 1.0)
    moved = op.Add(g, 1.0)
    if align:
        place, rate = op.Mul(op.Div(moved, 2.0), last), op.Div(last, 2.0)
    else:
        place = op.Div(op.Sub(op.Mul(moved, length), 1.0), 2.0)
        rate = op.Div(length, 2.0)
    if mode != "cubic" and padding != "zeros":
        place, turn = _inside(op, place, length, padding, align)
        rate = op.Mul(turn, rate)
    first = op.Round(place) if mode == "nearest" else op.Floor(place)
    rows = [op.const(np.asarray(row), g.dtype) for row in _POLYNOMIALS[mode]]
    offsets = np.arange(len(_POLYNOMIALS[mode][0])) + _FIRST_TAP[mode]
    taps = op.Add(op.Unsqueeze(first, [2]), op.const(offsets, g.dtype))
    if mode == "cubic" and padding != "zeros":
        taps = _inside(op, taps, length, padding, align)[0]
    clamped = op.Clip(taps, 0.0, last)
    mask = op.Cast(op.Equal(taps, clamped), to=g.dtype)
    index = op.Cast(clamped, to=ir.DataType.INT64)
    if mode == "nearest":
        return _Axis(index, mask, mask)
    fraction = op.Unsqueeze(op.Sub(place, first), [2])
    weight = op.Mul(_polynomial(op, rows, fraction), mask)
    steps = [op.const(k * np.asarray(row), g.dtype) for k, row in enumerate(_POLYNOMIALS[mode])]
    derivative = op.Mul(_polynomial(op, steps[1:], fraction), mask)
    rate = op.Unsqueeze(rate, [2]) if op.rank(rate) == 2 else rate
    return _Axis(index, weight, op.Mul(derivative, rate))


def _polynomial(op: OpBuilder, rows: list[ir.Value], t: ir.Value) -> ir.Value:
    """Return ``rows[0] + t * (rows[1] + t * ...)``."""
    total = rows[-1]
    for row in reversed(rows[:-1]):
        total = op.Add(op.Mul(total, t), row)
    return total


def _inside(
    op: OpBuilder, place: ir.Value, length: ir.Value, padding: str, align: bool
) -> tuple[ir.Value, ir.Value]:
    """Return coordinates moved inside the image, and the derivative (1, -1, or 0 at the border)."""
    last = op.Sub(length, 1.0)
    turn = None
    if padding == "reflection":
        low = op.const(0.0 if align else -0.5, place.dtype)
        # An image of width 1 has no span; the clamp below makes the result independent of it.
        span = op.Clip(last if align else length, 1.0)
        shifted = op.Sub(place, low)
        away = op.Abs(shifted)
        flips = op.Floor(op.Div(away, span))
        rest = op.Sub(away, op.Mul(flips, span))
        odd = op.Sub(flips, op.Mul(op.Floor(op.Mul(flips, 0.5)), 2.0))
        turned = op.Greater(odd, 0.5)
        place = op.Add(op.Where(turned, op.Sub(span, rest), rest), low)
        sign = op.Where(op.Less(shifted, 0.0), op.const(-1.0, place.dtype), 1.0)
        turn = op.Where(turned, op.Neg(sign), sign)
    place = op.Clip(place, 0.0, last)
    moving = op.Where(op.Greater(place, 0.0), op.Cast(op.Less(place, last), to=place.dtype), 0.0)
    return place, moving if turn is None else op.Mul(moving, turn)


def _product(op: OpBuilder, parts: list[ir.Value]) -> ir.Value:
    """Return the outer product of [N, Q, K] per axis: [N, Q, K, ..., K]."""
    total = _spread(op, parts[0], 0, len(parts))
    for i, part in enumerate(parts[1:], start=1):
        total = op.Mul(total, _spread(op, part, i, len(parts)))
    return total


def _spread(op: OpBuilder, part: ir.Value, i: int, count: int) -> ir.Value:
    others = [2 + j for j in range(count) if j != i]
    return op.Unsqueeze(part, others) if others else part


def _flat_index(op: OpBuilder, axes: list[_Axis], x: ir.Value, rows: ir.Value) -> ir.Value:
    """Return the row of ``[N * P, C]`` that each tap reads: [N, Q, T]."""
    total = None
    for i, axis in enumerate(axes):
        part = _spread(op, axis.index, i, len(axes))
        total = part if total is None else op.Add(op.Mul(total, _number(op, x, i + 2)), part)
    assert total is not None
    index = op.Reshape(total, [0, 0, -1])
    batch = op.size(x, 0)
    if batch == 1:
        return index
    images = op.Range(0, _number(op, x, 0), 1)
    starts = op.Mul(images, _number(op, rows, 1))
    return op.Add(index, op.Unsqueeze(starts, [1, 2]))


def _number(op: OpBuilder, x: ir.Value, axis: int) -> ir.Value:
    """Return one size as an int64 scalar."""
    size = op.size(x, axis)
    if isinstance(size, int):
        return op.const(size, ir.DataType.INT64)
    return op.Reshape(size, op.const([], ir.DataType.INT64))
