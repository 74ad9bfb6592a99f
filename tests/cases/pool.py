"""Cases for pooling."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.cases.base import Draw, OpCase, away_from_zero, distinct, f, ints

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _pad(x: torch.Tensor, pads: list[int], value: float = 0.0) -> torch.Tensor:
    n = x.dim() - 2
    sides = [p for i in reversed(range(n)) for p in (pads[i], pads[i + n])]
    return F.pad(x, sides, value=value)


def _max(id: str, x: tuple | Draw, kernel: list[int], **attrs: Any) -> OpCase:
    pads = attrs.pop("oracle_pads", attrs.get("pads") or [0] * 2 * len(kernel))

    def oracle(x):
        padded = _pad(x, pads, -torch.inf)
        rest = (attrs.get("strides") or 1, 0, attrs.get("dilations") or 1)
        return _MAX[len(kernel)](padded, kernel, *rest, bool(attrs.get("ceil_mode")))

    draw = x if isinstance(x, Draw) else distinct(*x)
    xfail = attrs.pop("xfail", "")
    attrs = {"kernel_shape": kernel, **attrs}
    # onnx's reference gives wrong indices for some kernels, and wrong shapes for SAME_LOWER
    return OpCase("MaxPool", (draw,), attrs, torch=oracle, forward="torch", xfail=xfail, id=id)


def _average(id: str, x: tuple, kernel: list[int], **attrs: Any) -> OpCase:
    oracle = attrs.pop("torch", None)
    # onnx's reference is wrong about some windows that hang over
    forward = "torch" if attrs.get("ceil_mode") and oracle else "reference"
    xfail = attrs.pop("xfail", "")
    attrs = {"kernel_shape": kernel, **attrs}
    return OpCase("AveragePool", (f(*x),), attrs, torch=oracle, forward=forward, xfail=xfail, id=id)


def _lp(id: str, x: tuple, kernel: list[int], **attrs: Any) -> OpCase:
    pads, strides = attrs.get("pads") or [0] * 2 * len(kernel), attrs.get("strides")
    p = attrs.get("p", 2)
    pads = attrs.pop("oracle_pads", pads)

    def oracle(x):
        count = float(np.prod(kernel))
        powers = _pad(x.abs() ** p, pads)
        return (_AVERAGE[len(kernel)](powers, kernel, strides or 1) * count) ** (1 / p)

    attrs = {"kernel_shape": kernel, **attrs}
    dilated = attrs.get("dilations") is not None
    draw = away_from_zero(*x)
    return OpCase("LpPool", (draw,), attrs, torch=None if dilated else oracle, id=id)


def _tied(*shape: int) -> Draw:
    """A few values many times over."""
    return Draw(lambda rng: rng.integers(0, 2, shape).astype(np.float64))


_UNPOOL = """case (float[1,2,6,6] x) => (float[1,2,6,6] y) {
    p, i = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x)
    q = Mul (p, p)
    y = MaxUnpool <kernel_shape = [2, 2], strides = [2, 2]> (q, i)
}"""
_UNPOOL_TO = """case (float[1,2,5,6] x) => (float[1,2,5,6] y) {
    p, i = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x)
    s = Shape (x)
    y = MaxUnpool <kernel_shape = [2, 2], strides = [2, 2]> (p, i, s)
}"""
_WRONG_SIZE = "onnx's inference counts a window behind the input, and its checker insists on it"
_KINK = "finite: no derivative where maxima tie; the first gets the gradient, as in torch"
_OVERLAP = [[[[5, 5], [5, 10]]]]  # the last of three stays at 5


def _unpool_oracle(x):
    p, i = F.max_pool2d(x, 2, 2, return_indices=True)
    return F.max_unpool2d(p * p, i, 2, 2)


def _unpool_to_oracle(x):
    p, i = F.max_pool2d(x, 2, 2, return_indices=True)
    return F.max_unpool2d(p, i, 2, 2, output_size=x.shape)


CASES = [
    _max("plain", (2, 3, 6, 6), [2, 2], strides=[2, 2]),
    _max("overlapping", (2, 2, 6, 7), [3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    _max("remainder", (1, 2, 7, 5), [2, 2], strides=[2, 2]),
    _max("stride-one", (1, 2, 5, 5), [2, 3]),
    _max("dilated", (1, 2, 8, 7), [2, 3], dilations=[3, 2], strides=[2, 1], pads=[1, 0, 1, 2]),
    _max("ceil", (1, 2, 6, 7), [3, 2], strides=[2, 2], ceil_mode=1),
    _max("ceil-disjoint", (1, 2, 5, 7), [2, 2], strides=[2, 3], ceil_mode=1),
    _max(
        "ceil-reduced",
        (1, 2, 2, 3),
        [1, 1],
        strides=[2, 2],
        ceil_mode=1,
        xfail=f"standard, targets: {_WRONG_SIZE}",
    ),
    _max("asymmetric-pads", (1, 2, 5, 5), [3, 3], strides=[2, 3], pads=[0, 1, 2, 1]),
    _max("column-major", (1, 2, 5, 6), [2, 2], strides=[2, 2], storage_order=1),
    _max("one-axis", (2, 3, 9), [3], strides=[2], pads=[1, 0]),
    _max("three-axes", (1, 2, 4, 5, 4), [2, 2, 3], strides=[2, 1, 1]),
    _max("three-axes-disjoint", (1, 2, 4, 4, 6), [2, 2, 3], strides=[2, 2, 3]),
    _max(
        "same-upper",
        (1, 2, 6, 7),
        [3, 2],
        strides=[2, 2],
        auto_pad="SAME_UPPER",
        oracle_pads=[0, 0, 1, 1],
    ),
    _max(
        "same-lower",
        (1, 2, 6, 7),
        [3, 2],
        strides=[2, 2],
        auto_pad="SAME_LOWER",
        oracle_pads=[1, 1, 0, 0],
    ),
    _max("ties", _tied(2, 2, 6, 6), [2, 2], strides=[2, 2], xfail=_KINK),
    _max(
        "ties-overlapping",
        _tied(2, 2, 6, 7),
        [3, 3],
        strides=[2, 2],
        pads=[1, 1, 1, 1],
        xfail=_KINK,
    ),
    _max("large-image", (1, 1, 132, 4), [2, 2], strides=[2, 2]),
    OpCase(
        "MaxPool",
        (distinct(1, 2, 6, 6),),
        {"kernel_shape": [2, 2], "strides": [2, 2]},
        outputs=2,
        torch=lambda x: (F.max_pool2d(x, 2), None),
        forward="torch",
        id="indices-are-an-output",
    ),
    OpCase(
        "MaxPool",
        (distinct(1, 1, 5, 6),),
        {"kernel_shape": [2, 2], "strides": [2, 2], "storage_order": 1},
        outputs=2,
        torch=lambda x: (F.max_pool2d(x, 2), None),
        forward="torch",
        id="column-major-indices-are-an-output",
    ),
    OpCase("MaxUnpool", (distinct(1, 2, 6, 6),), torch=_unpool_oracle, model=_UNPOOL),
    OpCase(
        "MaxUnpool",
        (distinct(1, 2, 5, 6),),
        torch=_unpool_to_oracle,
        model=_UNPOOL_TO,
        id="output-shape",
        # onnx's reference reads the indices against another shape
        forward="torch",
    ),
    OpCase(
        "MaxUnpool",
        (f(1, 1, 2, 2), ints(_OVERLAP)),
        {"kernel_shape": [3, 3], "strides": [1, 1]},
        id="overlapping",
        forward="onnxruntime",
    ),
    _average("plain", (2, 3, 6, 6), [2, 2], strides=[2, 2], torch=lambda x: F.avg_pool2d(x, 2)),
    _average("overlapping", (2, 2, 6, 7), [3, 2], strides=[2, 1], pads=[1, 0, 1, 1]),
    _average(
        "padding-counts",
        (2, 2, 6, 7),
        [3, 3],
        strides=[2, 2],
        pads=[1, 1, 1, 1],
        count_include_pad=1,
        torch=lambda x: F.avg_pool2d(x, 3, 2, 1),
    ),
    _average(
        "padding-does-not-count",
        (2, 2, 6, 7),
        [3, 3],
        pads=[1, 1, 1, 1],
        torch=lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    ),
    _average(
        "remainder",
        (1, 2, 8, 7),
        [2, 3],
        strides=[3, 3],
        torch=lambda x: F.avg_pool2d(x, (2, 3), 3),
    ),
    _average(
        "ceil",
        (1, 2, 6, 7),
        [3, 2],
        strides=[2, 2],
        ceil_mode=1,
        torch=lambda x: F.avg_pool2d(x, (3, 2), 2, ceil_mode=True),
    ),
    _average(
        "ceil-padding-counts",
        (1, 2, 6, 7),
        [3, 3],
        strides=[2, 3],
        pads=[1, 1, 1, 1],
        ceil_mode=1,
        count_include_pad=1,
        torch=lambda x: F.avg_pool2d(x, 3, (2, 3), 1, ceil_mode=True),
    ),
    _average(
        "ceil-last-window-on-padding",
        (1, 2, 2, 5),
        [3, 3],
        strides=[3, 3],
        pads=[1, 1, 1, 1],
        ceil_mode=1,
        count_include_pad=1,
        torch=lambda x: F.avg_pool2d(x, 3, 3, 1, ceil_mode=True),
        xfail=f"standard: {_WRONG_SIZE}",
    ),
    _average("dilated", (1, 2, 8, 7), [2, 3], dilations=[3, 2], pads=[1, 1, 1, 2]),
    _average(
        "dilated-padding-counts",
        (1, 2, 8, 7),
        [2, 3],
        dilations=[3, 2],
        pads=[1, 1, 1, 2],
        count_include_pad=1,
    ),
    _average("dilated-ceil", (1, 1, 9, 8), [2, 3], dilations=[2, 2], strides=[3, 3], ceil_mode=1),
    _average("same-upper", (1, 2, 6, 7), [3, 2], strides=[2, 2], auto_pad="SAME_UPPER"),
    _average(
        "same-lower",
        (1, 2, 6, 7),
        [3, 2],
        strides=[2, 2],
        auto_pad="SAME_LOWER",
        count_include_pad=1,
    ),
    _average(
        "one-axis",
        (2, 3, 9),
        [3],
        strides=[2],
        pads=[1, 1],
        torch=lambda x: F.avg_pool1d(x, 3, 2, 1, count_include_pad=False),
    ),
    _average(
        "three-axes",
        (1, 2, 4, 5, 4),
        [2, 2, 3],
        strides=[2, 1, 1],
        torch=lambda x: F.avg_pool3d(x, (2, 2, 3), (2, 1, 1)),
    ),
    _average("large-image", (2, 1, 132, 5), [3, 2], strides=[2, 2], pads=[1, 0, 1, 0]),
    _average(
        "large-image-ceil",
        (2, 1, 132, 5),
        [3, 2],
        strides=[3, 2],
        ceil_mode=1,
        count_include_pad=1,
        torch=lambda x: F.avg_pool2d(x, (3, 2), ceil_mode=True),
    ),
    _lp("plain", (2, 3, 6, 6), [2, 2], strides=[2, 2]),
    _lp("first", (1, 2, 5, 6), [3, 2], p=1, pads=[1, 0, 1, 0]),
    _lp("third", (1, 2, 5, 6), [3, 2], p=3, strides=[2, 1]),
    _lp("fourth", (1, 2, 5, 6), [2, 2], p=4),
    _lp("dilated", (1, 2, 6, 7), [2, 3], dilations=[2, 2], strides=[1, 2]),
    _lp("one-axis", (2, 2, 7), [3], strides=[2]),
    _lp(
        "same-upper",
        (1, 2, 6, 7),
        [3, 2],
        strides=[2, 2],
        auto_pad="SAME_UPPER",
        oracle_pads=[0, 0, 1, 1],
    ),
    OpCase(
        "LpPool",
        (away_from_zero(1, 1, 5, 5),),
        {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1},
        torch=lambda x: (F.avg_pool2d(F.pad(x, (0, 1, 0, 1)) ** 2, 2) * 4).sqrt(),
        # onnx's reference takes the mean over what is left of the last window
        forward="torch",
        id="ceil",
    ),
    OpCase("GlobalAveragePool", (f(2, 3, 4, 5),), torch=lambda x: x.mean((2, 3), keepdim=True)),
    OpCase(
        "GlobalAveragePool", (f(2, 3, 4),), torch=lambda x: x.mean(2, keepdim=True), id="one-axis"
    ),
    OpCase(
        "GlobalMaxPool",
        (distinct(2, 3, 4, 5),),
        torch=lambda x: F.adaptive_max_pool2d(x, 1),
        forward="torch",
    ),
    OpCase(
        "GlobalMaxPool",
        (distinct(2, 3, 7),),
        torch=lambda x: F.adaptive_max_pool1d(x, 1),
        forward="torch",
        id="one-axis",
    ),
    OpCase(
        "GlobalMaxPool",
        (_tied(2, 3, 7),),
        torch=lambda x: F.adaptive_max_pool1d(x, 1),
        forward="torch",
        xfail=_KINK,
        id="ties",
    ),
    OpCase(
        "GlobalLpPool",
        (away_from_zero(2, 3, 4, 5),),
        torch=lambda x: (x**2).sum((2, 3), keepdim=True).sqrt(),
        forward="torch",
    ),
    OpCase(
        "GlobalLpPool",
        (away_from_zero(2, 3, 4),),
        {"p": 3},
        torch=lambda x: (x.abs() ** 3).sum(2, keepdim=True) ** (1 / 3),
        forward="torch",
        id="third",
    ),
    OpCase(
        "GlobalLpPool",
        (away_from_zero(2, 3, 4),),
        {"p": 1},
        torch=lambda x: x.abs().sum(2, keepdim=True),
        forward="torch",
        id="first",
    ),
]
