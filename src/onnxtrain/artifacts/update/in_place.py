"""Which new values a graph may write over old ones while it runs."""

from __future__ import annotations

import dataclasses

import onnx
import onnx_ir as ir

from onnxtrain.graph.captured_values import subgraphs_of
from onnxtrain.manifest import ModelSpec
from onnxtrain.targets import find

_ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Identity", "Max", "Min", "Where"})
_ROLES = ("optimizer", "update")


def with_in_place(spec: ModelSpec, model: onnx.ModelProto) -> ModelSpec:
    """Return the entry of a model that updates parameters, with what it may overwrite."""
    if spec.role not in _ROLES or find(spec.target).lacks("output-binding"):
        return spec
    return dataclasses.replace(spec, in_place=overwritable(ir.from_proto(model).graph, spec))


def overwritable(graph: ir.Graph, spec: ModelSpec) -> tuple[str, ...]:
    """Return the inputs that the outputs which replace them may overwrite.

    That is so if every node that reads the old value has run before the node that writes the new
    one, in any order the runtime may choose: it is that node or one of its ancestors.
    """
    if any(True for node in graph for _ in subgraphs_of(node)):
        return ()  # a subgraph reads what its node does not list
    inputs = {x.name: x for x in graph.inputs}
    outputs = {y.name: y for y in graph.outputs}
    return tuple(
        t.feeds
        for t in spec.outputs
        if t.feeds is not None and _may_overwrite(outputs[t.name], inputs[t.feeds])
    )


def _may_overwrite(new: ir.Value, old: ir.Value) -> bool:
    writer = new.producer()
    if writer is None:
        return False
    # The writer itself must be elementwise, or it could overwrite what it still has to read.
    if old in writer.inputs and writer.op_type not in _ELEMENTWISE:
        return False
    return all(_reaches(node, writer) for node, _ in old.uses())


def _reaches(node: ir.Node, last: ir.Node) -> bool:
    """Return whether a node is another one or an ancestor of it.

    Forwards, since a parameter's old value reaches little, while a norm makes all ancestors of all.
    """
    reached, pending = {node}, [node]
    while pending:
        current = pending.pop()
        if current is last:
            return True
        readers = {use.node for y in current.outputs for use in y.uses()} - reached
        reached |= readers
        pending += readers
    return False
