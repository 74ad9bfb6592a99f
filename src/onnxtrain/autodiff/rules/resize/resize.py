"""Resize: interpolation along any axes."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.autodiff.registry import Gradients, undefined, vjp
from onnxtrain.autodiff.rules.resize.resize_matrix import Resizing, matrix, resized_axes
from onnxtrain.autodiff.variants import Choice, Choices, Form, Forms, chosen
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.windows.repeated_positions import repeats

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
    node,
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
    factors = repeats(node, op.opset)
    dx = chosen(op, factors, FORMS, CHOICES)(op, dy, resizing, factors)
    return dx, undefined(_COORDINATES), undefined(_COORDINATES)


def _by_matrices(
    op: OpBuilder, dy: ir.Value, resizing: Resizing, factors: list[int] | None
) -> ir.Value:
    """A product per axis."""
    x, rank = resizing.x, op.rank(resizing.x)
    # Resize knows float32 everywhere; half precision would also round the weights.
    dx = _wide(op, dy)
    dtype = dx.dtype
    assert dtype is not None
    for axis, place in reversed(resized_axes(op, resizing)):
        dx = _times_transposed(op, dx, matrix(op, resizing, axis, place, dtype), axis, rank)
    return op.cast(dx, x.dtype)


def _by_pooling(op: OpBuilder, dy: ir.Value, resizing: Resizing, factors: list[int]) -> ir.Value:
    """The sum over the copies of each position, as a mean of windows that do not overlap."""
    mean = op.AveragePool(_wide(op, dy), kernel_shape=factors, strides=factors)
    return op.cast(op.Mul(mean, float(math.prod(factors))), dy.dtype)


def _wide(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return ``x`` in a type that every runtime resizes and pools."""
    return op.cast(x, x.dtype if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT)


FORMS: Forms[list[int] | None] = {
    "matrices": Form(_by_matrices),
    "pooling": Form(_by_pooling, lambda factors: factors is not None),
}
CHOICES: Choices[list[int] | None] = [
    Choice("pooling", prefers="pooled-copies"),
    Choice("matrices"),
]


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
