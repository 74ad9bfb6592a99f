"""Cases for Resize: every mode, coordinate transformation and size specification."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.cases.base import Draw, OpCase, const, f, fixed, ints

PLANE = (2, 3, 4, 5)


def case(id: str, scales: Any = None, sizes: Any = None, **options: Any) -> OpCase:
    """A case on [2, 3, 4, 5] unless ``x`` is given; other options are attributes or fields."""
    fields = {k: options.pop(k) for k in ("torch", "forward", "order", "dynamic") if k in options}
    x, roi = options.pop("x", f(*PLANE)), options.pop("roi", None)
    inputs: list[Draw | None] = [x, roi, None, None]
    if scales is not None:
        inputs[2] = scales if isinstance(scales, Draw) else const([float(s) for s in scales])
    if sizes is not None:
        inputs[3] = sizes if isinstance(sizes, Draw) else const(sizes)
    while inputs[-1] is None:
        inputs.pop()
    return OpCase("Resize", tuple(inputs), options, id=id, **fields)


def interpolate(size, mode: str, **options: Any):
    """torch's interpolate as an oracle."""
    return lambda x, *_: F.interpolate(x, size, mode=mode, **options)


def judge(kind: str) -> str:
    """Who computes the function: the reference evaluator's align_corners differs given scales."""
    return "onnxruntime" if kind == "align_corners" else "reference"


COORDINATES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
)
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
REGION = const([0.0, 0.0, 0.1, 0.2, 1.0, 1.0, 0.8, 1.3])

CASES = [
    case("plain", [1, 1, 2, 2], mode="nearest"),
    # As torch does it.
    case(
        "torch-nearest",
        sizes=[2, 3, 7, 3],
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
        torch=interpolate((7, 3), "nearest"),
    ),
    case(
        "torch-linear",
        sizes=[2, 3, 7, 3],
        mode="linear",
        coordinate_transformation_mode="pytorch_half_pixel",
        torch=interpolate((7, 3), "bilinear"),
    ),
    case(
        "torch-align-corners",
        sizes=[2, 3, 9, 8],
        mode="linear",
        coordinate_transformation_mode="align_corners",
        torch=interpolate((9, 8), "bilinear", align_corners=True),
    ),
    case(
        "torch-cubic",
        sizes=[2, 3, 7, 11],
        mode="cubic",
        coordinate_transformation_mode="half_pixel",
        cubic_coeff_a=-0.75,
        torch=interpolate((7, 11), "bicubic"),
    ),
    case(
        "torch-antialias",
        sizes=[2, 3, 3, 2],
        mode="linear",
        antialias=1,
        exclude_outside=1,
        torch=interpolate((3, 2), "bilinear", antialias=True),
    ),
    # Three axes, one axis, other axes.
    case(
        "volume",
        x=f(1, 2, 3, 4, 3),
        sizes=[1, 2, 5, 3, 7],
        mode="linear",
        torch=interpolate((5, 3, 7), "trilinear"),
    ),
    case(
        "signal",
        x=f(2, 3, 5),
        sizes=[2, 3, 8],
        mode="linear",
        torch=interpolate(8, "linear"),
    ),
    case("matrix", x=f(4, 5), sizes=[7, 3], mode="linear"),
    case("vector-nearest", x=f(5), scales=[1.7], mode="nearest"),
    case("batch-and-channels", sizes=[3, 2, 4, 5], mode="nearest"),
    case("channels-last", x=f(1, 4, 5, 2), sizes=[1, 7, 8, 2], mode="linear"),
    case("axes", sizes=[7, 3], axes=[2, 3], mode="linear"),
    case("axes-reversed", sizes=[3, 7], axes=[-1, -2], mode="linear", forward="onnxruntime"),
    # Sizes and scales known at run time only.
    case(
        "sizes-at-run-time",
        sizes=ints([2, 3, 7, 3]),
        mode="linear",
        dynamic="batch: onnx wants to know how many sizes there are",
    ),
    case(
        "scales-at-run-time",
        scales=fixed(torch.tensor([1.0, 1.0, 2.5, 0.6]).numpy()),
        mode="nearest",
    ),
    # Crops, also beyond the border, where the value is given.
    *(
        case(
            f"crop-{mode}",
            roi=REGION,
            sizes=[2, 3, 5, 6],
            mode=mode,
            coordinate_transformation_mode="tf_crop_and_resize",
            extrapolation_value=3.0,
        )
        for mode in ("nearest", "linear", "cubic")
    ),
    case(
        "crop-at-run-time",
        roi=fixed(REGION),
        sizes=[2, 3, 5, 6],
        mode="linear",
        coordinate_transformation_mode="tf_crop_and_resize",
    ),
    # The table of modes; a scale that does not divide the size.
    *(
        case(
            f"nearest-{kind}-{rounding}",
            [1, 1, 0.63, 1.77],
            mode="nearest",
            coordinate_transformation_mode=kind,
            nearest_mode=rounding,
            forward=judge(kind),
        )
        for kind in COORDINATES
        for rounding in ROUNDINGS
    ),
    *(
        case(
            f"{mode}-{kind}",
            [1, 1, 1.77, 0.63],
            mode=mode,
            coordinate_transformation_mode=kind,
            forward=judge(kind),
        )
        for mode in ("linear", "cubic")
        for kind in COORDINATES
    ),
    *(
        case(
            f"antialias-{mode}-{kind}",
            [1, 1, 0.55, 0.63],
            mode=mode,
            antialias=1,
            coordinate_transformation_mode=kind,
            forward=judge(kind),
        )
        for mode in ("linear", "cubic")
        for kind in COORDINATES
    ),
    case("exclude-outside", [1, 1, 1.77, 0.63], mode="cubic", exclude_outside=1),
    case(
        "exclude-outside-antialias",
        [1, 1, 0.55, 0.63],
        mode="cubic",
        exclude_outside=1,
        antialias=1,
        cubic_coeff_a=-0.6,
    ),
    # One scale for all axes.
    *(
        case(
            f"{policy}-{mode}-{kind}",
            sizes=[7, 9],
            axes=[2, 3],
            keep_aspect_ratio_policy=policy,
            mode=mode,
            coordinate_transformation_mode=kind,
            forward="onnxruntime",
            dynamic="all" if kind != "pytorch_half_pixel" else f"none: {kind} needs the size",
        )
        for policy in ("not_larger", "not_smaller")
        for mode, kind in (
            ("nearest", "half_pixel"),
            ("linear", "pytorch_half_pixel"),
            ("linear", "align_corners"),
            ("cubic", "asymmetric"),
        )
    ),
    case(
        "not_larger-exclude-outside",
        sizes=[7, 9],
        axes=[2, 3],
        keep_aspect_ratio_policy="not_larger",
        mode="cubic",
        exclude_outside=1,
        forward="onnxruntime",
    ),
    case(
        "not_smaller-antialias",
        sizes=[2, 3],
        axes=[2, 3],
        keep_aspect_ratio_policy="not_smaller",
        mode="linear",
        antialias=1,
        forward="onnxruntime",
    ),
]
