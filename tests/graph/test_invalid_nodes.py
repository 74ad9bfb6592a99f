"""Nodes that violate the definition of their operator raise an error that names them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.autodiff.rule_registry import RULES
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


@pytest.mark.parametrize("name", ["FusedMatMul", "TransposeMatMul", "FusedGemm"])
def test_a_fused_matmul_without_its_second_operand(name: str):
    weight = "<float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}>"
    nodes = f"{{ h = com.microsoft.{name}(w) y = MatMul(x, h) }}"
    text = f"(float[n, 4] x) => (float[n, 3] y) {weight} {nodes}"
    model = onnx.parser.parse_model(HEAD + text)
    for entry_point in (onnxtrain.parameters, *ENTRY_POINTS.values()):
        with pytest.raises(OnnxTrainError, match=f"'h': com.microsoft::{name}"):
            entry_point(model)


def test_a_declared_batch_of_2_to_the_32():
    text = """(float[4294967296, 4] x, int64[4294967296, 1] i) => (float[4294967296] y) {
        y = GatherND<batch_dims = 1>(x, i) }"""
    model = onnx.parser.parse_model(HEAD + text)
    gradient = onnxtrain.vjp(model, ["x"])
    assert gradient.ByteSize() < 10_000
    assert "Range" in {node.op_type for node in gradient.graph.node}


def test_sizes_beyond_memory_name_the_node():
    """Rules and lowerings make tables of declared sizes."""

    def refuse(op: object, dy: object, x: object) -> None:
        raise MemoryError("Unable to allocate 32.0 GiB")

    model = onnx.parser.parse_model(f"{HEAD} {X} {{ y = Tanh(x) }}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, "Tanh", dataclasses.replace(RULES["Tanh"], function=refuse))
        with pytest.raises(OnnxTrainError, match=r"'y': Tanh.* sizes that do not fit into memory"):
            onnxtrain.vjp(model, ["x"])


RESIZE = "(float[1, 1, 3, 3] x) => (float[a, b, c, d] y) <float[4] s = {1, 1, 2, 2}>"


@pytest.mark.parametrize(
    "attributes",
    [
        'mode = "bogus"',
        'mode = "linear", coordinate_transformation_mode = "bogus"',
        'nearest_mode = "bogus", coordinate_transformation_mode = "align_corners"',
        'mode = "nearest", antialias = 5, coordinate_transformation_mode = "align_corners"',
    ],
)
def test_a_resize_that_cannot_be_lowered(attributes: str):
    head = HEAD.replace("17", "19")
    model = onnx.parser.parse_model(f'{head} {RESIZE} {{ y = Resize<{attributes}>(x, "", s) }}')
    with pytest.raises(OnnxTrainError, match="'y'"):
        onnxtrain.lower(model, opset=9)


def test_a_crop_without_its_region():
    crop = 'mode = "linear", coordinate_transformation_mode = "tf_crop_and_resize"'
    model = onnx.parser.parse_model(f'{HEAD} {RESIZE} {{ y = Resize<{crop}>(x, "", s) }}')
    with pytest.raises(OnnxTrainError, match=r"'y'.*\n.*requires the input roi"):
        onnxtrain.vjp(model, ["x"])
