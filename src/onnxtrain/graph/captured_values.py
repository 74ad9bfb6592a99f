"""Subgraphs: what they capture from the graphs around them."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir


def subgraphs_of(node: ir.Node) -> Iterator[ir.Graph]:
    """Return the graphs in a node's attributes, in order."""
    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def captured(node: ir.Node) -> list[ir.Value]:
    """Return the values of enclosing graphs that a node's subgraphs read, in order of first use."""
    if not any(
        a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
        for a in node.attributes.values()
    ):
        return []
    values: dict[ir.Value, None] = {}
    for graph in subgraphs_of(node):
        for value in captured_by(graph):
            values.setdefault(value)
    return list(values)


def captured_by(graph: ir.Graph) -> list[ir.Value]:
    """Return the values of enclosing graphs that a graph reads, in order of first use."""
    own: set[ir.Value] = {*graph.inputs, *graph.initializers.values()}
    for node in graph:
        own.update(node.outputs)
    values: dict[ir.Value, None] = {}
    for node in graph:
        for x in (*node.inputs, *captured(node)):
            if x is not None and x not in own:
                values.setdefault(x)
    for x in graph.outputs:
        if x not in own:
            values.setdefault(x)
    return list(values)
