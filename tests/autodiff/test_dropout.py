"""The gradient of Dropout uses the mask that the forward pass drew."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxtrain
from tests.cases.evaluate import stock

GRAPHS = {
    "constant": """g (float[64, 33] x) => (float[64, 33] y)
        <float ratio = {0.25}, bool mode = {1}> { y = Dropout (x, ratio, mode) }""",
    "default-ratio": """g (float[64, 33] x) => (float[64, 33] y)
        <bool mode = {1}> { y = Dropout (x, , mode) }""",
    "run-time": """g (float[64, 33] x, float ratio, bool mode) => (float[64, 33] y)
        { y = Dropout (x, ratio, mode) }""",
    "mask-is-an-output": """g (float[n, 33] x, float ratio, bool mode)
        => (float[n, 33] y, bool[n, 33] mask) { y, mask = Dropout (x, ratio, mode) }""",
}


@pytest.mark.parametrize("name", GRAPHS)
def test_gradient_is_zero_exactly_where_the_output_is(name: str) -> None:
    header = '<ir_version: 10, opset_import: ["" : 21]>\n'
    model = onnx.parser.parse_model(header + GRAPHS[name])
    vjp = onnxtrain.vjp(model, ["x"], ["y"])
    x = np.random.default_rng(0).uniform(1, 2, (64, 33)).astype(np.float32)
    dy = np.random.default_rng(1).uniform(1, 2, (64, 33)).astype(np.float32)
    ratio = 0.5 if name == "default-ratio" else 0.25
    extra = [np.float32(ratio), np.array(True)][: len(model.graph.input) - 1]
    y, *_, dx = stock(vjp)([x, *extra, dy])
    mask = y != 0
    assert abs(mask.mean() - (1 - ratio)) < 0.06
    np.testing.assert_allclose(y[mask], (x / (1 - ratio))[mask], rtol=1e-6)
    np.testing.assert_allclose(dx, np.where(mask, dy / (1 - ratio), 0), rtol=1e-6)


def test_second_derivative_uses_the_same_mask() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
        g (float[64, 33] x) => (float[64, 33] z) <float ratio = {0.5}, bool mode = {1}>
        { y = Dropout (x, ratio, mode)
          z = Mul (y, y) }"""
    first = onnxtrain.vjp(onnx.parser.parse_model(text), ["x"], ["z"])
    second = onnxtrain.vjp(first, ["x"], ["x_grad"])
    x, one = np.ones((64, 33), np.float32), np.ones((64, 33), np.float32)
    z, dx, ddx = stock(second)([x, one, one])
    np.testing.assert_array_equal(ddx, np.where(z != 0, 8.0, 0.0))
    np.testing.assert_array_equal(dx, ddx)
