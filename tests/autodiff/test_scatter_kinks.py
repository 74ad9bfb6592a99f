"""Scatter reductions where they are not smooth: ties and zeros, against torch."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

import onnxtrain
from tests.cases.evaluate import stock

NAMES = {"max": "amax", "min": "amin", "mul": "prod"}
INDICES = np.array([0, 0, 1, 2, 2, 2])
DATA = np.array([2.0, 5.0, 0.0, 7.0], np.float32)


def model(op: str, how: str, shape: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[4] x, int64[{shape}] i, float[6] u) => (float[4] y) {{
            y = {op}<reduction = "{how}">(x, i, u)
        }}
        """
    )


def ours(op: str, how: str, updates: np.ndarray, dy: np.ndarray) -> list[np.ndarray]:
    indices = INDICES if op == "ScatterElements" else INDICES[:, None]
    built = onnxtrain.vjp(model(op, how, "6" if indices.ndim == 1 else "6, 1"), wrt=["x", "u"])
    return stock(built)([DATA, indices, updates, dy])


def theirs(how: str, updates: np.ndarray, dy: np.ndarray) -> list[np.ndarray]:
    x, u = (torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (DATA, updates))
    y = x.scatter_reduce(0, torch.tensor(INDICES), u, NAMES[how])
    grads = torch.autograd.grad(y, [x, u], torch.tensor(dy, dtype=torch.float64))
    return [t.detach().numpy() for t in (y, *grads)]


@pytest.mark.parametrize("op", ["ScatterElements", "ScatterND"])
@pytest.mark.parametrize("how", ["max", "min"])
def test_ties_share_evenly(op: str, how: str) -> None:
    updates = np.array([2.0, 2.0, 5.0, 0.0, 3.0, -1.0], np.float32)
    dy = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    for a, b in zip(ours(op, how, updates, dy), theirs(how, updates, dy), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("op", ["ScatterElements", "ScatterND"])
@pytest.mark.parametrize("zeros", [[0], [0, 1], [3], [3, 5], [2, 4]])
def test_products_with_zeros(op: str, zeros: list[int]) -> None:
    updates = np.array([2.0, 3.0, 5.0, 0.5, -3.0, -1.0], np.float32)
    updates[zeros] = 0
    dy = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    for a, b in zip(ours(op, "mul", updates, dy), theirs("mul", updates, dy), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_top_k_of_equal_values_keeps_the_sum() -> None:
    built = onnxtrain.vjp(
        onnx.parser.parse_model(
            """
            <ir_version: 10, opset_import: ["" : 21]>
            g (float[4] x) => (float[2] y, int64[2] i) <int64[1] k = {2}> { y, i = TopK(x, k) }
            """
        ),
        wrt="x",
        outputs="y",
    )
    _, chosen, dx = stock(built)([np.ones(4), np.array([3.0, 4.0])])
    np.testing.assert_array_equal(dx[chosen], [3, 4])
    assert dx.sum() == 7
