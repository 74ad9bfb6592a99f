"""Resize before opset 19, and Upsample before it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.lowering.forms.draft import Draft, UnfitError
from onnxtrain.lowering.forms.registry import form


@form("Resize", below=18)
def _resize_18(d: Draft) -> None:
    """No ``antialias``, ``axes`` or ``keep_aspect_ratio_policy``."""
    d.drop("antialias", 0)
    d.drop("keep_aspect_ratio_policy", "stretch")
    if d.get("coordinate_transformation_mode") == "half_pixel_symmetric":
        raise UnfitError("Resize with half_pixel_symmetric is not there")
    axes = d.get("axes")
    d.attributes.pop("axes", None)
    if axes is None:
        return
    rank, dims = d.rank(), d.dims()
    axes = [a % rank for a in axes]
    if d.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        raise UnfitError("Resize of a region of some axes is not there")
    for i, kind, filler in ((2, np.float32, 1.0), (3, np.int64, None)):
        given = d.constant(i, "the size")
        if given is None or not given.size:
            continue
        full = [filler if filler is not None else dims[a] for a in range(rank)]
        for a, value in zip(axes, given, strict=True):
            full[a] = value
        if any(isinstance(v, str) or v is None for v in full):
            raise UnfitError("Resize of some axes of a symbolic shape to sizes is not there")
        d.inputs[i] = np.asarray(full, kind)


@form("Resize", below=13)
def _resize_13(d: Draft) -> None:
    """The region and the scales are not optional, but may be empty."""
    d.inputs += [None] * (3 - len(d.inputs))
    if d.input(1) is None:
        d.inputs[1] = np.zeros(0, np.float32)
    if d.input(2) is None:
        d.inputs[2] = np.zeros(0, np.float32)


@form("Resize", below=11)
def _resize_10(d: Draft) -> None:
    """Coordinates are ``i / scale``, cut off: nearest or linear, enlarging."""
    scales = constant_scales(d.node)
    mode, place = d.get("mode"), d.get("coordinate_transformation_mode")
    whole = scales is not None and all(float(s).is_integer() and s >= 1 for s in scales)
    if scales is None or any(s < 1 for s in scales):
        raise UnfitError("Resize to computed sizes, or to smaller ones, is not there")
    if mode == "nearest":
        rounding = d.get("nearest_mode")
        same = place == "asymmetric" and rounding == "floor"
        # With a whole factor these read the same elements.
        same = same or (
            whole
            and place in ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric")
            and rounding in ("round_prefer_floor", "round_prefer_ceil")
        )
        if not same or not whole:
            raise UnfitError(f"Resize nearest with {place}, {rounding} is not there")
    elif mode != "linear" or place != "asymmetric" or d.rank() not in (2, 4):
        raise UnfitError(f"Resize of mode {mode} with {place} is not there")
    d.attributes = {"mode": ir.AttrString("mode", mode)}
    d.inputs[1:] = [np.asarray(scales, np.float32)]


@form("Resize", below=10)
def _upsample_9(d: Draft) -> None:
    d.op_type = "Upsample"


@form("Resize", below=9)
def _upsample_7(d: Draft) -> None:
    scales = d.inputs[1]
    assert isinstance(scales, np.ndarray)
    d.attributes["scales"] = ir.AttrFloat32s("scales", [float(s) for s in scales])
    d.keep_inputs(1)


def constant_scales(node: ir.Node) -> list[float] | None:
    """Return the factor of every axis of a Resize, ``None`` if they are computed.

    Sizes count as factors where the ratio is a whole number, or one that float32 restores.
    """
    x = node.inputs[0]
    assert x is not None
    dims = S.dims_of(x)
    if dims is None:
        return None
    inputs = [*node.inputs, None, None, None]
    axes_given = node.attributes.get("axes")
    axes = [a % len(dims) for a in axes_given.as_ints()] if axes_given else list(range(len(dims)))
    policy = node.attributes.get("keep_aspect_ratio_policy")
    factors = [1.0] * len(dims)
    scales, sizes = S.constant_of(inputs[2]), S.symbolic_of(inputs[3])
    if scales is not None and scales.size:
        for a, s in zip(axes, scales, strict=True):
            factors[a] = float(s)
        return factors
    if sizes is None or (policy is not None and policy.as_string() != "stretch"):
        return None
    for a, size in zip(axes, sizes, strict=True):
        if size == dims[a]:
            continue
        before = dims[a]
        if not isinstance(size, int) or not isinstance(before, int):
            return None
        scale = float(np.float32(size / before))
        if int(np.floor(np.float32(before) * np.float32(scale))) != size:
            return None
        factors[a] = scale
    return factors
