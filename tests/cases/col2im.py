"""Cases for Col2Im."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from tests.cases.base import OpCase, const, f, ints


def _fold(x, image, block, *, strides=1, pads=0, dilations=1):
    tolist = getattr(image, "tolist", lambda: image)
    blocks = getattr(block, "tolist", lambda: block)
    return F.fold(x, tolist(), blocks(), dilations, pads, strides)


def _case(
    id: str, x: tuple, image: Any, block: Any, oracle: dict | None = None, **attrs: Any
) -> OpCase:
    return OpCase(
        "Col2Im",
        (f(*x), image, block),
        attrs,
        torch=lambda *inputs: _fold(*inputs, **(oracle or {})),
        id=id,
    )


CASES = [
    _case("plain", (2, 12, 20), const([5, 6]), const([2, 2])),
    _case(
        "strided-padded",
        (1, 12, 6),
        const([4, 5]),
        const([3, 2]),
        strides=[2, 2],
        pads=[1, 1, 1, 1],
        oracle={"strides": 2, "pads": 1},
    ),
    _case(
        "dilated",
        (2, 4, 12),
        const([6, 5]),
        const([2, 2]),
        dilations=[2, 2],
        oracle={"dilations": 2},
    ),
    _case(
        "patches",
        (2, 8, 6),
        const([4, 6]),
        const([2, 2]),
        strides=[2, 2],
        oracle={"strides": 2},
    ),
    _case(
        "remainder", (1, 4, 4), const([5, 5]), const([2, 2]), strides=[3, 3], oracle={"strides": 3}
    ),
    _case("run-time-image", (1, 6, 8), ints([4, 5]), const([3, 2])),
    _case("run-time-block", (1, 6, 8), ints([4, 5]), ints([3, 2])),
    OpCase(
        "Col2Im",
        (f(1, 10, 16), const([4, 4, 5]), const([1, 1, 5])),
        {"strides": [1, 1, 1], "pads": [0, 0, 0, 0, 0, 0]},
        id="three-axes",
    ),
]
