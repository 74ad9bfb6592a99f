"""Cases for tensors generated from a few values."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.cases.base import OpCase, const, f, ints, positive

TEN_STEPS = """
g (float x, float delta) => (float[10] y) {
    steps = Constant<value_float = 9.5>()
    n = CastLike(steps, x)
    way = Mul(n, delta)
    limit = Add(x, way)
    y = Range(x, limit, delta)
}
"""


def one_hot(indices: torch.Tensor, depth: int, values: torch.Tensor) -> torch.Tensor:
    hot = F.one_hot(indices % depth, depth)
    return values[0] + hot * (values[1] - values[0])


CASES = [
    OpCase(
        "OneHot",
        (ints([[0, 2], [1, -1]]), const(4), f(2)),
        torch=lambda i, d, v: one_hot(i, 4, v),
    ),
    OpCase(
        "OneHot",
        (ints([0, 2, 2]), ints(3), f(2)),
        {"axis": 0},
        torch=lambda i, d, v: one_hot(i, 3, v).T,
        id="axis-0-runtime-depth",
    ),
    OpCase(
        "OneHot",
        (ints([7, 1]), const(3), f(2)),
        torch=lambda i, d, v: torch.stack([v[:1].expand(3), one_hot(torch.tensor(1), 3, v)]),
        forward="torch",  # the reference evaluator takes indices modulo the depth
        id="out-of-range",
    ),
    OpCase(
        "Range",
        (f(), positive()),
        model=TEN_STEPS,
        torch=lambda x, d: x + d * torch.arange(10),
    ),
    OpCase(
        "Range",
        (f(), const(9.0), const(1.5)),
        torch=lambda x, e, d: x + 1.5 * torch.arange(int(torch.ceil((9 - x.detach()) / 1.5))),
        id="start",
    ),
]
