"""Values whose size no input has: random masks, ranges, splits."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxtrain.planning.step_memory import ExecutedGraph, computed_sizes
from tests.small_nets import HEAD

DRAWN = """g (float[N,24] x, float[1,1024] table) => (bool[M] y)
<int64[1] more = {1023}, int64[1] group = {1024}, int64[0] none = {}, int64 zero = {0},
 int64 one = {1}, int64[1] first = {0}, int64[1] last = {1}, int64[1] flat = {-1}>
{
    count = Size(x)
    row = Unsqueeze(count, first)
    filled = Add(row, more)
    groups = Div(filled, group)
    limit = Reshape(groups, none)
    places = Range(zero, limit, one)
    floats = Cast<to = 1>(places)
    column = Unsqueeze(floats, last)
    wide = MatMul(column, table)
    bits = Less(wide, wide)
    all = Reshape(bits, flat)
    y = Slice(all, first, row)
}"""


def shaped(text: str, shapes: dict[str, list[int | str]]) -> onnx.ModelProto:
    model = ir.from_proto(onnx.parser.parse_model(HEAD + text))
    for node in model.graph:
        for y in node.outputs:
            if y.name in shapes:
                y.shape = ir.Shape(shapes[y.name])
    floats, flags = ("wide", "floats", "column", "h"), ("bits", "all", "y")
    types = dict.fromkeys(floats, ir.DataType.FLOAT) | dict.fromkeys(flags, ir.DataType.BOOL)
    for node in model.graph:
        for y in node.outputs:
            if y.type is None:
                y.type = ir.TensorType(types.get(y.name or "", ir.DataType.INT64))
    return ir.to_proto(model)


@pytest.mark.parametrize("rows", [1, 100, 5000])
def test_a_range_and_a_slice_are_as_long_as_sizes_say(rows: int) -> None:
    shapes = {
        "count": [],
        "row": [1],
        "filled": [1],
        "groups": [1],
        "limit": [],
        "places": ["R"],
        "floats": ["R"],
        "column": ["R", 1],
        "wide": ["R", 1024],
        "bits": ["R", 1024],
        "all": ["A"],
        "y": ["M"],
    }
    model = ir.from_proto(shaped(DRAWN, shapes))  # type: ignore[arg-type]
    nodes = list(model.graph)
    known = {y.name or "": y for n in nodes for y in n.outputs}
    sizes = computed_sizes(nodes, known, {"N": rows})
    groups = -(-24 * rows // 1024)
    assert sizes["R"] == groups
    memory = ExecutedGraph(ir.to_proto(model), ir.to_proto(model), ["y"]).memory({"N": rows})
    assert memory.live >= groups * 1024 * 4  # what is drawn, as floats
    assert memory.live <= groups * 1024 * 5 + 8192


SPLIT = """g (float[N,6] x) => (float[N,1] y)
<int64[6] lengths = {1, 1, 1, 1, 1, 1}>
{
    h = Tanh(x)
    a, b, c, d, e, f = Split<axis = 1>(h, lengths)
    y = Add(a, f)
}"""
WRITTEN = """g (float[N,6] x) => (float[N,1] y)
{
    h = Tanh(x)
    y = Identity(h)
}"""


def test_parts_that_the_runtime_has_split_are_parts() -> None:
    written = shaped(WRITTEN, {"h": ["N", 6]})
    executed = onnx.parser.parse_model(HEAD + SPLIT)
    memory = ExecutedGraph(executed, written, ["y"]).memory({"N": 1000})
    assert memory.live == pytest.approx(2 * 1000 * 6 * 4, rel=0.01)  # h, and all of its parts
    assert np.isclose(memory.live % 4, 0)
