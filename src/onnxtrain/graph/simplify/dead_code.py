"""Removal of what a graph does not need, safe on training graphs.

Nothing here merges random operators, folds or merges parameters, or renames inputs and outputs.

The order of nodes in a file, so that onnxruntime runs them in an order that needs little memory.

A reverse sweep emits nodes in a good order: the gradient of a layer's weight directly behind that
of its input, and what is computed again from the forward pass only where it is needed. onnxruntime
does not keep it. It walks from the nodes that nothing reads up to what they read, of several always
to the one that is last in the file first, and runs a node when all that it reads is done. From a
file in the order of the sweep it computes again too early, and weights' gradients last.

So independent nodes are the other way round in the file: of those that could come next, the one
that is to run last, and behind all others the nodes that nothing reads. The walk then meets them in
the order of the sweep.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import onnx_ir.passes.common as passes

from onnxtrain.graph.nodes import is_op, is_standard, nodes, stops_gradient, subgraphs_of
from onnxtrain.graph.simplify.peephole import rewrite

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
    """Drop what has no effect or is computed twice, in place; return the model."""
    remove_dead(model)
    remove_identities(model)
    graphs = [model.graph]
    for node in model.graph.all_nodes():
        graphs += subgraphs_of(node)
    while sum(rewrite(graph) + eliminate_common_subexpressions(graph) for graph in graphs):
        remove_dead(model)
    return model


def remove_dead(model: ir.Model) -> None:
    """Drop nodes, optional outputs and initializers that no output depends on."""
    remove_dead_nodes(model.graph)
    passes.RemoveUnusedNodesPass()(model)


def remove_dead_nodes(graph: ir.Graph) -> None:
    """Drop dead nodes all at once; what only the body of a dead node reads is dead, too.

    Initializers stay: a builder may hand them out again.
    """
    dead = []
    for node in reversed(graph):
        if any(y.uses() or y.is_graph_output() for y in node.outputs):
            continue
        dead.append(node)
        _detach(node)
        for body in subgraphs_of(node):
            for inner in body.all_nodes():
                _detach(inner)
    graph.remove(dead)


def _detach(node: ir.Node) -> None:
    for i in range(len(node.inputs)):
        node.replace_input_with(i, None)


def remove_identities(model: ir.Model) -> None:
    """Drop Identity nodes, but keep each output of a graph a value of its own.

    A body that returns one value twice is legal, yet onnxruntime then mixes the two up.
    """
    done: dict[ir.Graph, list[ir.Node]] = {}
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
        done.setdefault(graph, []).append(node)
    for graph, identities in done.items():
        graph.remove(identities)


def eliminate_common_subexpressions(graph: ir.Graph) -> int:
    """Compute equal expressions once; return the number of nodes that became unused."""
    seen: dict[tuple, ir.Node] = {}
    merged = 0
    for node in graph:
        if node.op_type in RANDOM_OPS or not is_standard(node):
            continue  # what another domain computes may be random
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
    """Return whether a node may be asked for more outputs, and gives the same in the others."""
    return is_op(node, "LayerNormalization")


def _output(node: ir.Node, index: int, like: ir.Value) -> ir.Value:
    """Return an output of a node, which takes the other's name if it was not asked for so far."""
    if len(node.outputs) <= index:
        node.resize_outputs(index + 1)
    y = node.outputs[index]
    if not y.name:
        y.name, like.name = like.name, ""
        y.type, y.shape = like.type, like.shape
    return y


def equality_key(node: ir.Node, inputs: Sequence[ir.Value | None]) -> tuple | None:
    """Return what two nodes share that compute the same of ``inputs``; ``None`` if none can."""
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
