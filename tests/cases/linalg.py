"""Cases for matmuls and determinants."""

from __future__ import annotations

import numpy as np
import torch

from tests.cases.base import Draw, OpCase, f


def _singular(rank: int) -> Draw:
    """A square matrix of the given rank and a larger size: its determinant is zero."""
    n = max(rank + 1, 3)

    def make(rng: np.random.Generator) -> np.ndarray:
        # Small whole numbers: the product is exact, so the matrix is exactly singular.
        return (rng.integers(-2, 3, (n, rank)) @ rng.integers(-2, 3, (rank, n))).astype(np.float64)

    return Draw(make)


CASES = [
    OpCase("MatMul", (f(3, 4), f(4, 5)), torch=torch.matmul),
    OpCase("MatMul", (f(2, 1, 3, 4), f(6, 4, 5)), torch=torch.matmul, id="broadcast"),
    OpCase("MatMul", (f(4), f(6, 4, 5)), torch=torch.matmul, id="vector-left"),
    OpCase("MatMul", (f(2, 3, 4), f(4)), torch=torch.matmul, id="vector-right"),
    OpCase("MatMul", (f(4), f(4)), torch=torch.matmul, id="vector-vector"),
    OpCase("MatMul", (f(4), f(4, 5)), torch=torch.matmul, id="vector-matrix"),
    OpCase("MatMul", (f(3, 4), f(4)), torch=torch.matmul, id="matrix-vector"),
    OpCase("MatMul", (f(2, 3, 4), f(4, 5)), torch=torch.matmul, id="weight-right"),
    OpCase("MatMul", (f(3, 4), f(2, 4, 5)), torch=torch.matmul, id="weight-left"),
    OpCase("MatMul", (f(2, 5, 3, 4), f(2, 5, 4, 3)), torch=torch.matmul, id="batches"),
    OpCase("MatMul", (f(2, 1, 4), f(2, 4, 1)), torch=torch.matmul, id="size-one"),
    OpCase("Gemm", (f(3, 4), f(4, 5), f(5)), torch=lambda a, b, c: a @ b + c),
    OpCase("Gemm", (f(3, 4), f(4, 5)), torch=torch.matmul, id="no-bias"),
    OpCase(
        "Gemm",
        (f(4, 3), f(5, 4), f(3, 1)),
        {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0},
        torch=lambda a, b, c: 0.5 * a.T @ b.T + 2 * c,
        id="transposed-scaled-column",
    ),
    OpCase("Gemm", (f(3, 4), f(4, 5), f()), torch=lambda a, b, c: a @ b + c, id="scalar-bias"),
    OpCase(
        "Gemm",
        (f(4, 3), f(4, 5), f(3, 5)),
        {"transA": 1, "alpha": -1.5, "beta": 0.5},
        torch=lambda a, b, c: -1.5 * a.T @ b + 0.5 * c,
        id="left-transposed",
    ),
    OpCase(
        "Gemm",
        (f(3, 4), f(5, 4), f(1, 5)),
        {"transB": 1},
        torch=lambda a, b, c: a @ b.T + c,
        id="right-transposed",
    ),
    OpCase("Det", (f(3, 3),), torch=torch.linalg.det, tol=1e-3),
    OpCase("Det", (f(2, 2, 4, 4),), torch=torch.linalg.det, tol=1e-3, id="batches"),
    OpCase("Det", (f(3, 1, 1),), torch=torch.linalg.det, id="size-one"),
    OpCase("Det", (_singular(3),), id="rank-three-of-four"),
    OpCase("Det", (_singular(1),), id="rank-one-of-three"),
]
