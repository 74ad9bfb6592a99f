"""Cases for Conv."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from tests.cases.base import OpCase, f


def _torch(x, w, b=None, *, strides=None, pads=None, dilations=None, group=1, **_: Any):
    n = x.dim() - 2
    pads = pads or [0] * 2 * n
    sides = [p for i in reversed(range(n)) for p in (pads[i], pads[i + n])]
    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[n]
    return function(F.pad(x, sides), w, b, strides or 1, 0, dilations or 1, group)


def _case(id: str, x: tuple, w: tuple, bias: bool = False, **attrs: Any) -> OpCase:
    dynamic = attrs.pop("dynamic", "all")
    oracle_attrs = {**attrs, **attrs.pop("oracle", {})}
    return OpCase(
        "Conv",
        (f(*x), f(*w), *((f(w[0]),) if bias else ())),
        attrs,
        torch=lambda *inputs: _torch(*inputs, **oracle_attrs),
        id=id,
        dynamic=dynamic,
        # the reference cannot do transposed convolutions with groups
        forward="torch" if attrs.get("group", 1) > 1 else "reference",
    )


CASES = [
    _case("plain", (2, 3, 6, 5), (4, 3, 3, 3), bias=True),
    _case("padded", (2, 3, 5, 5), (4, 3, 3, 3), pads=[1, 1, 1, 1]),
    _case("strided-remainder", (2, 3, 8, 7), (4, 3, 3, 2), strides=[2, 3]),
    _case("stride-above-kernel", (1, 2, 8, 9), (3, 2, 2, 1), strides=[3, 4]),
    _case("asymmetric-pads", (2, 2, 5, 6), (3, 2, 3, 3), pads=[0, 1, 2, 3], strides=[2, 2]),
    _case("dilated", (2, 2, 8, 9), (3, 2, 3, 2), dilations=[2, 3], pads=[1, 0, 1, 2]),
    _case(
        "dilated-strided", (1, 2, 11, 10), (3, 2, 3, 2), dilations=[3, 2], strides=[2, 3], bias=True
    ),
    _case("one-by-one", (2, 4, 3, 5), (3, 4, 1, 1), bias=True),
    _case("one-by-one-strided", (2, 4, 5, 5), (3, 4, 1, 1), strides=[2, 2]),
    _case("wide", (2, 17, 5, 4), (3, 17, 3, 3), pads=[1, 1, 1, 1]),
    _case("wide-strided", (2, 9, 6, 7), (3, 9, 3, 2), strides=[2, 2], pads=[1, 0, 1, 1], bias=True),
    _case("grouped", (2, 4, 5, 5), (6, 2, 3, 3), group=2, pads=[1, 1, 1, 1], bias=True),
    _case(
        "grouped-strided", (2, 6, 7, 6), (6, 2, 3, 3), group=3, strides=[2, 2], pads=[1, 0, 0, 1]
    ),
    _case("depthwise", (2, 4, 5, 6), (4, 1, 3, 3), group=4, pads=[1, 1, 1, 1]),
    _case("depthwise-strided", (2, 3, 6, 7), (3, 1, 3, 2), group=3, strides=[2, 2]),
    _case(
        "depthwise-dilated",
        (2, 3, 9, 8),
        (3, 1, 3, 2),
        group=3,
        dilations=[2, 3],
        pads=[2, 1, 0, 3],
    ),
    _case("depthwise-large", (2, 2, 10, 9), (2, 1, 3, 3), group=2, pads=[1, 1, 1, 1]),
    _case("depthwise-overpadded", (1, 2, 9, 9), (2, 1, 2, 1), group=2, pads=[2, 1, 3, 1]),
    _case("depthwise-large-strided", (2, 2, 13, 14), (2, 1, 3, 3), group=2, strides=[2, 2]),
    _case(
        "depthwise-thrice-strided",
        (1, 2, 24, 23),
        (2, 1, 5, 4),
        group=2,
        strides=[3, 2],
        pads=[1, 0, 2, 1],
    ),
    _case("depthwise-sparse", (1, 2, 24, 23), (2, 1, 1, 2), group=2, strides=[2, 3]),
    _case("depthwise-one-axis", (2, 3, 70), (3, 1, 4), group=3, pads=[1, 2]),
    _case("small-image", (2, 24, 3, 2), (20, 24, 2, 2)),
    _case("depthwise-multiplier", (2, 3, 5, 5), (6, 1, 3, 3), group=3),
    _case("one-axis", (2, 3, 9), (4, 3, 3), bias=True, pads=[1, 2], strides=[2], dilations=[2]),
    _case("one-axis-grouped", (2, 4, 7), (4, 2, 3), group=2),
    _case(
        "three-axes",
        (2, 2, 4, 5, 4),
        (3, 2, 2, 3, 2),
        bias=True,
        strides=[2, 1, 2],
        pads=[0, 1, 1, 1, 0, 1],
    ),
    _case("three-axes-grouped", (1, 4, 4, 4, 3), (4, 2, 2, 2, 2), group=2),
    _case(
        "same-upper",
        (2, 2, 6, 7),
        (3, 2, 3, 2),
        auto_pad="SAME_UPPER",
        kernel_shape=[3, 2],
        strides=[2, 3],
        oracle={"pads": [0, 0, 1, 1]},
    ),
    _case(
        "same-lower",
        (2, 2, 6, 7),
        (3, 2, 3, 2),
        auto_pad="SAME_LOWER",
        kernel_shape=[3, 2],
        strides=[2, 2],
        oracle={"pads": [1, 1, 0, 0]},
    ),
    _case("valid", (2, 2, 5, 5), (3, 2, 3, 2), auto_pad="VALID", strides=[2, 2]),
    _case("kernel-of-image", (3, 2, 4, 4), (5, 2, 4, 4), bias=True),
    _case("kernel-beyond-image", (2, 2, 2, 2), (3, 2, 3, 3), pads=[1, 1, 1, 1]),
    _case("many-taps", (1, 2, 10, 9), (2, 2, 9, 9), pads=[4, 4, 4, 4]),
]
