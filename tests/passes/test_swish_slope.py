"""The gradient of a product with its own sigmoid."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import parser

import onnxtrain

HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'


def gradient(text: str, **feeds: np.ndarray) -> tuple[list[str], np.ndarray]:
    made = onnxtrain.vjp(parser.parse_model(HEAD + text), wrt=["x"])
    session = onnxruntime.InferenceSession(made.SerializeToString())
    result = session.run(["x_grad"], feeds)[0]
    assert isinstance(result, np.ndarray)
    return [n.op_type for n in made.graph.node], result


@pytest.mark.parametrize("order", ["x, s", "s, x"])
def test_four_nodes_give_the_slope(order: str) -> None:
    text = f"g (float[n] x) => (float[n] y) {{ s = Sigmoid(x) y = Mul({order}) }}"
    x = np.array([-200, -90, -3, -0.5, 0, 0.7, 4, 90, 200], np.float32)
    dy = np.linspace(-1, 2, x.size, dtype=np.float32)
    kinds, have = gradient(text, x=x, y_grad=dy)
    wide = x.astype(np.float64)
    s = np.exp(-np.logaddexp(0, -wide))
    np.testing.assert_allclose(have, dy * (s + wide * s * (1 - s)), rtol=2e-6, atol=1e-7)
    assert sorted(kinds) == sorted(["Sigmoid", "Mul", "Sub", "Mul", "Add", "Mul"])


def test_a_product_with_the_sigmoid_of_something_else_stays() -> None:
    text = """g (float[n] x, float[n] z) => (float[n] y) {
        s = Sigmoid(x)
        p = Mul(z, s)
        y = Add(p, x)
    }"""
    x, z = np.array([0.3, -0.2], np.float32), np.array([2.0, 5.0], np.float32)
    dy = np.array([1.0, -1.0], np.float32)
    _, have = gradient(text, x=x, z=z, y_grad=dy)
    s = 1 / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(have, dy * (1 + z * s * (1 - s)), rtol=1e-6)
