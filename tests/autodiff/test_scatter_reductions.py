"""Scatter reductions at ties and zeros, where they are not smooth, compared with torch."""

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


def model(op: str, reduction: str, shape: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[4] x, int64[{shape}] i, float[6] u) => (float[4] y) {{
            y = {op}<reduction = "{reduction}">(x, i, u)
        }}
        """
    )


def gradients(op: str, reduction: str, updates: np.ndarray, dy: np.ndarray) -> list[np.ndarray]:
    indices = INDICES if op == "ScatterElements" else INDICES[:, None]
    vjp = onnxtrain.vjp(model(op, reduction, "6" if indices.ndim == 1 else "6, 1"), wrt=["x", "u"])
    return stock(vjp)([DATA, indices, updates, dy])


def torch_gradients(reduction: str, updates: np.ndarray, dy: np.ndarray) -> list[np.ndarray]:
    x, u = (torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (DATA, updates))
    y = x.scatter_reduce(0, torch.tensor(INDICES), u, NAMES[reduction])
    grads = torch.autograd.grad(y, [x, u], torch.tensor(dy, dtype=torch.float64))
    return [t.detach().numpy() for t in (y, *grads)]


@pytest.mark.parametrize("op", ["ScatterElements", "ScatterND"])
@pytest.mark.parametrize("reduction", ["max", "min"])
def test_ties_share_the_gradient_evenly(op: str, reduction: str) -> None:
    updates = np.array([2.0, 2.0, 5.0, 0.0, 3.0, -1.0], np.float32)
    dy = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    for a, b in zip(
        gradients(op, reduction, updates, dy), torch_gradients(reduction, updates, dy), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("op", ["ScatterElements", "ScatterND"])
@pytest.mark.parametrize("zeros", [[0], [0, 1], [3], [3, 5], [2, 4]])
def test_products_with_zeros(op: str, zeros: list[int]) -> None:
    updates = np.array([2.0, 3.0, 5.0, 0.5, -3.0, -1.0], np.float32)
    updates[zeros] = 0
    dy = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    for a, b in zip(
        gradients(op, "mul", updates, dy), torch_gradients("mul", updates, dy), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_gradient_of_top_k_with_equal_values() -> None:
    vjp = onnxtrain.vjp(
        onnx.parser.parse_model(
            """
            <ir_version: 10, opset_import: ["" : 21]>
            g (float[4] x) => (float[2] y, int64[2] i) <int64[1] k = {2}> { y, i = TopK(x, k) }
            """
        ),
        wrt="x",
        outputs="y",
    )
    _, chosen, dx = stock(vjp)([np.ones(4), np.array([3.0, 4.0])])
    np.testing.assert_array_equal(dx[chosen], [3, 4])
    assert dx.sum() == 7


def test_max_pooling_in_float16_sums_in_float32() -> None:
    """onnxruntime adds no float16 elements on the CPU."""
    vjp = onnxtrain.vjp(
        onnx.parser.parse_model(
            """
            <ir_version: 10, opset_import: ["" : 21]>
            g (float16[N, 1, T] x) => (float16[N, 1, S] y) {
                y = MaxPool <kernel_shape = [3], strides = [2]> (x)
            }
            """
        ),
        wrt="x",
    )
    x = np.array([[[1, 2, 9, 4, 5]]], np.float16)
    _, dx = stock(vjp)([x, np.array([[[3, 4]]], np.float16)])
    np.testing.assert_array_equal(dx, np.array([[[0, 0, 7, 0, 0]]], np.float16))
