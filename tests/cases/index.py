"""Cases for gathering by index."""

from __future__ import annotations

import torch

from tests.cases.base import OpCase, const, distinct, f, ints

ROWS = [[0, 2], [3, 0]]


def gather_nd(x: torch.Tensor, i: torch.Tensor, batch_dims: int = 0) -> torch.Tensor:
    if batch_dims:
        rows = [gather_nd(a, b, batch_dims - 1) for a, b in zip(x, i, strict=True)]
        return torch.stack(rows)
    return x[tuple(i.movedim(-1, 0))]


def unique_values(x: torch.Tensor) -> torch.Tensor:
    return x.flatten().sort().values


CASES = [
    OpCase("Gather", (f(5, 3), ints([0, 3, 3, -1])), torch=lambda x, i: x[i]),
    OpCase("Gather", (f(4, 3), ints(ROWS)), torch=lambda x, i: x[i], id="matrix-of-indices"),
    OpCase(
        "Gather", (f(2, 4, 3), ints(ROWS)), {"axis": 1}, torch=lambda x, i: x[:, i], id="axis-1"
    ),
    OpCase(
        "Gather",
        (f(2, 3, 4), ints([1, -2, 1])),
        {"axis": -1},
        torch=lambda x, i: x[..., i],
        id="last",
    ),
    OpCase("Gather", (f(5, 3), ints(2)), torch=lambda x, i: x[2], id="runtime-scalar"),
    OpCase("Gather", (f(5, 3), const(-2)), torch=lambda x, i: x[-2], id="scalar"),
    OpCase(
        "Gather", (f(2, 3, 4), const(0)), {"axis": 1}, torch=lambda x, i: x[:, 0], id="first-token"
    ),
    OpCase(
        "Gather", (f(2, 5), const([1, 2, 3])), {"axis": 1}, torch=lambda x, i: x[:, 1:4], id="run"
    ),
    OpCase("Gather", (f(2, 5), const([-1])), {"axis": 1}, torch=lambda x, i: x[:, -1:], id="one"),
    OpCase("Gather", (f(5), const([-1, 0])), torch=lambda x, i: x[i], id="not-a-run"),
    OpCase(
        "Gather",
        (f(2, 5, 3), const([[1, 2, 3]])),
        {"axis": 1},
        torch=lambda x, i: x[:, 1:4].unsqueeze(1),
        id="run-of-one-row",
    ),
    OpCase(
        "Gather",
        (f(7, 2), const([[1, 2], [3, 4]])),
        torch=lambda x, i: x[torch.as_tensor(i)],
        id="run-in-rows",
    ),
    OpCase(
        "Gather",
        (f(5, 3), const([[[0], [1]], [[0], [1]]])),
        torch=lambda x, i: x[torch.as_tensor(i)],
        id="rows-repeated",
    ),
    OpCase(
        "Gather",
        (f(2, 4), const([[-1, -1, -1], [-1, -1, -1]])),
        {"axis": 1},
        torch=lambda x, i: x[:, torch.as_tensor(i)],
        id="all-the-same",
    ),
    OpCase(
        "Gather",
        (f(3, 5, 2), const([[4, 0, 1, 1], [4, 0, 1, 1]])),
        {"axis": 1},
        torch=lambda x, i: x[:, torch.as_tensor(i)],
        id="rows-repeated-not-a-run",
    ),
    OpCase(
        "Gather",
        (f(2, 4, 3), const([[2, -1], [0, 1]])),
        {"axis": -2},
        torch=lambda x, i: x[:, torch.as_tensor(i)],
        id="each-once",
    ),
    OpCase("Gather", (f(5, 3), ints([4, 4], "int32")), torch=lambda x, i: x[i.long()], id="int32"),
    OpCase("Gather", (f(5, 3), ints([], "int64")), torch=lambda x, i: x[i], id="no-index"),
    OpCase("GatherElements", (f(3, 4), ints([[0, 2, 2, 1]])), torch=lambda x, i: x.gather(0, i)),
    OpCase(
        "GatherElements",
        (f(3, 4), ints([[0, -1], [3, 3]])),
        {"axis": -1},
        torch=lambda x, i: x.gather(1, i % 4),
        forward="torch",  # the reference evaluator wants as many rows as the data has
        id="fewer-rows",
    ),
    OpCase("GatherND", (f(3, 4), ints([[0, 1], [2, 3], [0, 1]])), torch=gather_nd),
    OpCase("GatherND", (f(3, 4, 2), ints([[[-1]], [[0]]])), torch=gather_nd, id="slices"),
    OpCase(
        "GatherND", (f(5, 2), const([[1], [2], [3]])), torch=lambda x, i: x[1:4], id="run-of-slices"
    ),
    OpCase(
        "GatherND",
        (f(2, 3, 4), ints([[[0], [2]], [[1], [1]]])),
        {"batch_dims": 1},
        torch=lambda x, i: gather_nd(x, i, 1),
        id="batch",
    ),
    OpCase(
        "GatherND",
        (f(2, 3, 4), ints([[[0], [2], [-1]], [[1], [1], [3]]])),
        {"batch_dims": 2},
        torch=lambda x, i: gather_nd(x, i, 2),
        id="two-batch-axes",
    ),
    OpCase(
        "TopK",
        (distinct(3, 5), const([2])),
        torch=lambda x, k: x.topk(2).values,
        outputs=["y", "_i"],
    ),
    OpCase(
        "TopK",
        (distinct(5, 3), ints([3])),
        {"axis": 0, "largest": 0},
        torch=lambda x, k: x.topk(3, 0, largest=False).values,
        outputs=["y", "_i"],
        id="smallest-runtime-k",
    ),
    OpCase(
        "TopK",
        (distinct(2, 4, 3), const([4])),
        {"axis": -2, "sorted": 1},
        torch=lambda x, k: x.topk(4, 1),
        outputs=2,
        id="all-with-indices",
    ),
    OpCase(
        "Unique",
        (distinct(2, 4),),
        torch=unique_values,
        outputs=["y", "", "_inverse"],
        id="flattened",
    ),
    OpCase(
        "Unique",
        (distinct(4, 3),),
        {"axis": 0, "sorted": 0},
        torch=lambda x: x,
        forward="torch",
        id="rows-unsorted",
    ),
]
