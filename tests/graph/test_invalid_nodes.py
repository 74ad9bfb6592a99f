"""Nodes that violate the definition of their operator raise an error that names them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.errors import OnnxTrainError
from onnxtrain.expand.expansions import EXPANSIONS, TRAINING, Expansion

HEAD = '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> g'
X = "(float[2, 4] x) => (float[a, b] y)"
LOOP = "(float[2] x, int64 n, bool c) => (float[2] y)"
SCAN = "(float[2] x, float[5, 2] s) => (float[2] y)"
LSTM = "(float[5, 2, 3] x, float[1, 8, 3] w, float[1, 8, 2] r) => (float[a, b, c, d] y)"
STEP = "body = b (float[2] u, float[2] q) => (float[2] v, float[2] w) { v = Relu(u) w = Neg(q) }"
UNFIT = {
    "unknown operator": f"{X} {{ z = com.microsoft.Nope(x) y = Relu(z) }}",
    "no bias": f"{X} {{ y = com.microsoft.BiasGelu(x) }}",
    "no skip": f"{X} {{ y = com.microsoft.SkipLayerNormalization(x) }}",
    "an empty skip": f"""{X} <float[4] b = {{1, 2, 3, 4}}> {{
        y = com.microsoft.SkipLayerNormalization(x, , b) }}""",
    "no heads": """(float[2, 4, 8] x, float[8, 24] w, float[24] b) => (float[a, c, d] y) {
        y = com.microsoft.Attention(x, w, b) }""",
    "a state too many": f"""{LOOP} {{ y = Loop(n, c, x) <body = b
        (int64 i, bool p, float[2] u, float[2] e) => (bool q, float[2] v)
        {{ q = Identity(p) v = Relu(u) }}> }}""",
    "no condition": f"""{LOOP} {{ y = Loop(n, c, x) <body = b
        (int64 i) => (bool q, float[2] v) {{ q = Cast<to = 9>(i) v = Relu(x) }}> }}""",
    "no state": f"""{LOOP} {{ y = Loop(n, c, x) <body = b
        (int64 i, bool p, float[2] u) => (bool q) {{ q = Identity(p) }}> }}""",
    "too many scans": f"{SCAN} {{ y, z = Scan(x, s) <num_scan_inputs = 7, {STEP}> }}",
    "negative scans": f"{SCAN} {{ y, z = Scan(x, s) <num_scan_inputs = -1, {STEP}> }}",
    "too many axes": f"""{SCAN} {{
        y, z = Scan(x, s) <num_scan_inputs = 1, scan_input_axes = [0, 1], {STEP}> }}""",
    "unknown direction": f'{LSTM} {{ y = LSTM<hidden_size = 2, direction = "up">(x, w, r) }}',
    "no group": """(float[1, 4, 5, 5] x, float[4, 1, 3, 3] w) => (float[a, b, c, d] y) {
        y = Conv<group = 0>(x, w) }""",
    "no such axis": f"{X} {{ y = Softmax<axis = -9223372036854775808>(x) }}",
    "a branch that gives a value twice": """(bool c, float[2] x) => (float[2] y, float[2] z) {
        y, z = If(c) <then_branch = t () => (float[2] a, float[2] a) { a = Relu(x) },
            else_branch = e () => (float[2] b, float[2] d) { b = Neg(x) d = Abs(x) }> }""",
    "a step that gives a value twice": f"""{SCAN} {{ y, z = Scan(x, s) <num_scan_inputs = 1,
        body = b (float[2] u, float[2] q) => (float[2] w, float[2] w) {{ w = Add(u, q) }}> }}""",
    "a step that gives its input back": f"""{SCAN} {{ y, z = Scan(x, s) <num_scan_inputs = 1,
        body = b (float[2] u, float[2] q) => (float[2] u, float[2] w) {{ w = Add(u, q) }}> }}""",
    "too many inputs": f"{LSTM} {{ y = com.microsoft.LSTM<hidden_size = 2>(x, w, r, w, x, x) }}",
    "keepdims": f"{X} {{ z = ReduceSum<keepdims = 2147483648>(x) y = Add(x, z) }}",
}
ENTRY_POINTS: dict[str, Callable[[onnx.ModelProto], object]] = {
    "explain": onnxtrain.explain,
    "vjp": lambda m: onnxtrain.vjp(m, ["x"]),
    "lower": lambda m: onnxtrain.lower(m, opset=13),
}


@pytest.mark.parametrize("what", UNFIT)
def test_invalid_node_is_named(what: str):
    model = onnx.parser.parse_model(HEAD + UNFIT[what])
    refused = 0
    for entry_point in ENTRY_POINTS.values():
        try:
            entry_point(model)
        except OnnxTrainError:
            refused += 1
    assert refused


def test_bugs_of_a_decomposition_are_not_reported_as_an_invalid_model(
    monkeypatch: pytest.MonkeyPatch,
):
    """Errors that a file cannot cause propagate unchanged."""

    def broken(op: object, x: object, bias: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setitem(EXPANSIONS, "com.microsoft::BiasGelu", [Expansion(broken, TRAINING)])
    text = "(float[2, 4] x, float[4] b) => (float[a, c] y) { y = com.microsoft.BiasGelu(x, b) }"
    with pytest.raises(KeyError, match="a defect"):
        onnxtrain.vjp(onnx.parser.parse_model(HEAD + text), ["x"])


def test_cause_is_preserved():
    model = onnx.parser.parse_model(HEAD + UNFIT["no group"])
    with pytest.raises(OnnxTrainError, match="violates the definition") as caught:
        onnxtrain.vjp(model, ["x"])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


OTHER_OPSET = """<ir_version: 10, opset_import: ["": 17, "own": 1]>
    g(float[2, 4] x) => (float[a, b] y) { y = own.F(x) }
    <domain: "own", opset_import: ["": 18]> F(x) => (y) { z = Relu(x) y = Neg(z) }"""
GRAPH_ATTRIBUTE = """<ir_version: 10, opset_import: ["": 17, "own": 1]>
    g(bool c, float[2, 4] x) => (float[a, b] y) {
        y = own.F(c, x) <part = t () => (float[1] q) { q = Constant<value = float[1] {3}>() }> }
    <domain: "own", opset_import: ["": 17]> F<part>(c, x) => (y) {
        z = If(c) <then_branch: graph = @part, else_branch: graph = @part>
        y = Add(z, x) }"""


def test_a_function_of_another_opset():
    model = onnx.parser.parse_model(OTHER_OPSET)
    lowered = onnxtrain.lower(model, opset=13)
    session = onnxruntime.InferenceSession(lowered.SerializeToString())
    x = np.arange(-4, 4, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], -np.maximum(x, 0))
    onnxtrain.vjp(model, ["x"])


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_a_function_with_a_graph_as_attribute(entry_point: str):
    ENTRY_POINTS[entry_point](onnx.parser.parse_model(GRAPH_ATTRIBUTE))
