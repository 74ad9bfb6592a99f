"""Conditions known in advance: If nodes replaced by the branch that is taken."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import nodes
from onnxtrain.graph.prepare.constants import fold
from onnxtrain.graph.shapes.infer import infer_shapes


def resolve_branches(model: ir.Model, parameters: set[str]) -> list[str]:
    """Replace If nodes whose condition is a constant by their branch, in place; say how many.

    Args:
        model: at the working opset, constants lifted, shapes inferred.
        parameters: initializers that do not count as known.
    """
    graph, count = model.graph, 0
    while nodes(graph, "If"):
        fold(model, set(graph.initializers) - parameters)
        taken = [n for n in nodes(graph, "If") if _is_known(n, parameters)]
        if not taken:
            break
        names = {v.name for n in graph.all_nodes() for v in n.outputs}
        names |= {x.name for x in graph.inputs} | set(graph.initializers)
        for node in taken:
            _take(graph, node, names)
        infer_shapes(graph, model.opset_imports[""])
        count += len(taken)
    return [f"{count} If node(s) with a constant condition resolved"] if count else []


def _is_known(node: ir.Node, parameters: set[str]) -> bool:
    condition = node.inputs[0]
    known = condition is not None and condition.name not in parameters
    return known and S.constant_of(condition) is not None


def _take(graph: ir.Graph, node: ir.Node, names: set[str | None]) -> None:
    """Put the nodes of the branch that is taken in the place of an If node."""
    condition = S.constant_of(node.inputs[0])
    assert condition is not None
    branch = node.attributes["then_branch" if condition.all() else "else_branch"].as_graph()
    results, body = list(branch.outputs), list(branch)
    branch.outputs.clear()
    branch.remove(body)
    for inner in body:
        for value in inner.outputs:
            # Two branches may use one name, so the If lends its own.
            value.name = _free_name(value.name or "value", names, node.outputs[0].name or "")
    graph.insert_before(node, body)
    for old, new in zip(list(node.outputs), results, strict=True):
        if old.is_graph_output():
            # What a branch gives may be an input or a constant: an output needs a node of its own.
            named = ir.Value(name=old.name, type=old.type, shape=old.shape)
            old.name = _free_name(f"{old.name}.taken", names, "")
            graph.insert_before(node, ir.Node("", "Identity", [new], outputs=[named]))
            for at, output in enumerate(graph.outputs):
                if output is old:
                    graph.outputs[at] = named
        old.replace_all_uses_with(new)
    graph.remove(node, safe=True)


def _free_name(name: str, names: set[str | None], owner: str) -> str:
    base = f"{owner}/{name}" if owner else name
    candidate, n = base, 2
    while candidate in names:
        candidate, n = f"{base}.{n}", n + 1
    names.add(candidate)
    return candidate
