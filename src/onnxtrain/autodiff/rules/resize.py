"""Resize (interpolation along any axes) and AffineGrid.

Resize is linear in ``x`` and separable: along one axis it multiplies by a matrix, and that matrix
is the Resize of an identity matrix along the same axis. Resize itself computes the matrix, so the
gradient has the runtime's own coordinates, rounding and weights, in every mode and at any size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.rule_registry import (
    Choice,
    Choices,
    Gradients,
    Variant,
    Variants,
    select_variant,
    undefined,
    vjp,
)
from onnxtrain.errors import UndifferentiableError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.windows import nearest_repeats

_COPIED_ATTRIBUTES = ("mode", "coordinate_transformation_mode", "nearest_mode", "cubic_coeff_a")


@dataclass(frozen=True)
class Resizing:
    """One Resize node: its inputs, its output and its attributes."""

    x: ir.Value
    roi: ir.Value | None
    scales: ir.Value | None
    sizes: ir.Value | None
    y: ir.Value
    axes: list[int]
    attributes: dict[str, object]

    def __getitem__(self, name: str) -> object:
        return self.attributes[name]

    @property
    def crops(self) -> bool:
        """Whether coordinates refer to a region of interest."""
        return self["coordinate_transformation_mode"] == "tf_crop_and_resize"

    @property
    def keeps_aspect(self) -> bool:
        """Whether all axes share one scale, which then differs from the ratio of the sizes."""
        policy = self["keep_aspect_ratio_policy"] not in (None, "stretch")
        return policy and self.sizes is not None


def resized_axes(op: OpBuilder, r: Resizing) -> list[tuple[int, int]]:
    """Return (axis, index in ``axes``) for every axis that may change."""
    scales = op.constant(r.scales) if r.scales is not None else None
    same = [a == b and a is not None for a, b in zip(op.dims(r.x), op.dims(r.y), strict=True)]
    resized = []
    for place, axis in enumerate(r.axes):
        if not r.crops and not r.keeps_aspect:
            if scales is not None and scales[place] == 1:
                continue
            if r.scales is None and same[axis]:
                continue
        resized.append((axis, place))
    return resized


def matrix(op: OpBuilder, r: Resizing, axis: int, place: int, dtype: ir.DataType) -> ir.Value:
    """Return the matrix [n, m] of Resize along ``axis``, multiplied from the right."""
    n, m = op.size(r.x, axis), op.size(r.y, axis)
    eye = op.EyeLike(op.full([n, n], 0.0, dtype))
    roi = _region(op, r, place) if r.crops else None
    attributes = {k: r[k] for k in _COPIED_ATTRIBUTES if r[k] is not None}
    attributes |= {k: r[k] for k in ("antialias", "exclude_outside") if r[k]}
    if r.keeps_aspect and r["coordinate_transformation_mode"] in _COMMON_SCALE:
        return _with_common_scale(op, r, axis, eye, attributes)
    if r.scales is not None:
        one = op.Slice(r.scales, [place], [place + 1])
        scales = op.Concat(op.const([1.0], r.scales.dtype), one, axis=0)
        return op.Resize(eye, roi, scales, **attributes)
    return op.Resize(eye, roi, None, op.vector([n, m]), **attributes)


def _region(op: OpBuilder, r: Resizing, place: int) -> ir.Value:
    """Return the region of an identity matrix: all rows, and the axis's own columns."""
    if r.roi is None:
        raise ValueError("tf_crop_and_resize requires the input roi")
    count = len(r.axes)
    start = op.Slice(r.roi, [place], [place + 1])
    end = op.Slice(r.roi, [place + count], [place + count + 1])
    zero, one = op.const([0.0], r.roi.dtype), op.const([1.0], r.roi.dtype)
    return op.Concat(zero, start, one, end, axis=0)


# Coordinates that depend on the scale; align_corners and tf_crop_and_resize only read sizes.
_COMMON_SCALE = frozenset(
    {"half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "asymmetric"}
)


def _with_common_scale(
    op: OpBuilder, r: Resizing, axis: int, eye: ir.Value, attributes: dict[str, object]
) -> ir.Value:
    """Return the matrix under ``keep_aspect_ratio_policy``, whose sizes are rounded, not truncated.

    Given a scale, Resize returns ``floor(n * scale)`` columns, possibly one too few. So the axis is
    extended by the values that the operator reads beyond its border, and the surplus is dropped.
    """
    assert r.sizes is not None
    kind, m = r["coordinate_transformation_mode"], op.size(r.y, axis)
    if kind == "half_pixel_symmetric" or (
        kind == "pytorch_half_pixel" and not (isinstance(m, int) and m > 1)
    ):
        raise UndifferentiableError(
            f"no gradient of Resize with keep_aspect_ratio_policy and {kind}: "
            f"{S.describe_value(r.x)} to {S.describe_value(r.y)}: its coordinates depend on a size "
            "that is rounded after scaling\n"
            "hint: give the final sizes and keep_aspect_ratio_policy='stretch'"
        )
    before = op.vector([op.size(r.x, a) for a in r.axes])
    ratios = op.Div(op.Cast(r.sizes, to=ir.DataType.FLOAT), op.Cast(before, to=ir.DataType.FLOAT))
    reduce = op.ReduceMin if r["keep_aspect_ratio_policy"] == "not_larger" else op.ReduceMax
    scales = op.Concat(op.const([1.0]), reduce(ratios, [0], keepdims=1), axis=0)
    # n + 1 extra elements suffice: the size is at least 1, so n * scale is at least 0.5.
    n = op.size(r.x, axis)
    surplus = n + 1 if isinstance(n, int) else op.Add(n, 1)
    outside = bool(r["exclude_outside"])
    padded = op.Pad(
        eye, op.vector([0, 0, 0, surplus]), None, mode="constant" if outside else "edge"
    )
    wide = op.Resize(padded, None, scales, **attributes)
    weights = op.Slice(wide, [0], op.vector([m]), [1])
    if outside:  # weights outside the image move to the border
        weights = op.Div(weights, op.ReduceSum(weights, [0], keepdims=1))
    return weights


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
    """Along each axis ``y = x @ A``, so ``dx = dy @ A^T``; A is zero where a crop exceeds ``x``."""
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
    factors = nearest_repeats(node, op.opset)
    dx = select_variant(op, factors, RESIZE_GRAD_VARIANTS, RESIZE_GRAD_CHOICES)(
        op, dy, resizing, factors
    )
    return dx, undefined(_COORDINATES), undefined(_COORDINATES)


def _by_matrices(
    op: OpBuilder, dy: ir.Value, resizing: Resizing, factors: list[int] | None
) -> ir.Value:
    """One matmul per axis."""
    x, rank = resizing.x, op.rank(resizing.x)
    # Every runtime has a float32 Resize, and half precision would round the weights.
    dx = _wide(op, dy)
    dtype = dx.dtype
    assert dtype is not None
    for axis, place in reversed(resized_axes(op, resizing)):
        dx = _times_transposed(op, dx, matrix(op, resizing, axis, place, dtype), axis, rank)
    return op.cast(dx, x.dtype)


def _by_pooling(op: OpBuilder, dy: ir.Value, resizing: Resizing, factors: list[int]) -> ir.Value:
    """Sum over the copies of each position, as AveragePool with disjoint windows."""
    mean = op.AveragePool(_wide(op, dy), kernel_shape=factors, strides=factors)
    return op.cast(op.Mul(mean, float(math.prod(factors))), dy.dtype)


def _wide(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return ``x`` in a dtype that every runtime can resize and pool."""
    return op.cast(x, x.dtype if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT)


RESIZE_GRAD_VARIANTS: Variants[list[int] | None] = {
    "matrices": Variant(_by_matrices),
    "pooling": Variant(_by_pooling, lambda factors: factors is not None),
}
RESIZE_GRAD_CHOICES: Choices[list[int] | None] = [
    Choice("pooling", prefers="resize-grad-by-pooling"),
    Choice("matrices"),
]


def _given(op: OpBuilder, v: ir.Value | None) -> ir.Value | None:
    """Return an optional input, ``None`` if it is empty, as older models write omitted inputs."""
    return None if v is None or op.dims(v) == (0,) else v


def _times_transposed(op: OpBuilder, dy: ir.Value, a: ir.Value, axis: int, rank: int) -> ir.Value:
    """Return ``dy @ a^T`` along ``axis``."""
    if axis == rank - 1:
        return op.MatMul(dy, op.mT(a))
    if axis == rank - 2:
        return op.MatMul(a, dy)
    return op.move_axis(op.MatMul(a, op.move_axis(dy, axis, rank - 2)), rank - 2, axis)


@vjp("AffineGrid")
def affine_grid(op, dy, theta, size, *, align_corners) -> Gradients:
    """``grid = [base, 1] @ theta^T``, so ``dtheta = dgrid^T @ [base, 1]``, summed over positions.

    The base grid is AffineGrid of the identity map.
    """
    n = op.dims(theta)[1]
    spatial = n if isinstance(n, int) else op.rank(dy) - 2
    identity = op.const(np.eye(spatial, spatial + 1)[None], theta.dtype)
    one_image = op.Concat(op.const([1]), op.Slice(size, [1], [spatial + 2]), axis=0)
    base = op.AffineGrid(identity, one_image, align_corners=align_corners)
    base = op.Reshape(base, [-1, spatial])
    places = op.Reshape(dy, [0, -1, spatial])  # [N, P, spatial]
    flat = op.Transpose(places, perm=[0, 2, 1])
    turns = op.MatMul(flat, base)
    shifts = op.ReduceSum(flat, [2], keepdims=1)
    return op.Concat(turns, shifts, axis=2), None
