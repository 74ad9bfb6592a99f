"""Cases for ConvTranspose."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from tests.cases.base import OpCase, f


def _torch(x, w, b=None, *, strides=None, pads=None, dilations=None, group=1, output_padding=None):
    n = x.dim() - 2
    function = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[n]
    y = function(x, w, b, strides or 1, 0, output_padding or 0, group, dilations or 1)
    pads = pads or [0] * 2 * n
    sides = [-p for i in reversed(range(n)) for p in (pads[i], pads[i + n])]
    return F.pad(y, sides)


def _case(id: str, x: tuple, w: tuple, bias: bool = False, **attrs: Any) -> OpCase:
    oracle = attrs.pop("oracle", None)
    channels = w[1] * attrs.get("group", 1)
    return OpCase(
        "ConvTranspose",
        (f(*x), f(*w), *((f(channels),) if bias else ())),
        attrs,
        torch=lambda *inputs: _torch(*inputs, **(attrs if oracle is None else oracle)),
        # onnx's reference fails on groups and on output_shape
        forward="torch",
        id=id,
    )


CASES = [
    _case("plain", (2, 3, 4, 5), (3, 4, 3, 3), bias=True),
    _case("strided", (2, 3, 3, 4), (3, 2, 3, 2), strides=[2, 3]),
    _case("stride-above-kernel", (1, 2, 3, 3), (2, 3, 2, 1), strides=[3, 4]),
    _case("padded", (2, 3, 4, 4), (3, 2, 3, 4), pads=[1, 0, 2, 1], strides=[2, 1]),
    _case(
        "output-padding",
        (2, 3, 3, 3),
        (3, 2, 3, 3),
        strides=[2, 3],
        output_padding=[1, 2],
        pads=[1, 1, 1, 1],
        bias=True,
    ),
    _case("dilated", (2, 2, 4, 3), (2, 3, 3, 2), dilations=[2, 3], pads=[1, 0, 0, 1]),
    _case("dilated-strided", (1, 2, 4, 3), (2, 3, 2, 3), dilations=[3, 2], strides=[2, 3]),
    _case("grouped", (2, 4, 3, 3), (4, 3, 3, 3), group=2, strides=[2, 2], bias=True),
    _case("depthwise", (2, 3, 4, 4), (3, 1, 3, 3), group=3, pads=[1, 1, 1, 1]),
    _case("one-axis", (2, 3, 5), (3, 4, 4), strides=[2], pads=[1, 1], bias=True),
    _case(
        "three-axes", (1, 2, 3, 2, 3), (2, 3, 2, 3, 2), strides=[2, 1, 2], pads=[0, 1, 1, 0, 1, 0]
    ),
    _case("one-by-one", (2, 4, 3, 3), (4, 3, 1, 1)),
    _case("wide", (2, 4, 3, 3), (4, 17, 3, 3)),
    _case(
        "output-shape",
        (2, 2, 3, 4),
        (2, 3, 4, 3),
        strides=[2, 2],
        output_shape=[7, 8],
        kernel_shape=[4, 3],
        oracle={"strides": [2, 2], "pads": [1, 1, 0, 0]},
    ),
    _case(
        "output-shape-beyond",
        (1, 2, 3, 3),
        (2, 3, 3, 3),
        strides=[3, 2],
        output_shape=[10, 8],
        kernel_shape=[3, 3],
        oracle={"strides": [3, 2], "pads": [0, 0, -1, -1]},
    ),
    _case(
        "output-shape-upper",
        (2, 2, 3, 4),
        (2, 3, 4, 3),
        strides=[2, 2],
        output_shape=[7, 8],
        auto_pad="SAME_UPPER",
        kernel_shape=[4, 3],
        oracle={"strides": [2, 2], "pads": [0, 0, 1, 1]},
    ),
    _case(
        "same-upper",
        (2, 2, 3, 3),
        (2, 3, 4, 3),
        strides=[3, 2],
        auto_pad="SAME_UPPER",
        kernel_shape=[4, 3],
        oracle={"strides": [3, 2], "pads": [0, 0, 1, 1]},
    ),
    _case(
        "same-lower",
        (2, 2, 3, 3),
        (2, 3, 4, 3),
        strides=[3, 2],
        auto_pad="SAME_LOWER",
        kernel_shape=[4, 3],
        oracle={"strides": [3, 2], "pads": [1, 1, 0, 0]},
    ),
    _case(
        "valid",
        (2, 2, 3, 3),
        (2, 3, 2, 3),
        auto_pad="VALID",
        strides=[2, 2],
        oracle={"strides": [2, 2]},
    ),
]
