"""Cases for operator versions older than the working opset: `prepare` upgrades them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.cases.base import OpCase, away_from_zero, const, distinct, f


def old_softmax(function, axis: int):
    """Softmax over all axes from one on, as before opset 13."""
    return lambda x: function(x.flatten(axis), -1).reshape(x.shape)


CASES = [
    OpCase(
        "Upsample",
        (f(1, 2, 3, 3), const([1.0, 1.0, 2.0, 3.0])),
        torch=lambda x, s: x.repeat_interleave(2, 2).repeat_interleave(3, 3),
        opset=9,
        forward="torch",
    ),
    OpCase(
        "Upsample",
        (f(1, 2, 3, 3), const([1.0, 1.0, 2.0, 3.0])),
        {"mode": "linear"},
        opset=9,
        forward="onnxruntime",
        id="linear",
    ),
    OpCase(
        "Upsample",
        (f(2, 3, 2),),
        {"scales": [1.0, 1.0, 2.0]},
        torch=lambda x: x.repeat_interleave(2, 2),
        opset=7,
        forward="torch",
        id="attribute",
    ),
    OpCase(
        "Scatter",
        (f(3, 3), const([[2, 0, 1]]), f(1, 3)),
        torch=lambda x, i, u: x.scatter(0, torch.tensor(i), u),
        opset=9,
        forward="torch",
    ),
    OpCase(
        "Scatter",
        (f(2, 5), const([[1, -1], [0, 3]]), f(2, 2)),
        {"axis": 1},
        torch=lambda x, i, u: x.scatter(1, torch.tensor(i) % 5, u),
        opset=10,
        forward="torch",
        id="axis-1",
    ),
    OpCase(
        "Softmax",
        (f(2, 3, 4),),
        torch=old_softmax(F.softmax, 1),
        opset=11,
        forward="torch",
        id="old",
    ),
    OpCase(
        "LogSoftmax",
        (f(2, 3, 4),),
        torch=old_softmax(F.log_softmax, 1),
        opset=9,
        forward="torch",
        id="old",
    ),
    OpCase(
        "Clip",
        (away_from_zero(3, 4),),
        {"min": -1.0, "max": 0.2},
        torch=lambda x: x.clamp(-1.0, 0.2),
        opset=9,
        forward="torch",
        id="old",
    ),
    OpCase(
        "Pad",
        (f(2, 3),),
        {"pads": [1, 0, 0, 2], "value": 1.5},
        torch=lambda x: F.pad(x, (0, 2, 1, 0), value=1.5),
        opset=9,
        forward="torch",
        id="old",
    ),
    OpCase(
        "TopK",
        (distinct(3, 5),),
        {"axis": 1, "k": 2},
        torch=lambda x: (x.topk(2, 1)[0], None),
        outputs=2,
        opset=9,
        forward="torch",
        id="old",
    ),
    OpCase(
        "ReduceSum",
        (f(2, 3, 4),),
        {"axes": [1], "keepdims": 0},
        torch=lambda x: x.sum(1),
        opset=11,
        forward="torch",
        id="old",
    ),
]
