"""Resize: interpolation along any axes."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.registry import Gradients, undefined, vjp
from onnxtrain.autodiff.rules.resize.resize_matrix import Resizing, matrix, resized_axes
from onnxtrain.graph.builder import OpBuilder

_COORDINATES = "Resize is differentiated by its values, not by its coordinates"


@vjp("Resize")
def resize(
    op,
    dy,
    x,
    roi=None,
    scales=None,
    sizes=None,
    *,
    y,
    axes,
    mode,
    coordinate_transformation_mode,
    nearest_mode,
    cubic_coeff_a,
    antialias,
    exclude_outside,
    keep_aspect_ratio_policy,
) -> Gradients:
    """Along each axis ``y = x @ A``, so ``dx = dy @ A^T``; where a crop leaves ``x``, A is zero."""
    rank = op.rank(x)
    resizing = Resizing(
        x,
        roi,
        _given(op, scales),
        _given(op, sizes),
        y,
        op.axes(axes or None, rank),
        {
            "mode": mode,
            "coordinate_transformation_mode": coordinate_transformation_mode,
            "nearest_mode": nearest_mode,
            "cubic_coeff_a": cubic_coeff_a,
            "antialias": antialias,
            "exclude_outside": exclude_outside,
            "keep_aspect_ratio_policy": keep_aspect_ratio_policy,
        },
    )
    # Resize knows float32 everywhere; half precision would also round the weights.
    dtype = ir.DataType.DOUBLE if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    dx = op.cast(dy, dtype)
    for axis, place in reversed(resized_axes(op, resizing)):
        dx = _times_transposed(op, dx, matrix(op, resizing, axis, place, dtype), axis, rank)
    return op.cast(dx, x.dtype), undefined(_COORDINATES), undefined(_COORDINATES)


def _given(op: OpBuilder, v: ir.Value | None) -> ir.Value | None:
    """Return an optional input, ``None`` if it is empty: older models fill the gap with that."""
    return None if v is None or op.dims(v) == (0,) else v


def _times_transposed(op: OpBuilder, dy: ir.Value, a: ir.Value, axis: int, rank: int) -> ir.Value:
    """Return ``dy @ a^T`` along ``axis``."""
    if axis == rank - 1:
        return op.MatMul(dy, op.mT(a))
    if axis == rank - 2:
        return op.MatMul(a, dy)
    return op.move_axis(op.MatMul(a, op.move_axis(dy, axis, rank - 2)), rank - 2, axis)
