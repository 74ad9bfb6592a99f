"""Cases for DeformConv; the oracle samples with torch's grid_sample, tap by tap."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.cases.base import Draw, OpCase, f, positive


def _offsets(*shape: int) -> Draw:
    """Offsets that keep every position away from integers, where the derivative jumps."""

    def make(rng: np.random.Generator) -> np.ndarray:
        whole = rng.integers(-2, 3, shape)
        return (whole + rng.uniform(0.2, 0.8, shape)).astype(np.float32).astype(np.float64)

    return Draw(make)


def _torch(x, w, offset, b=None, mask=None, **attrs: Any) -> torch.Tensor:
    n, channels, height, width = x.shape
    strides, dilations = attrs.get("strides", [1, 1]), attrs.get("dilations", [1, 1])
    top, left = attrs.get("pads", [0, 0, 0, 0])[:2]
    groups, (rows, columns) = attrs.get("offset_group", 1), w.shape[2:]
    out = offset.shape[2:]
    offset = offset.reshape(n, groups, rows, columns, 2, *out)
    parts = x.reshape(n, groups, channels // groups, height, width)
    taps = []
    for r in range(rows):
        for c in range(columns):
            sampled = []
            for g in range(groups):
                down, right = offset[:, g, r, c, 0], offset[:, g, r, c, 1]
                v = down + (torch.arange(out[0]) * strides[0] - top + r * dilations[0])[:, None]
                u = right + (torch.arange(out[1]) * strides[1] - left + c * dilations[1])
                grid = torch.stack([2 * u / (width - 1) - 1, 2 * v / (height - 1) - 1], -1)
                piece = F.grid_sample(parts[:, g], grid, align_corners=True)
                if mask is not None:
                    piece = piece * mask.reshape(n, groups, rows, columns, *out)[:, g, None, r, c]
                sampled.append(piece)
            taps.append(torch.cat(sampled, 1))
    # The taps side by side: a convolution with stride equal to its kernel.
    wide = torch.stack(taps, 2).reshape(n, channels, rows, columns, *out)
    wide = wide.permute(0, 1, 4, 2, 5, 3).reshape(n, channels, out[0] * rows, out[1] * columns)
    return F.conv2d(wide, w, b, (rows, columns), groups=attrs.get("group", 1))


def _case(
    id: str, x: tuple, w: tuple, out: tuple, *, bias: bool = False, mask: bool = False, **attrs: Any
) -> OpCase:
    n, taps, groups = x[0], w[2] * w[3], attrs.get("offset_group", 1)
    inputs = [f(*x), f(*w), _offsets(n, groups * taps * 2, *out)]
    inputs += [f(w[0]) if bias else None, positive(n, groups * taps, *out) if mask else None]
    while inputs[-1] is None:
        inputs.pop()
    attrs["kernel_shape"] = w[2:]
    oracle = lambda *given: _torch(*given, **attrs)  # noqa: E731
    # onnx's reference computes in float32
    return OpCase("DeformConv", tuple(inputs), attrs, torch=oracle, forward="torch", id=id)


CASES = [
    _case("plain", (1, 2, 4, 5), (3, 2, 2, 2), (3, 4)),
    _case("mask-and-bias", (2, 2, 4, 4), (3, 2, 2, 3), (3, 2), bias=True, mask=True),
    _case("mask-only", (1, 2, 4, 4), (2, 2, 2, 2), (3, 3), mask=True),
    _case(
        "strided-padded",
        (1, 2, 5, 4),
        (2, 2, 3, 2),
        (3, 3),
        strides=[2, 2],
        pads=[1, 1, 1, 1],
        bias=True,
    ),
    _case("dilated", (1, 1, 5, 6), (2, 1, 2, 2), (3, 3), dilations=[2, 3]),
    _case("grouped", (1, 4, 4, 4), (4, 2, 2, 2), (3, 3), group=2),
    _case("offset-groups", (2, 4, 4, 3), (2, 4, 2, 2), (3, 2), offset_group=2, mask=True),
    _case(
        "both-groups",
        (1, 4, 3, 4),
        (4, 2, 2, 2),
        (2, 3),
        group=2,
        offset_group=4,
        mask=True,
        bias=True,
    ),
]
