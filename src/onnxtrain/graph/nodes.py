"""Queries on nodes: standard operators, subgraphs and their captures, NaN guards.

The standard domain has two names, ``""`` and ``"ai.onnx"``. Compare domains with
:func:`is_standard` or :func:`is_op`, never with a string.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import onnx_ir as ir

STOP_GRADIENT = "stop_gradient"
"""An Identity with this in its name blocks gradients, like torch's ``detach``."""


class _HasDomain(Protocol):
    @property
    def domain(self) -> str: ...


class _HasOperator(_HasDomain, Protocol):
    @property
    def op_type(self) -> str: ...


def is_standard(node: _HasDomain) -> bool:
    """Return whether a node or an opset import belongs to the standard domain."""
    return node.domain in ("", "ai.onnx")


def is_op(node: _HasOperator, *op_types: str) -> bool:
    """Return whether a node is one of the given standard operators."""
    return node.op_type in op_types and is_standard(node)


def op_key(node: _HasOperator) -> str:
    """Return the key of a node's operator in tables: ``"Relu"`` or ``"com.acme::Swirl"``."""
    return node.op_type if is_standard(node) else f"{node.domain}::{node.op_type}"


def stops_gradient(node: ir.Node) -> bool:
    """Return whether a node is an Identity whose name marks it as blocking gradients."""
    return STOP_GRADIENT in (node.name or "") and is_op(node, "Identity")


def nodes(graph: ir.Graph, *op_types: str, subgraphs: bool = False) -> list[ir.Node]:
    """Return the nodes of the given standard operators in graph order; all standard nodes if none.

    The result is a list, so callers may edit the graph while they iterate over it.
    ``subgraphs=True`` includes the nodes of If, Loop and Scan bodies.
    """
    candidates = graph.all_nodes() if subgraphs else graph
    wanted = frozenset(op_types)
    return [n for n in candidates if is_standard(n) and (not wanted or n.op_type in wanted)]


def subgraphs_of(node: ir.Node) -> Iterator[ir.Graph]:
    """Yield the graphs in a node's attributes, in order."""
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


@dataclasses.dataclass(frozen=True)
class NanGuard:
    """The two nodes of ``Where(IsNaN(p), 0, p)``, which replaces NaN by zero.

    Exporters append it to attention's softmax: a fully masked row is 0/0.
    """

    test: ir.Node
    """The IsNaN."""
    guard: ir.Node
    """The Where."""


def nan_guard(p: ir.Value) -> NanGuard | None:
    """Return the NaN guard of ``p`` if nothing else reads ``p``, else ``None``."""
    uses = list(p.uses())
    tests = [use.node for use in uses if is_op(use.node, "IsNaN")]
    guards = [use.node for use in uses if is_op(use.node, "Where") and use.idx == 2]
    if p.is_graph_output() or len(uses) != 2 or len(tests) != 1 or len(guards) != 1:
        return None
    (test,), (guard,) = tests, guards
    zero = None if guard.inputs[1] is None else ir.convenience.get_const_tensor(guard.inputs[1])
    if guard.inputs[0] is not test.outputs[0] or zero is None or np.any(zero.numpy()):
        return None
    return NanGuard(test, guard) if zero.size == 1 else None


def may_be_guarded(p: ir.Value) -> bool:
    """Return whether a node may replace NaN elements of a value, directly or behind a Cast.

    Wider than :func:`nan_guard`, because gradient rules must be safe for every such pattern: a
    Where with any mask, any constant and other readers of the value.
    """
    readers = [use.node for use in p.uses()]
    return any(
        n.op_type in ("Where", "IsNaN") or (n.op_type == "Cast" and may_be_guarded(n.outputs[0]))
        for n in readers
    )
