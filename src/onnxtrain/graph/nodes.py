"""Nodes of the standard domain, which two names stand for: ``""`` and ``"ai.onnx"``."""

from __future__ import annotations

from typing import Protocol

import onnx_ir as ir

STOP = "stop_gradient"
"""In the name of an Identity: no gradient passes it, as with ``detach`` of torch."""


class _HasDomain(Protocol):
    @property
    def domain(self) -> str: ...


class _HasOperator(_HasDomain, Protocol):
    @property
    def op_type(self) -> str: ...


def is_standard(node: _HasDomain) -> bool:
    """Return whether a node, or the import of an opset, is of the standard domain."""
    return node.domain in ("", "ai.onnx")


def is_op(node: _HasOperator, *op_types: str) -> bool:
    """Return whether a node is one of some standard operators."""
    return node.op_type in op_types and is_standard(node)


def key_of(node: _HasOperator) -> str:
    """Return the name of a node's operator in tables: ``"Relu"`` or ``"com.acme::Swirl"``."""
    return node.op_type if is_standard(node) else f"{node.domain}::{node.op_type}"


def stops_gradient(node: ir.Node) -> bool:
    """Return whether a node is an Identity that no gradient passes, by its name."""
    return STOP in (node.name or "") and is_op(node, "Identity")


def nodes(graph: ir.Graph, *op_types: str, subgraphs: bool = False) -> list[ir.Node]:
    """Return the nodes of some standard operators, in order; of all, if none is named.

    It is a list, so the graph may be changed meanwhile. With ``subgraphs``, the nodes of bodies are
    among them.
    """
    every, wanted = graph.all_nodes() if subgraphs else graph, frozenset(op_types)
    return [n for n in every if is_standard(n) and (not wanted or n.op_type in wanted)]
