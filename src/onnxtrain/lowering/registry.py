"""The table of lowerings.

A lowering is a function over the builder, registered by operator::

    @lower("Softplus")
    def softplus(op, x):
        return op.Add(op.Log(op.Add(op.Exp(op.Neg(op.Abs(x))), 1.0)), op.Relu(x))

It receives the node's inputs by position (``None`` where omitted), attributes by keyword if its
signature asks for them, with the schema's default filled in, and ``node`` on request. It returns
the replacement of each output, or ``None`` if it does not apply to this node. It writes operators
of the working opset; what the target lacks of those is lowered in turn. Several lowerings of one
operator are tried in the order of their registration, so the cheapest comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import LoweringError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.call_by_signature import call_by_signature, unknown_parts

Rule = Callable[..., Any]
RULES: dict[str, list[Rule]] = {}


def lower(*op_types: str) -> Callable[[Rule], Rule]:
    """Register a lowering of some operators."""

    def register(rule: Rule) -> Rule:
        for op_type in op_types:
            RULES.setdefault(op_type, []).append(rule)
        return rule

    return register


def rules_for(op_type: str) -> list[Rule]:
    """Return the lowerings of an operator, cheapest first."""
    return RULES.get(op_type, [])


def apply(rule: Rule, op: OpBuilder, node: ir.Node) -> list[ir.Value | None] | None:
    """Call a lowering on a node; return the replacements, ``None`` if it does not apply."""
    unknown = unknown_parts(rule, node, "lowering")
    if unknown is not None:
        raise LoweringError(f"{S.describe(node)} {unknown}")
    replacements = call_by_signature(rule, op, node, context={"node": node})
    if replacements is None:
        return None
    return list(replacements) if isinstance(replacements, tuple | list) else [replacements]
