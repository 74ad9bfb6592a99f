"""Nodes by operator, of the standard domain only."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from onnxtrain.graph.nodes import is_op, is_standard, nodes, op_key


def graph() -> ir.Graph:
    x = ir.val("x", ir.DataType.FLOAT, [2])
    inner = ir.Graph([], [], nodes=[ir.Node("", "Relu", [x], name="inner")], name="body")
    made = [
        ir.Node("", "Relu", [x], name="first"),
        ir.Node("acme", "Relu", [x], name="theirs"),
        ir.Node("", "If", [x], [ir.AttrGraph("then_branch", inner)], name="branch"),
        ir.Node("ai.onnx", "Neg", [x], name="last"),
    ]
    return ir.Graph([x], [], nodes=made, name="g")


def names(chosen: list[ir.Node]) -> list[str | None]:
    return [n.name for n in chosen]


def test_nodes_by_operator() -> None:
    assert names(nodes(graph(), "Relu")) == ["first"]
    assert names(nodes(graph(), "Neg", "Relu")) == ["first", "last"]
    assert names(nodes(graph(), "Relu", subgraphs=True)) == ["first", "inner"]
    assert names(nodes(graph())) == ["first", "branch", "last"]
    assert nodes(graph(), "Conv") == []


def test_graph_may_change_during_iteration() -> None:
    one = graph()
    for node in nodes(one, "Relu", "Neg"):
        one.remove(node)
    assert names(list(one)) == ["theirs", "branch"]


def test_domains() -> None:
    theirs = ir.Node("acme", "Relu", [])
    assert not is_standard(theirs)
    assert not is_op(theirs, "Relu")
    assert op_key(theirs) == "acme::Relu"
    proto = onnx.NodeProto(op_type="Relu", domain="ai.onnx")
    assert is_standard(proto)
    assert is_op(proto, "Neg", "Relu")
    assert op_key(proto) == "Relu"
    assert is_standard(onnx.OperatorSetIdProto(version=21))
