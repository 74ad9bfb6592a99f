"""Interpolation matrices of Resize, one per axis.

Resize is linear in ``x`` and separable: along one axis it multiplies by a matrix, and that matrix
is the Resize of an identity matrix along that axis. Building it with Resize itself keeps the
gradient true to the runtime's own coordinates, rounding and weights, in every mode, at any size.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.errors import UndifferentiableError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder

_KEPT = ("mode", "coordinate_transformation_mode", "nearest_mode", "cubic_coeff_a")


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
        """Whether coordinates come from a region of interest."""
        return self["coordinate_transformation_mode"] == "tf_crop_and_resize"

    @property
    def keeps_aspect(self) -> bool:
        """Whether one scale is derived for all axes, which then is not the ratio of the sizes."""
        policy = self["keep_aspect_ratio_policy"] not in (None, "stretch")
        return policy and self.sizes is not None


def resized_axes(op: OpBuilder, r: Resizing) -> list[tuple[int, int]]:
    """Return (axis, its place among ``axes``) for every axis that may change."""
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
    """Return the matrix [n, m] by which Resize multiplies along ``axis``, from the right."""
    n, m = op.size(r.x, axis), op.size(r.y, axis)
    eye = op.EyeLike(op.full([n, n], 0.0, dtype))
    roi = _region(op, r, place) if r.crops else None
    attributes = {k: r[k] for k in _KEPT if r[k] is not None}
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
    assert r.roi is not None
    count = len(r.axes)
    start = op.Slice(r.roi, [place], [place + 1])
    end = op.Slice(r.roi, [place + count], [place + count + 1])
    zero, one = op.const([0.0], r.roi.dtype), op.const([1.0], r.roi.dtype)
    return op.Concat(zero, start, one, end, axis=0)


# Coordinates that depend on the scale; align_corners and tf_crop_and_resize depend on sizes alone.
_COMMON_SCALE = frozenset(
    {"half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "asymmetric"}
)


def _with_common_scale(
    op: OpBuilder, r: Resizing, axis: int, eye: ir.Value, attributes: dict[str, object]
) -> ir.Value:
    """Return the matrix under ``keep_aspect_ratio_policy``, whose sizes are rounded, not cut off.

    Given a scale, Resize makes ``floor(n * scale)`` columns, which may be one too few. So the axis
    is prolonged by what the operator sees beyond its border, and the surplus is dropped.
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
    # n + 1 more are enough: the size is at least 1, so n * scale is at least a half.
    n = op.size(r.x, axis)
    surplus = n + 1 if isinstance(n, int) else op.Add(n, 1)
    outside = bool(r["exclude_outside"])
    padded = op.Pad(
        eye, op.vector([0, 0, 0, surplus]), None, mode="constant" if outside else "edge"
    )
    wide = op.Resize(padded, None, scales, **attributes)
    weights = op.Slice(wide, [0], op.vector([m]), [1])
    if outside:  # the weights of what lies outside go to what lies inside
        weights = op.Div(weights, op.ReduceSum(weights, [0], keepdims=1))
    return weights
