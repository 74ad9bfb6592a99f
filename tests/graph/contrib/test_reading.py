"""Files of onnxruntime's tools: no types after fused nodes, missing imports, odd domains."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.errors import OnnxTrainError, PrepareError
from tests.graph.contrib.fused_case import Case, normal


def _model(text: str, opset: int, imports: str = ', "com.microsoft": 1') -> onnx.ModelProto:
    head = f'<ir_version: 8, opset_import: ["": {opset}{imports}]> g'
    return onnx.parser.parse_model(f"{head} {text}")


def test_types_after_a_fused_node_are_inferred() -> None:
    model = _model(
        """(float[n, 4] x, float[4] b) => (float[n, 4] y) {
        h = com.microsoft.BiasGelu(x, b)
        s = Shape(h)
        r = Reshape(h, s)
        y = com.microsoft.FastGelu(r) }""",
        17,
    )
    assert onnxtrain.explain(model, wrt=["x", "b"]).differentiable
    x, b, dy = normal(3, 4), normal(4), np.ones((3, 4), np.float32)
    gradients = onnxtrain.vjp(model, ["x"])
    session = onnxruntime.InferenceSession(gradients.SerializeToString())
    got = session.run(["y"], {"x": x, "b": b, "y_grad": dy})[0]
    want = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x, "b": b})[0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_types_after_a_fused_node_in_a_branch() -> None:
    model = _model(
        """(float[n, 4] x, bool c) => (float[n, 4] y) {
        y = If(c) <then_branch = t () => (float[n, 4] u)
            { h = com.microsoft.QuickGelu(x) u = Relu(h) },
          else_branch = e () => (float[n, 4] v) { v = Neg(x) }> }""",
        17,
    )
    assert onnxtrain.explain(model, wrt="x").differentiable


def test_undefined_operator_is_named() -> None:
    model = _model(
        "(float[2, 4] x) => (float[a, b] y) { z = com.microsoft.Nope(x) y = Relu(z) }", 17
    )
    with pytest.raises(PrepareError, match=r"com.microsoft::Nope.*\n.*value_info"):
        onnxtrain.explain(model)


def test_missing_import_is_added_and_reported() -> None:
    text = "(float[n, 4] x) => (float[n, 4] y) { y = com.microsoft.QuickGelu(x) }"
    report = onnxtrain.explain(_model(text, 17, imports=""), wrt="x")
    assert report.differentiable
    assert "the missing opset import of com.microsoft was added" in report.repairs
    repairs = onnxtrain.explain(_model(text, 17), wrt="x").repairs
    assert not any("import" in line for line in repairs)


def test_other_domains_require_an_import() -> None:
    model = _model("(float[n, 4] x) => (float[n, 4] y) { y = ai.onnx.ml.Normalizer(x) }", 17, "")
    with pytest.raises(OnnxTrainError, match="without an opset import"):
        onnxtrain.explain(model)


@pytest.mark.parametrize("opset", [11, 16, 18])
@pytest.mark.parametrize("op", ["LayerNormalization", "SimplifiedLayerNormalization"])
def test_onnxruntime_normalizations_in_the_standard_domain(op: str, opset: int) -> None:
    bias = [normal(4)] if op == "LayerNormalization" else []
    case = Case(op, [normal(2, 5, 4), normal(4), *bias], {"epsilon": 1e-3}, domain="", opset=opset)
    case.check_forward()
    case.check_gradient()


IMAGE = normal(2, 3, 6, 5)


def old(op: str, *more: np.ndarray, precision: type = np.float64, **attributes) -> Case:
    return Case(op, [IMAGE, *more], attributes, domain="", opset=9, precision=precision)


OLD = {
    "Affine": old("Affine", alpha=2.0, beta=0.5),
    "Crop": old("Crop", border=[1, 2, 1, 0]),
    "Crop to a size": old("Crop", border=[1, 2, 1, 0], scale=[2, 3]),
    "ImageScaler": old("ImageScaler", scale=2.0, bias=[1.0, 2.0, 3.0]),
    "ParametricSoftplus": old("ParametricSoftplus", alpha=2.0, beta=0.5, precision=np.float32),
    "Scale": old("Scale", scale=0.3),
    "ScaledTanh": old("ScaledTanh", alpha=2.0, beta=0.5),
    "ThresholdedRelu": old("ThresholdedRelu", alpha=-9.0, precision=np.float32),
    "DynamicSlice": old("DynamicSlice", np.array([1, 0]), np.array([3, 4]), np.array([1, 2])),
}


@pytest.mark.parametrize("name", OLD)
def test_operators_before_their_standardization(name: str) -> None:
    OLD[name].check_forward()
    OLD[name].check_gradient()


@pytest.mark.parametrize("opset", [9, 17, 21, 23])
def test_unknown_operator_is_not_a_converter_assertion(opset: int) -> None:
    model = _model("(float[2, 4] x) => (float[a, b] y) { z = Nope(x) y = Relu(z) }", opset)
    with pytest.raises(PrepareError, match="operators that ONNX does not define: Nope") as caught:
        onnxtrain.explain(model)
    assert "version_converter" not in str(caught.value)
