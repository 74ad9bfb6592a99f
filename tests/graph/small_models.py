"""Small valid models as text, and functions that build invalid ones."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser

_HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'

LINEAR = (
    _HEAD
    + """agraph (float[N, 3] x) => (float[N, 3] y)
<float[3] w = {1.0, 2.0, 3.0}>
{
    h = Mul(x, w)
    y = Relu(h)
}"""
)

BRANCHES = (
    _HEAD
    + """agraph (bool c, float[2] x) => (float[2] y)
{
    h = Neg(x)
    y = If (c) <
        then_branch = yes () => (float[2] a) <float[2] k = {1.0, 2.0}> { a = Add(h, k) },
        else_branch = no () => (float[2] b) { b = Identity(h) }
    >
}"""
)

LOOP = (
    _HEAD
    + """agraph (int64 n, bool go, float[2] x) => (float[2] y)
{
    h = Neg(x)
    y = Loop (n, go, x) <
        body = step (int64 i, bool g, float[2] s) => (bool g2, float[2] t)
        { g2 = Identity(g) t = Add(s, h) }
    >
}"""
)

FUNCTION = """<ir_version: 10, opset_import: ["" : 21, "local" : 1]>
agraph (float[2] x) => (float[2] y)
{
    y = local.twice(x)
}
<domain: "local", opset_import: ["" : 21]>
twice (a) => (b)
{
    two = Constant <value_float = 2.0> ()
    b = Mul(a, two)
}"""

ALL = {"linear": LINEAR, "branches": BRANCHES, "loop": LOOP, "function": FUNCTION}


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(text)


def with_raw_weight(values: np.ndarray, data_type: int = onnx.TensorProto.FLOAT) -> onnx.ModelProto:
    """Return LINEAR with an extra initializer 'v' in raw_data."""
    model = parse(LINEAR)
    tensor = model.graph.initializer.add()
    tensor.name, tensor.data_type = "v", data_type
    tensor.dims.extend(values.shape)
    tensor.raw_data = values.tobytes()
    return model


def make_external(tensor: onnx.TensorProto, **entries: object) -> None:
    """Make ``tensor`` refer to external data with these entries."""
    for field in ("raw_data", "float_data"):
        tensor.ClearField(field)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in entries.items():
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)


def external_model(**entries: object) -> onnx.ModelProto:
    """Return LINEAR whose weight (three floats) is in external data."""
    model = parse(LINEAR)
    make_external(model.graph.initializer[0], **entries)
    return model


def nested_ifs(depth: int) -> onnx.ModelProto:
    """Return a model with If nodes nested ``depth`` levels deep."""
    model = parse(_HEAD + "agraph (bool c, float[2] x) => (float[2] y0) { y0 = Identity(x) }")
    graph = model.graph
    for level in range(depth):
        del graph.node[:]
        node = graph.node.add(op_type="If", input=["c"], output=[f"y{level}"])
        other = node.attribute.add(name="else_branch", type=onnx.AttributeProto.GRAPH).g
        other.output.add().name = f"e{level}"
        other.node.add(op_type="Identity", input=["x"], output=[f"e{level}"])
        graph = node.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g
        graph.output.add().name = f"y{level + 1}"
        graph.node.add(op_type="Identity", input=["x"], output=[f"y{level + 1}"])
    return model
