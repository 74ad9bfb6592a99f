"""Cases for sampling on a grid: GridSample and AffineGrid."""

from __future__ import annotations

import dataclasses

import torch.nn.functional as F

from tests.cases.base import OpCase, between, const, f, fixed, ints

NAMES = {"linear": "bilinear", "nearest": "nearest", "cubic": "bicubic"}


def sample(mode: str = "linear", padding: str = "zeros", align: int = 0):
    """torch's grid_sample as an oracle."""

    def run(x, grid):
        return F.grid_sample(
            x, grid, mode=NAMES[mode], padding_mode=padding, align_corners=bool(align)
        )

    return run


def attributes(mode: str, padding: str, align: int):
    """The attributes of a node."""
    return {"mode": mode, "padding_mode": padding, "align_corners": align}


def affine(align: int):
    """torch's affine_grid as an oracle."""
    return lambda theta, size: F.affine_grid(
        theta, size if isinstance(size, list) else size.tolist(), align_corners=bool(align)
    )


BORDER = dataclasses.replace(
    fixed([[[[-1.0, -1.0], [1.0, 0.25]], [[0.3, 1.0], [1.0, 1.0]]]]), kind="wrt"
)

CASES = [
    # Torch judges: the reference evaluator has a cubic border of its own, and a float32 AffineGrid.
    OpCase(
        "GridSample",
        (f(2, 3, 4, 5), between(-0.9, 0.9, 2, 3, 2, 2)),
        torch=sample(),
        forward="torch",
    ),
    # Places up to three images away: every border, several reflections.
    *(
        OpCase(
            "GridSample",
            (f(2, 3, 4, 5), between(-3.3, 3.3, 2, 4, 5, 2)),
            attributes(mode, padding, align),
            torch=sample(mode, padding, align),
            forward="torch",
            id=f"{mode}-{padding}-{'align' if align else 'half'}",
        )
        for mode in ("linear", "nearest", "cubic")
        for padding in ("zeros", "border", "reflection")
        for align in (0, 1)
    ),
    *(
        OpCase(
            "GridSample",
            (f(2, 2, 3, 4, 2), between(-2.2, 2.2, 2, 2, 3, 2, 3)),
            attributes(mode, padding, 0),
            torch=sample(mode, padding, 0),
            forward="torch",
            id=f"volume-{mode}-{padding}",
        )
        for mode in ("linear", "nearest")
        for padding in ("zeros", "border", "reflection")
    ),
    OpCase(
        "GridSample",
        (f(1, 2, 3, 1), between(-2.2, 2.2, 1, 4, 2, 2)),
        attributes("linear", "reflection", 1),
        torch=sample("linear", "reflection", 1),
        forward="torch",
        id="one-pixel-wide",
    ),
    # Exactly on the border, where torch says that the grid gets nothing.
    OpCase(
        "GridSample",
        (f(1, 2, 3, 4), BORDER),
        attributes("linear", "border", 1),
        torch=sample("linear", "border", 1),
        order=1,
        xfail="finite: there is a kink on the border",
        id="on-the-border",
    ),
    OpCase("AffineGrid", (f(2, 2, 3), const([2, 3, 4, 5])), torch=affine(0), forward="torch"),
    OpCase(
        "AffineGrid",
        (f(2, 3, 4), const([2, 1, 2, 3, 4])),
        {"align_corners": 1},
        torch=affine(1),
        forward="torch",
        id="volume-align",
    ),
    OpCase(
        "AffineGrid",
        (f(3, 2, 3), ints([3, 1, 4, 2])),
        torch=affine(0),
        forward="torch",
        dynamic="batch: onnx wants to know how many sizes there are",
        id="size-at-run-time",
    ),
]
