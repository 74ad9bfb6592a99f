"""Cases for writing by index."""

from __future__ import annotations

import torch

from tests.cases.base import OpCase, away_from_zero, const, distinct, f, ints

TWICE = [[0, 2, 2, 1], [0, 1, 0, 1]]  # rows of a [3, 4] tensor, some met twice
ONCE = [[0, 2, 1, 1], [1, 0, 0, 2]]
POINTS = [[0, 1], [2, 3], [0, 1]]


def elements(x, i, u, how, axis=0):
    """torch's scatter_reduce with ONNX's names and negative indices."""
    name = {"mul": "prod", "max": "amax", "min": "amin", "add": "sum"}[how]
    return x.scatter_reduce(axis, i % x.shape[axis], u, name)


def points(x, i, u, how):
    """The same for ScatterND: by flat position."""
    k = i.shape[-1]
    strides = torch.tensor([1])
    for size in reversed(x.shape[1:k]):
        strides = torch.cat([strides[:1] * size, strides])
    sizes = torch.tensor(x.shape[:k])
    rows = ((i % sizes) * strides).sum(-1).flatten()
    flat = x.reshape(int(sizes.prod()), -1)
    updates = u.reshape(rows.numel(), -1)
    where = rows[:, None].expand_as(updates)
    if how == "none":
        return flat.scatter(0, where, updates).reshape(x.shape)
    return elements(flat, where, updates, how).reshape(x.shape)


def cache(x: torch.Tensor, u: torch.Tensor, starts: list[int], axis: int) -> torch.Tensor:
    """Write ``u`` behind ``starts``, around the end of the axis."""
    line = (torch.tensor(starts)[:, None] + torch.arange(u.shape[axis])) % x.shape[axis]
    shape = [1] * u.dim()
    shape[0], shape[axis] = len(starts), u.shape[axis]
    return x.scatter(axis, line.reshape(shape).expand_as(u), u)


def reductions():
    for how in ("add", "mul", "max", "min"):
        draw = away_from_zero if how == "mul" else distinct
        # updates between the data values: some win, some lose
        yield OpCase(
            "ScatterElements",
            (draw(3, 4), ints(TWICE), draw(2, 4)),
            {"reduction": how},
            torch=lambda x, i, u, how=how: elements(x, i, u, how),
            id=how,
        )
        yield OpCase(
            "ScatterND",
            (draw(3, 4), ints(POINTS), draw(3)),
            {"reduction": how},
            torch=lambda x, i, u, how=how: points(x, i, u, how),
            id=how,
        )


CASES = [
    *reductions(),
    OpCase(
        "ScatterElements",
        (f(3, 4), ints(ONCE), f(2, 4)),
        torch=lambda x, i, u: x.scatter(0, i, u),
    ),
    OpCase(
        "ScatterElements",
        (f(3, 4), ints([[-1, 0], [1, 3]]), f(2, 2)),
        {"axis": -1},
        torch=lambda x, i, u: torch.cat([x[:2].scatter(1, i % 4, u), x[2:]]),
        forward="torch",  # GatherElements of the reference evaluator wants all rows
        id="negative-fewer-rows",
    ),
    OpCase(
        "ScatterElements",
        (f(3, 4), ints(TWICE), const([[0.0, 0.0, 2.0, 0.5], [3.0, -1.0, 1.5, 0.0]])),
        {"reduction": "mul"},
        torch=lambda x, i, u: elements(x, i, u, "mul"),
        id="mul-constant-zeros",
    ),
    OpCase(
        "ScatterND", (f(3, 4), ints([[0, 1], [-1, 3]]), f(2)), torch=lambda *a: points(*a, "none")
    ),
    OpCase(
        "ScatterND",
        (f(4, 2, 3), ints([[[0], [-2]]]), f(1, 2, 2, 3)),
        torch=lambda *a: points(*a, "none"),
        id="slices",
    ),
    OpCase(
        "ScatterND",
        (f(4, 2), ints([[1], [1], [3]]), f(3, 2)),
        {"reduction": "add"},
        torch=lambda *a: points(*a, "add"),
        id="add-rows-twice",
    ),
    OpCase(
        "TensorScatter",
        (f(2, 5, 3), f(2, 2, 3), ints([1, 3])),
        torch=lambda x, u, i: cache(x, u, [1, 3], 1),
        opset=24,
    ),
    OpCase(
        "TensorScatter",
        (f(2, 3, 5), f(2, 3, 3), ints([4, 1])),
        {"axis": 2, "mode": "circular"},
        torch=lambda x, u, i: cache(x, u, [4, 1], 2),
        opset=24,
        id="circular",
    ),
    OpCase(
        "TensorScatter",
        (f(2, 2, 5, 3), f(2, 2, 4, 3)),
        torch=lambda x, u: cache(x, u, [0, 0], 2),
        opset=24,
        id="no-indices",
    ),
]
