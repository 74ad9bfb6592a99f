"""Squeeze with an empty list of axes removes every axis of size 1, as onnxruntime does."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

import onnxtrain
from tests.cases.evaluate import stock

NEW = '<ir_version: 10, opset_import: ["": 21]> g (float[2, 1, 3] x) => (float[a, b] y)'
OLD = '<ir_version: 7, opset_import: ["": 12]> g (float[2, 1, 3] x) => (float[a, b] y)'
MODELS = {
    "input": NEW + "<int64[0] e = {}> { z = Squeeze(x, e) y = Mul(z, z) }",
    "constant": NEW + "{ e = Constant<value_ints: ints = []>() z = Squeeze(x, e) y = Mul(z, z) }",
    "attribute": OLD + "{ z = Squeeze<axes: ints = []>(x) y = Mul(z, z) }",
    "none": NEW + "{ z = Squeeze(x) y = Mul(z, z) }",
}


@pytest.mark.parametrize("kind", MODELS)
def test_numbers_and_gradients(kind: str) -> None:
    model = onnx.parser.parse_model(MODELS[kind])
    x = np.arange(6, dtype=np.float32).reshape(2, 1, 3)
    (wanted,) = stock(model)([x])
    assert wanted.shape == (2, 3)
    y, dx = stock(onnxtrain.vjp(model, ["x"]))([x, np.ones((2, 3), np.float32)])
    np.testing.assert_array_equal(y, wanted)
    np.testing.assert_array_equal(dx, 2 * x)
    (lowered,) = stock(onnxtrain.lower(model, opset=11))([x])
    np.testing.assert_array_equal(lowered, wanted)
