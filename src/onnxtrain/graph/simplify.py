"""Removal of what a graph does not need, safe on training graphs.

Nothing here merges random operators, folds or merges parameters, or renames inputs and outputs.
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as passes

from onnxtrain.graph import shapes as S
from onnxtrain.graph.scopes import subgraphs_of

RANDOM = frozenset(
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
    """Drop dead nodes, identities and repeated subexpressions, in place; give the model back."""
    remove_dead(model)
    remove_identities(model)
    while cancel_pairs(model.graph) + share(model.graph):
        remove_dead(model)
    remove_dead(model)
    return model


def remove_dead(model: ir.Model) -> None:
    """Drop nodes and initializers that no output depends on."""
    passes.RemoveUnusedNodesPass()(model)


def remove_identities(model: ir.Model) -> None:
    """Drop Identity nodes, but keep each output of a graph a value of its own.

    A body that returns one value twice is legal, yet onnxruntime then mixes the two up.
    """
    for node in list(model.graph.all_nodes()):
        if node.op_type != "Identity" or node.domain not in ("", "ai.onnx"):
            continue
        x, y, graph = node.inputs[0], node.outputs[0], node.graph
        if x is None or graph is None or not isinstance(graph, ir.Graph):
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
        graph.remove(node, safe=True)


def share(graph: ir.Graph) -> int:
    """Compute equal expressions once; give the number of nodes that became unused."""
    seen: dict[tuple, ir.Node] = {}
    merged = 0
    outputs = set(graph.outputs)
    for node in list(graph):
        if node.op_type in RANDOM or any(True for _ in subgraphs_of(node)):
            continue
        key = _key(node)
        if key is None:
            continue
        first = seen.setdefault(key, node)
        if first is node:
            continue
        if any(y in outputs for y in node.outputs):
            continue
        for old, new in zip(node.outputs, first.outputs, strict=True):
            old.replace_all_uses_with(new)
        graph.remove(node, safe=True)
        merged += 1
    return merged


def _key(node: ir.Node) -> tuple | None:
    attributes = []
    for name in sorted(node.attributes):
        attribute = node.attributes[name]
        value = attribute.value
        if isinstance(value, ir.TensorProtocol):
            value = (value.dtype, tuple(value.shape), value.tobytes())
        elif not isinstance(value, int | float | str | tuple):
            return None
        attributes.append((name, attribute.type, value))
    return (node.domain, node.op_type, tuple(node.inputs), tuple(attributes), len(node.outputs))


def cancel_pairs(graph: ir.Graph) -> int:
    """Undo a transpose of a transpose and a reshape of a reshape; give the number of changes."""
    changes = 0
    for node in list(graph):
        x = node.inputs[0] if node.inputs else None
        before = None if x is None else x.producer()
        if before is None or before.graph is not graph or node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type == before.op_type == "Transpose":
            first, second = (list(n.attributes["perm"].as_ints()) for n in (before, node)) if (
                "perm" in before.attributes and "perm" in node.attributes
            ) else (None, None)
            if first is None or second is None:
                continue
            both = [first[i] for i in second]
            if both == list(range(len(both))) and not node.outputs[0].is_graph_output():
                node.outputs[0].replace_all_uses_with(before.inputs[0])
                graph.remove(node, safe=True)
            else:
                node.replace_input_with(0, before.inputs[0])
                node.attributes["perm"] = ir.AttrInt64s("perm", both)
            changes += 1
        elif node.op_type in _RESHAPES and before.op_type in _RESHAPES:
            source, y = before.inputs[0], node.outputs[0]
            if source is not None and S.same_shape(source, y) and not y.is_graph_output():
                y.replace_all_uses_with(source)
                graph.remove(node, safe=True)
                changes += 1
    return changes


_RESHAPES = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})
