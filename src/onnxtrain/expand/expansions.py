"""Operators rewritten into plainer ones before differentiation.

A decomposition is a function over the builder, registered by operator::

    @decomposition("com.microsoft::BiasGelu")
    def bias_gelu(op, x, bias):
        return op.Gelu(op.Add(x, bias))

It receives the node's inputs by position (``None`` where omitted), attributes by keyword if its
signature asks for them (give the default there: fused operators have no schema), ``node`` on
request, and returns the replacement of each output. Returning ``None`` leaves the node as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import OnnxTrainError, PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.call_by_signature import call_by_signature, describe_unhandled, signature_of
from onnxtrain.graph.nodes import op_key
from onnxtrain.graph.shapes.inference import infer_shapes

DECOMPOSITIONS: dict[str, Callable[..., Any]] = {}
_WITH_OPTIONAL_INPUTS = frozenset({"com.microsoft::EmbedLayerNormalization"})
"""Operators with inputs that may be left out and stand before others that may not."""


INTEGER_OPS: set[str] = set()
"""Decompositions of integer arithmetic into floats between quantisers, which are used on demand."""


def integer_decomposition(*ops: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decomposition of operators that compute with integers.

    It is used only if a model is to be trained straight through its quantisers: else the
    operators stay, and what they give is bit for bit what it was.
    """
    INTEGER_OPS.update(ops)
    return decomposition(*ops)


def decomposition(*ops: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a decomposition for operators keyed ``"Op"`` or ``"domain::Op"``."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            if op in DECOMPOSITIONS:
                raise ValueError(f"a decomposition of {op} is already registered")
            DECOMPOSITIONS[op] = function
        return function

    return register


def has_decomposition(key: str) -> bool:
    """Return whether an operator has a decomposition."""
    return key in DECOMPOSITIONS


def decompose(
    model: ir.Model,
    only: Callable[[str], bool],
    keep: Callable[[ir.Node], bool] = lambda node: False,
) -> list[str]:
    """Rewrite, in place, the nodes whose key ``only`` accepts; return a line for each kind.

    Nodes that ``keep`` names stay as they are.
    """
    done: dict[str, int] = {}
    if not any(_selected_nodes(n, only) and not keep(n) for n in model.graph.all_nodes()):
        return []
    builder = OpBuilder(model.graph, prefix="prepare/")

    def rewrite(node: ir.Node) -> bool:
        if not _selected_nodes(node, only) or keep(node):
            return False
        graph = node.graph
        assert isinstance(graph, ir.Graph)
        op = OpBuilder(graph, builder.prefix, before=node, parent=builder)
        outputs = _call(DECOMPOSITIONS[op_key(node)], op, node)
        if outputs is None:
            return False
        done[op_key(node)] = done.get(op_key(node), 0) + 1
        replacements = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
        _replace(graph, op, node, replacements)
        return True

    infer_shapes(model.graph, model.opset_imports[""], rewrite)
    return [f"{kind}: {n} node(s) rewritten into standard operators" for kind, n in done.items()]


def _selected_nodes(node: ir.Node, only: Callable[[str], bool]) -> bool:
    return op_key(node) in DECOMPOSITIONS and only(op_key(node))


def _call(function: Callable[..., Any], op: OpBuilder, node: ir.Node) -> Any:
    unknown = describe_unhandled(function, node, "decomposition")
    if unknown is not None:
        raise PrepareError(f"node {node.name!r}: {S.describe(node)} {unknown}")
    lacking = _missing_inputs(function, op, node)
    if lacking:
        raise PrepareError(
            f"node {node.name!r}: {S.describe(node)} lacks what its operator needs: {lacking}"
        )
    try:
        return call_by_signature(function, op, node, context={"node": node})
    except OnnxTrainError:
        raise
    except S.INVALID_NODE_ERRORS as error:
        raise PrepareError(S.invalid_node_message(node, error)) from error


def _missing_inputs(function: Callable[..., Any], op: OpBuilder, node: ir.Node) -> str:
    """Return the inputs and attributes that a node has not and its decomposition reads."""
    wanted = signature_of(function)
    attributes = wanted.needed - {"node"} - S.attributes_of(node, op.opset).keys()
    needed = node.inputs[: wanted.required - 1]
    gaps = (
        []
        if op_key(node) in _WITH_OPTIONAL_INPUTS
        else [i for i, x in enumerate(needed) if x is None]
    )
    return ", ".join([*(f"input {i}" for i in gaps), *sorted(attributes)])


def _replace(graph: ir.Graph, op: OpBuilder, node: ir.Node, values: list[ir.Value | None]) -> None:
    for i, old in enumerate(node.outputs):
        new = values[i] if i < len(values) else None
        if not old.name or not (old.uses() or old.is_graph_output()):
            continue
        if new is None:
            raise PrepareError(
                f"node {node.name!r}: {S.describe(node)}: output {i} ({old.name}) cannot be "
                "expressed in standard operators\nhint: remove its consumers from the model"
            )
        if old.is_graph_output():
            new = op.Identity(new)
            name, old.name = old.name, op.names.fresh(f"{old.name}.replaced")
            new.name = name
        new.type = new.type or old.type
        if new.shape is None:
            new.shape = old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
