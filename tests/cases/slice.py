"""Cases for Slice and Compress."""

from __future__ import annotations

import torch

from tests.cases.base import OpCase, bools, const, f, ints

MAX, MIN = 2**63 - 1, -(2**63)
WIDE = 2**40  # far outside of every axis


def flipped(x: torch.Tensor, axis: int, start: int, stop: int, step: int) -> torch.Tensor:
    """``x[start:stop:-step]`` along an axis, which torch cannot slice backwards."""
    return x.index_select(axis, torch.arange(start, stop, -step))


CASES = [
    OpCase("Slice", (f(4, 5), const([1]), const([3])), torch=lambda x, s, e: x[1:3]),
    OpCase(
        "Slice",
        (f(4, 5), const([1, -3]), const([MAX, -1]), const([0, -1])),
        torch=lambda x, *_: x[1:, -3:-1],
        id="negative-bounds",
    ),
    OpCase(
        "Slice",
        (f(4, 7), const([1, 0]), const([4, 7]), const([1, 0]), const([2, 3])),
        torch=lambda x, *_: x[0:7:3, 1:4:2],
        id="steps",
    ),
    OpCase(
        "Slice",
        (f(3, 7), const([0]), const([MAX]), const([1]), const([2])),
        torch=lambda x, *_: x[:, ::2],
        id="every-second",
    ),
    OpCase(
        "Slice",
        (f(3, 7), const([-1]), const([MIN]), const([1]), const([-1])),
        torch=lambda x, *_: x.flip(1),
        id="reversed",
    ),
    OpCase(
        "Slice",
        (f(3, 8), const([6]), const([0]), const([-1]), const([-2])),
        torch=lambda x, *_: flipped(x, 1, 6, 0, 2),
        id="negative-step",
    ),
    OpCase(
        "Slice",
        (f(4, 5), const([-WIDE, 2]), const([3, WIDE])),
        torch=lambda x, *_: x[:3, 2:],
        id="clamped-bounds",
    ),
    OpCase(
        "Slice",
        (f(3, 5), const([WIDE]), const([-WIDE]), const([1]), const([-3])),
        torch=lambda x, *_: flipped(x, 1, 4, -1, 3),
        id="clamped-backwards",
    ),
    OpCase("Slice", (f(3, 5), const([2]), const([1])), torch=lambda x, *_: x[:0], id="empty"),
    OpCase(
        "Slice",
        (f(4, 5), ints([1, -3]), ints([4, 5])),
        torch=lambda x, *_: x[1:4, -3:],
        id="runtime-bounds",
    ),
    OpCase(
        "Slice",
        (f(4, 7), ints([-2, 1]), ints([-WIDE, 7]), const([0, 1]), const([-2, 3])),
        torch=lambda x, *_: flipped(x, 0, 2, -1, 2)[:, 1::3],
        id="runtime-bounds-steps",
    ),
    OpCase(
        "Slice",
        (f(6, 4), ints([-8]), ints([-3]), const([1]), const([-2])),
        torch=lambda x, *_: x[:, :0],
        id="runtime-empty",
    ),
    OpCase(
        "Slice",
        (f(4, 7), ints([5, 0]), ints([1, 3]), ints([1, 0]), ints([-2, 1])),
        torch=lambda x, *_: flipped(x, 1, 5, 1, 2)[:3],
        id="runtime-everything",
    ),
    OpCase(
        "Slice",
        (f(4, 7), ints([1], "int32"), ints([3], "int32"), ints([-1], "int32")),
        torch=lambda x, *_: x[:, 1:3],
        id="runtime-int32",
    ),
    OpCase(
        "Compress",
        (f(3, 4), bools([True, False, True])),
        {"axis": 0},
        torch=lambda x, c: x[c],
    ),
    OpCase(
        "Compress",
        (f(3, 4), bools([False, True, True])),
        {"axis": -1},
        torch=lambda x, c: x[:, 1:3],
        id="short-condition",
    ),
    OpCase(
        "Compress",
        (f(3, 2), bools([False, True, True, False, True])),
        torch=lambda x, c: x.flatten()[:5][c],
        id="flattened",
    ),
]
