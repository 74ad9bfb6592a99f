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

What a model is lowered to: an opset, and what a runtime knows of it.

Bodies of control flow, written into the graph around them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import LoweringError, ShapeError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.call_by_signature import call_by_signature, describe_unhandled
from onnxtrain.graph.nodes import subgraphs_of
from onnxtrain.lowering.forms import NotConvertibleError, convert_node
from onnxtrain.lowering.profile import Profile, unsupported_reason

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


def apply_rule(rule: Rule, op: OpBuilder, node: ir.Node) -> list[ir.Value | None] | None:
    """Call a lowering on a node; return the replacements, ``None`` if it does not apply."""
    unknown = describe_unhandled(rule, node, "lowering")
    if unknown is not None:
        raise LoweringError(f"{S.describe(node)} {unknown}")
    replacements = call_by_signature(rule, op, node, context={"node": node})
    if replacements is None:
        return None
    return list(replacements) if isinstance(replacements, tuple | list) else [replacements]


_IR_VERSIONS = {7: 3, 8: 3, 9: 4, 10: 5, 11: 6, 12: 7, 13: 7, 14: 7, 15: 8, 16: 8, 17: 8, 18: 8}
_IR_VERSIONS |= {19: 9, 20: 9, 21: 10, 22: 10, 23: 11, 24: 12, 25: 12, 26: 13}
OLDEST, NEWEST = min(_IR_VERSIONS), max(_IR_VERSIONS)


@dataclass(frozen=True)
class LoweringTarget:
    """An opset, and a profile if there is one."""

    opset: int
    working: int
    """The opset that the model is in while it is lowered."""
    profile: Profile | None = None
    sizes: list[str] = field(default_factory=list)
    """Symbolic sizes of the inputs, for messages."""

    @property
    def title(self) -> str:
        """Return opset and runtime in words."""
        where = f"opset {self.opset}"
        return f"{self.profile.name} ({where})" if self.profile is not None else where

    @property
    def ir_version(self) -> int:
        """Return the IR version that came with the opset, within what the profile reads."""
        version = _IR_VERSIONS[self.opset]
        if self.profile is not None:
            low, high = self.profile.ir
            version = min(max(version, low), high)
        return version

    @property
    def initializers_as_inputs(self) -> bool:
        """Return whether every initializer has to be listed among the inputs."""
        asked = self.profile is not None and self.profile.initializers_as_inputs
        return asked or self.ir_version < 4

    def obstacle(self, node: ir.Node) -> str | None:
        """Say why the target cannot run a node, ``None`` if it can."""
        try:
            drafted = convert_node(node, min(self.opset, self.working), self.working)
        except NotConvertibleError as error:
            return str(error)
        return (
            None if self.profile is None else unsupported_reason(self.profile, drafted, self.opset)
        )


def inline(op: OpBuilder, body: ir.Graph, inputs: list[ir.Value]) -> list[ir.Value]:
    """Append the nodes of a body once; return its outputs."""
    values: dict[ir.Value, ir.Value] = dict(zip(body.inputs, inputs, strict=True))
    for x in body.initializers.values():
        assert x.const_value is not None
        values[x] = op.const(x.const_value.numpy(), x.const_value.dtype)
    for node in body:
        if any(True for _ in subgraphs_of(node)):
            raise ShapeError("a body with control flow inside is not written out")
        new = ir.Node(
            node.domain,
            node.op_type,
            [None if x is None else values.get(x, x) for x in node.inputs],
            list(node.attributes.values()),
            num_outputs=len(node.outputs),
            version=node.version,
        )
        emitted = op.append(new)
        outputs = emitted if isinstance(emitted, tuple) else (emitted,)
        values |= dict(zip(node.outputs, outputs, strict=True))
    return [values.get(y, y) for y in body.outputs]
