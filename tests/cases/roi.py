"""Cases for regions of interest: RoiAlign and MaxRoiPool."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from tests.cases.base import Draw, OpCase, distinct, f, fixed, ints

# Inside, smaller than a pixel, beyond the borders, turned around, wholly outside.
ROIS = fixed(
    [
        [0.3, 0.4, 5.2, 6.1],
        [1.0, 1.0, 1.2, 1.1],
        [-3.0, -2.0, 4.0, 9.0],
        [2.0, 3.0, 11.3, 12.7],
        [4.0, 4.0, 2.0, 3.0],
        [9.0, 9.5, 20.0, 20.0],
    ]
)
IMAGES = ints([0, 1, 1, 0, 0, 1])


POOLED = fixed(
    [
        [0.0, 0.0, 0.0, 5.0, 4.0],
        [1.0, 1.5, 2.5, 1.5, 2.5],
        [1.0, -3.0, -2.5, 3.0, 9.0],
        [0.0, 4.0, 3.0, 12.0, 8.0],
        [1.0, 5.0, 5.0, 2.0, 2.0],
        [0.0, 9.0, 9.0, 20.0, 20.0],
    ]
)


# Away from kinks: no sample meets a pixel, a border or a change of their number.
MOVING = dataclasses.replace(
    fixed([[0.31, 0.43, 5.27, 5.89], [1.17, 2.23, 3.66, 3.97], [-2.21, -0.77, 4.13, 8.69]]),
    kind="wrt",
)


def align(id: str, *, rois: Draw = ROIS, images: Draw = IMAGES, **attributes: Any) -> OpCase:
    """RoiAlign of regions of two images, three by two bins."""
    attributes = {"output_height": 3, "output_width": 2, **attributes}
    return OpCase("RoiAlign", (f(2, 3, 6, 7), rois, images), attributes, id=id)


def moving(id: str, **attributes: Any) -> OpCase:
    """The same, differentiated with respect to the regions as well."""
    return align(f"regions-{id}", rois=MOVING, images=ints([0, 1, 1]), **attributes)


def max_pool(rows: int, columns: int, scale: float):
    """MaxRoiPool as an oracle: whole pixels, empty bins give zero."""

    def rounded(v: float) -> int:
        return int(math.copysign(math.floor(abs(v) + 0.5), v))

    def edges(low: int, high: int, bins: int, size: int) -> list[slice]:
        step = max(high - low + 1, 1) / bins
        ends = [(math.floor(i * step) + low, math.ceil((i + 1) * step) + low) for i in range(bins)]
        return [slice(min(max(a, 0), size), min(max(b, 0), size)) for a, b in ends]

    def run(x, rois):
        pooled = []
        for image, *corners in rois.tolist():
            left, top, right, bottom = (rounded(c * scale) for c in corners)
            plane = x[int(image)]
            bins = [
                plane[:, r, c]
                for r in edges(top, bottom, rows, x.shape[2])
                for c in edges(left, right, columns, x.shape[3])
            ]
            best = [b.amax((1, 2)) if b.numel() else b.new_zeros(len(plane)) for b in bins]
            pooled.append(torch.stack(best, -1).reshape(-1, rows, columns))
        return torch.stack(pooled)

    return run


CASES = [
    align("plain", sampling_ratio=2),
    align("adaptive"),
    align("shifted", coordinate_transformation_mode="output_half_pixel", sampling_ratio=3),
    align("shifted-adaptive", coordinate_transformation_mode="output_half_pixel"),
    align("scaled", spatial_scale=0.5, sampling_ratio=1),
    align("max", mode="max", sampling_ratio=2),
    align("max-adaptive", mode="max"),
    align("max-shifted-adaptive", mode="max", coordinate_transformation_mode="output_half_pixel"),
    moving("plain", sampling_ratio=2),
    moving("adaptive", spatial_scale=0.9),
    moving("shifted", coordinate_transformation_mode="output_half_pixel", sampling_ratio=3),
    moving("raised", coordinate_transformation_mode="output_half_pixel", spatial_scale=0.3),
    moving("max", mode="max", sampling_ratio=2),
    moving("max-adaptive", mode="max"),
    # The reference evaluator has no MaxRoiPool.
    OpCase(
        "MaxRoiPool",
        (distinct(2, 2, 6, 7), POOLED),
        {"pooled_shape": [2, 2]},
        torch=max_pool(2, 2, 1.0),
        forward="torch",
    ),
    OpCase(
        "MaxRoiPool",
        (distinct(2, 2, 6, 7), POOLED),
        {"pooled_shape": [3, 2], "spatial_scale": 0.5},
        torch=max_pool(3, 2, 0.5),
        forward="torch",
        id="scaled",
    ),
]
