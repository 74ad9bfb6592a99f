"""Cases for Pad."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.cases.base import OpCase, const, f, ints

RUNTIME_AXES = """
g (float[2, 3] x, int64[2] pads, float c, int64[1] axes) => (float[2, M] y) {
    y = Pad(x, pads, c, axes)
}
"""


def periodic(x: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """Wrap the last axis around, as often as it takes."""
    return x[..., torch.arange(-before, x.shape[-1] + after) % x.shape[-1]]


CASES = [
    OpCase("Pad", (f(2, 3), const([1, 0, 0, 2])), torch=lambda x, p: F.pad(x, (0, 2, 1, 0))),
    OpCase(
        "Pad",
        (f(2, 3), const([0, 1, 2, 3]), f()),
        torch=lambda x, p, c: torch.cat(
            [
                torch.cat([c.expand(2, 1), x, c.expand(2, 3)], 1),
                c.expand(2, 7),
            ]
        ),
        id="constant-value",
    ),
    OpCase(
        "Pad",
        (f(4, 5), const([-1, 2, 1, -2])),
        torch=lambda x, p: F.pad(x, (2, -2, -1, 1)),
        forward="torch",  # the reference evaluator has no negative pads
        id="negative",
    ),
    OpCase(
        "Pad",
        (f(4, 5), const([-1, 2, 1, -2]), f()),
        torch=lambda x, p, c: torch.cat(
            [torch.cat([c.expand(3, 2), x[1:, :3]], 1), c.expand(1, 5)]
        ),
        forward="torch",  # the reference evaluator has no negative pads
        id="negative-value",
    ),
    OpCase(
        "Pad",
        (f(2, 3, 4), const([1, 2, 3, 0]), None, const([-1, 0])),
        torch=lambda x, p, v, a: F.pad(x, (1, 3, 0, 0, 2, 0)),
        id="axes",
    ),
    OpCase(
        "Pad",
        (f(2, 3), ints([1, 0, 0, 2])),
        torch=lambda x, p: F.pad(x, (0, 2, 1, 0)),
        id="runtime",
    ),
    OpCase(
        "Pad",
        (f(2, 3), ints([1, -1]), f(), ints([1])),
        model=RUNTIME_AXES,
        forward="torch",  # the reference evaluator has no negative pads
        torch=lambda x, p, c, a: torch.cat([c.expand(2, 1), x[:, :2]], 1),
        id="runtime-axes-value",
    ),
    OpCase(
        "Pad",
        (f(1, 2, 4, 5), const([0, 0, 1, 2, 0, 0, 3, 1])),
        {"mode": "reflect"},
        torch=lambda x, p: F.pad(x, (2, 1, 1, 3), mode="reflect"),
        id="reflect",
    ),
    OpCase(
        "Pad",
        (f(2, 4), const([3, 3]), None, const([-1])),
        {"mode": "reflect"},
        torch=lambda x, p, v, a: F.pad(x, (3, 3), mode="reflect"),
        id="reflect-large",
    ),
    OpCase(
        "Pad",
        (f(2, 4), ints([0, 2, 0, 3])),
        {"mode": "reflect"},
        torch=lambda x, p: F.pad(x, (2, 3), mode="reflect"),
        id="reflect-runtime",
    ),
    OpCase(
        "Pad",
        (f(1, 2, 4, 5), const([0, 0, 1, 2, 0, 0, 3, 1])),
        {"mode": "edge"},
        torch=lambda x, p: F.pad(x, (2, 1, 1, 3), mode="replicate"),
        id="edge",
    ),
    OpCase(
        "Pad",
        (f(2, 5), const([0, -1, 0, 3])),
        {"mode": "edge"},
        torch=lambda x, p: F.pad(x[:, 1:], (0, 3), mode="replicate"),
        forward="torch",  # the reference evaluator has no negative pads
        id="edge-negative",
    ),
    OpCase(
        "Pad",
        (f(2, 4), const([0, 2, 0, 3])),
        {"mode": "wrap"},
        torch=lambda x, p: periodic(x, 2, 3),
        id="wrap",
    ),
    OpCase(
        "Pad",
        (f(2, 3), const([0, 7, 0, 4])),
        {"mode": "wrap"},
        torch=lambda x, p: periodic(x, 7, 4),
        id="wrap-around-twice",
    ),
]
