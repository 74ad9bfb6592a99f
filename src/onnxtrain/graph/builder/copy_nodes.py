"""Copies of nodes under fresh names."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.graph.builder.op_builder import OpBuilder


def copy_nodes(op: OpBuilder, graph: ir.Graph, mapping: dict[ir.Value, ir.Value]) -> list[ir.Value]:
    """Append copies of a graph's nodes; return the copies of its outputs.

    Args:
        op: where the copies go.
        graph: what is copied; its initializers are shared, not copied.
        mapping: from values of ``graph`` to values usable where the copies go; extended in place.
    """
    for node in graph:
        copy = ir.Node(
            node.domain,
            node.op_type,
            [None if x is None else mapping.get(x, x) for x in node.inputs],
            attributes=[_copy_attribute(op, a, mapping) for a in node.attributes.values()],
            overload=node.overload,
            num_outputs=len(node.outputs),
            version=node.version,
        )
        copy.meta.update(node.meta)
        copy.name = op.names.fresh(f"{op.prefix}{node.op_type}")
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name = op.names.fresh(f"{op.prefix}{old.name}") if old.name else ""
            new.type, new.shape = old.type, old.shape
            new.meta.update(old.meta)
            mapping[old] = new
        if op.position is None:
            op.graph.append(copy)
        else:
            op.graph.insert_before(op.position, copy)
    return [mapping.get(y, y) for y in graph.outputs]


def copy_node(op: OpBuilder, node: ir.Node, inputs: Sequence[ir.Value | None]) -> ir.Value:
    """Append a copy of a node of one output that reads other inputs; return its output."""
    attributes = list(node.attributes.values())
    copy = ir.Node(node.domain, node.op_type, inputs, attributes, version=node.version)
    copy.meta.update(node.meta)
    return op.append(copy)


def _copy_attribute(
    op: OpBuilder, attribute: ir.Attr, mapping: dict[ir.Value, ir.Value]
) -> ir.Attr:
    if attribute.type == ir.AttributeType.GRAPH:
        return ir.AttrGraph(attribute.name, _copy_graph(op, attribute.as_graph(), mapping))
    if attribute.type == ir.AttributeType.GRAPHS:
        graphs = [_copy_graph(op, g, mapping) for g in attribute.as_graphs()]
        return ir.AttrGraphs(attribute.name, graphs)
    return attribute


def _copy_graph(op: OpBuilder, graph: ir.Graph, mapping: dict[ir.Value, ir.Value]) -> ir.Graph:
    child = op.body(graph.inputs)
    inner = dict(mapping)
    inner.update(zip(graph.inputs, child.graph.inputs, strict=True))
    child.graph.outputs.extend(copy_nodes(child, graph, inner))
    return child.graph
