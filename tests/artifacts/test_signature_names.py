"""Names of graph inputs and outputs are unique; colliding inner values are renamed."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.artifacts.graphs import GraphSignature
from onnxtrain.graph.builder import OpBuilder


def test_colliding_inner_values_are_renamed() -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="names")
    op = OpBuilder(graph)
    given = op.input("x", ir.DataType.FLOAT, [1])
    inside = op.Neg(given)
    inside.name = "y"
    op.names.taken.add("y")
    signature = GraphSignature("eval", ir.Model(graph, ir_version=10), op)
    first = [signature.input("lr", "lr", ir.DataType.FLOAT, [1]).name for _ in range(3)]
    assert first == ["lr", "lr.2", "lr.3"]
    assert signature.input("x", "input", ir.DataType.FLOAT, [1]).name == "x.2"
    out = signature.output("y", "output", inside)
    assert (out.name, inside.name) == ("y", "y.inner")
    assert signature.output("y", "output", inside).name == "y.2"
    later = op.input("late", ir.DataType.FLOAT, [1])
    assert later.name == "late"
    assert signature.output("late", "output", inside).name == "late.2"
