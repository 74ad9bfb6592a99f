"""Cases for matrix products."""

from __future__ import annotations

import torch

from tests.cases.base import OpCase, f

CASES = [
    OpCase("MatMul", (f(3, 4), f(4, 5)), torch=torch.matmul),
    OpCase("MatMul", (f(2, 1, 3, 4), f(6, 4, 5)), torch=torch.matmul, id="broadcast"),
    OpCase("MatMul", (f(4), f(6, 4, 5)), torch=torch.matmul, id="vector-left"),
    OpCase("MatMul", (f(2, 3, 4), f(4)), torch=torch.matmul, id="vector-right"),
    OpCase("MatMul", (f(4), f(4)), torch=torch.matmul, id="vector-vector"),
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
]
