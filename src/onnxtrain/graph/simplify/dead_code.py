"""Remove dead nodes, identities and common subexpressions; safe on training graphs.

:func:`simplify` runs all of them, and the rewrites of :mod:`onnxtrain.graph.simplify.peephole`,
until nothing changes. None of them merges random operators, folds or merges parameters, or renames
inputs and outputs of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx
import onnx_ir as ir

from onnxtrain.graph.nodes import is_op, is_standard, nodes, stops_gradient, subgraphs_of
from onnxtrain.graph.shapes.values import schema_of
from onnxtrain.graph.simplify.peephole import rewrite

_OPTIONAL = onnx.defs.OpSchema.FormalParameterOption.Optional
RANDOM_OPS = frozenset(
    {
        "Bernoulli",
        "Dropout",
        "Multinomial",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    }
)


def simplify(model: ir.Model) -> ir.Model:
    """Remove what has no effect or is computed twice, in place; return the model."""
    remove_dead(model)
    remove_identities(model)
    graphs = [model.graph]
    for node in model.graph.all_nodes():
        graphs += subgraphs_of(node)
    while sum(rewrite(graph) + eliminate_common_subexpressions(graph) for graph in graphs):
        remove_dead(model)
    return model


def remove_dead(model: ir.Model) -> None:
    """Remove nodes, optional outputs and initializers that no output depends on.

    Releases of onnx-ir differ in which outputs of BatchNormalization their pass may remove: without
    ``training_mode`` it would normalize by other statistics. So this does not depend on the pass.
    """
    graph = model.graph
    _remove_dead(graph, graph.opset_imports.get(""))
    for function in model.functions.values():
        _remove_dead(function, function.opset_imports.get(""))
    read = {*graph.outputs, *graph.inputs}
    unused = [n for n, x in graph.initializers.items() if not x.uses() and x not in read]
    for name in unused:
        del graph.initializers[name]


def remove_dead_nodes(graph: ir.Graph) -> None:
    """Remove the nodes that no output depends on, those read only by the bodies of dead nodes too.

    Initializers stay, because a builder may reuse them.
    """
    _remove_dead(graph, None, live=False)


def _remove_dead(graph: ir.Graph | ir.Function, opset: int | None, *, live: bool = True) -> None:
    """Remove dead nodes; with ``live``, also what is unused within the other nodes."""
    # Not `is_graph_output`: it stays true after `del graph.outputs[...]`.
    outputs = frozenset(graph.outputs)
    dead = []
    for node in reversed(graph):
        if any(y.uses() or y in outputs for y in node.outputs):
            if live:
                _remove_unused_within(node, opset, outputs)
            continue
        dead.append(node)
        _detach(node)
        for body in subgraphs_of(node):
            for inner in body.all_nodes():
                _detach(inner)
    graph.remove(dead)


def _remove_unused_within(node: ir.Node, opset: int | None, outputs: Collection[ir.Value]) -> None:
    """Remove dead nodes of bodies, unused optional outputs, and trailing inputs without a value."""
    for body in subgraphs_of(node):
        _remove_dead(body, opset)
    present = [i for i, x in enumerate(node.inputs, 1) if x is not None]
    node.resize_inputs(present[-1] if present else 0)
    schema = None
    if opset is not None and is_standard(node):
        schema = schema_of(node.op_type, opset, node.domain)
    if schema is None or _trains(node, schema):
        return
    for y, formal in zip(node.outputs, schema.outputs, strict=False):
        if formal.option == _OPTIONAL and not (y.uses() or y in outputs):
            y.name = ""
    if any(formal.option == _OPTIONAL for formal in schema.outputs):
        present = [i for i, y in enumerate(node.outputs, 1) if y.name]
        node.resize_outputs(present[-1])


def _trains(node: ir.Node, schema: onnx.defs.OpSchema) -> bool:
    """Return whether a BatchNormalization may normalize by the statistics of the batch.

    Before opset 14 the number of outputs decides that, since then an attribute.
    """
    if node.op_type != "BatchNormalization":
        return False
    if "training_mode" not in schema.attributes:
        return True
    mode = node.attributes.get("training_mode")
    return mode is not None and (mode.is_ref() or mode.value != 0)


def _detach(node: ir.Node) -> None:
    for i in range(len(node.inputs)):
        node.replace_input_with(i, None)


def remove_identities(model: ir.Model) -> None:
    """Remove Identity nodes, except those that make the outputs of a graph distinct values.

    A body that returns one value twice is valid ONNX, but onnxruntime confuses the two outputs.
    """
    detached: dict[ir.Graph, list[ir.Node]] = {}
    for node in nodes(model.graph, "Identity", subgraphs=True):
        x, y, graph = node.inputs[0], node.outputs[0], node.graph
        if x is None or graph is None or not isinstance(graph, ir.Graph) or stops_gradient(node):
            continue
        if y.is_graph_output():
            source = x.producer()
            if source is None or source.graph is not graph or x.is_graph_output():
                continue
            name = y.name
            y.name = f"{name}.identity"
            x.name = name
            if x.shape is None:
                x.shape = y.shape
            y.replace_all_uses_with(x, replace_graph_outputs=True)
        else:
            y.replace_all_uses_with(x)
        _detach(node)
        detached.setdefault(graph, []).append(node)
    for graph, identities in detached.items():
        graph.remove(identities)


def eliminate_common_subexpressions(graph: ir.Graph) -> int:
    """Compute equal expressions once, in place; return the number of nodes that became unused."""
    seen: dict[tuple, ir.Node] = {}
    merged = 0
    for node in graph:
        if node.op_type in RANDOM_OPS or not is_standard(node):
            continue  # an operator of another domain may be random
        if not any(y.uses() for y in node.outputs):
            continue
        key = equality_key(node, node.inputs)
        if key is None:
            continue
        first = seen.setdefault(key, node)
        if first is node or any(y.is_graph_output() for y in node.outputs):
            continue
        if not _has_optional_outputs(node) and any(
            old.uses() and not new.name
            for old, new in zip(node.outputs, first.outputs, strict=True)
        ):
            continue
        for i, old in enumerate(node.outputs):
            if old.uses():
                old.replace_all_uses_with(_output(first, i, old))
        merged += 1
    return merged


def _has_optional_outputs(node: ir.Node) -> bool:
    """Return whether requesting more outputs of a node leaves its other outputs unchanged."""
    return is_op(node, "LayerNormalization")


def _output(node: ir.Node, index: int, like: ir.Value) -> ir.Value:
    """Return an output of a node; add it under the name of ``like`` if the node lacks it."""
    if len(node.outputs) <= index:
        node.resize_outputs(index + 1)
    y = node.outputs[index]
    if not y.name:
        y.name, like.name = like.name, ""
        y.type, y.shape = like.type, like.shape
    return y


def equality_key(node: ir.Node, inputs: Sequence[ir.Value | None]) -> tuple | None:
    """Return a key that is equal for nodes that compute the same; ``None`` if not comparable."""
    attributes = []
    for name in sorted(node.attributes):
        attribute = node.attributes[name]
        value = attribute.value
        if not isinstance(value, int | float | str | tuple):
            if attribute.type != ir.AttributeType.TENSOR:
                return None
            value = (value.dtype, tuple(value.shape), value.tobytes())
        attributes.append((name, attribute.type, value))
    outputs = 0 if _has_optional_outputs(node) else len(node.outputs)
    return (node.domain, node.op_type, tuple(inputs), tuple(attributes), outputs)
