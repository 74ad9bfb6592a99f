"""Quantizers are refused unless the user registers a gradient rule."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.autodiff.rule_registry import USER_RULES
from onnxtrain.errors import UndifferentiableError
from tests.cases.evaluate import stock

FAKE_QUANTIZED = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[4, 3] x, float[3, 2] w) => (float[4, 2] y)
<float scale = {0.25}, int8 zero = {3}> {
    q = QuantizeLinear(w, scale, zero)
    t = Transpose<perm = [1, 0]>(q)
    d = DequantizeLinear(t, scale, zero)
    wt = Transpose<perm = [1, 0]>(d)
    y = MatMul(x, wt)
}
"""


@pytest.fixture
def straight_through():
    """Register a straight-through rule for the duration of a test."""

    @onnxtrain.register_vjp("QuantizeLinear")
    def rule(op, dy, x, scale, zero_point=None):
        return op.Div(dy, scale)

    yield rule
    del USER_RULES["QuantizeLinear"]


def test_quantize_linear_is_refused() -> None:
    model = onnx.parser.parse_model(FAKE_QUANTIZED)
    with pytest.raises(UndifferentiableError, match=r"(?s)QuantizeLinear.*onnxtrain.register_vjp"):
        onnxtrain.vjp(model, wrt="w")


def test_gradient_that_bypasses_the_quantizer_is_not_refused() -> None:
    model = onnx.parser.parse_model(FAKE_QUANTIZED)
    assert onnxtrain.vjp(model, wrt="x").graph.output[-1].name == "x_grad"


def test_registered_straight_through_rule(straight_through) -> None:
    model = onnx.parser.parse_model(FAKE_QUANTIZED)
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(s).astype(np.float32) for s in ((4, 3), (3, 2), (4, 2)))
    y, dw = stock(onnxtrain.vjp(model, wrt="w"))([x, w, dy])
    rounded = np.round(w / 0.25) * 0.25
    np.testing.assert_allclose(y, x @ rounded, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, x.T @ dy, rtol=1e-5, atol=1e-5)


def test_matmul_integer_is_refused(straight_through) -> None:
    model = onnx.parser.parse_model(
        """
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[4, 3] x, int8[3, 2] w) => (float[4, 2] y) <float scale = {0.25}> {
            q = QuantizeLinear<output_dtype = 3>(x, scale)
            i = MatMulInteger(q, w)
            f = Cast<to = 1>(i)
            y = Mul(f, scale)
        }
        """
    )
    with pytest.raises(UndifferentiableError, match="MatMulInteger"):
        onnxtrain.vjp(model, wrt="x")
