"""Branches known in advance: If nodes replaced by the branch that is taken.

A condition may be a constant, or follow from sizes; or only one branch may give the rank that a
reader demands, so that a run which takes the other fails.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.captured_values import subgraphs_of
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.prepare.constants import fold
from onnxtrain.graph.shapes.infer import infer_shapes
from onnxtrain.graph.shapes.required_rank import required_rank

_MOVES = ("Constant", "Identity", "Squeeze", "Unsqueeze")


def resolve_branches(
    model: ir.Model, parameters: set[str], *, by_readers: bool = True
) -> list[str]:
    """Replace If nodes whose branch is known by that branch, in place; say how many.

    Args:
        model: at the working opset, constants lifted, shapes inferred.
        parameters: initializers that do not count as known.
        by_readers: whether the rank that readers demand decides too.
    """
    graph = model.graph
    counts = {"with a constant condition": 0, "of which one branch has the rank that is read": 0}
    by_condition, by_rank = counts
    declared = {y: len(y.shape) for y in graph.outputs if y.shape is not None}
    while nodes(graph, "If", subgraphs=True):
        fold(model, set(graph.initializers) - parameters, subgraphs=True)
        taken = {n: b for n in _ifs(graph) if (b := _by_condition(n, parameters)) is not None}
        kind = by_condition
        if not taken and by_readers:
            # One at a time: it may decide on the others.
            ranked = ((n, b) for n in _ifs(graph) if (b := _by_rank(n, declared)) is not None)
            taken, kind = dict([first] if (first := next(ranked, None)) else []), by_rank
        if not taken:
            break
        names = {v.name for n in graph.all_nodes() for v in n.outputs}
        names |= {x.name for x in graph.inputs} | set(graph.initializers)
        for node, branch in taken.items():
            _take(node, branch, names)
        infer_shapes(graph, model.opset_imports[""])
        counts[kind] += len(taken)
    return [f"{count} If node(s) {kind} resolved" for kind, count in counts.items() if count]


def _ifs(graph: ir.Graph) -> Iterator[ir.Node]:
    """Return the outermost If nodes of a graph, then those in bodies."""
    inner = [body for node in graph for body in subgraphs_of(node)]
    yield from nodes(graph, "If")
    for body in inner:
        yield from _ifs(body)


def _by_condition(node: ir.Node, parameters: set[str]) -> str | None:
    """Return which branch a known condition takes."""
    condition = node.inputs[0]
    if condition is None or condition.name in parameters:
        return None
    known = S.constant_of(condition)
    return None if known is None else "then_branch" if known.all() else "else_branch"


def _by_rank(node: ir.Node, declared: dict[ir.Value, int]) -> str | None:
    """Return the only branch that gives what the readers of a node can take."""
    fitting = {"then_branch", "else_branch"}
    for i, out in enumerate(node.outputs):
        ranks = {}
        for name in ("then_branch", "else_branch"):
            shape = node.attributes[name].as_graph().outputs[i].shape
            ranks[name] = None if shape is None else len(shape)
        if None in ranks.values() or len(set(ranks.values())) < 2:
            continue
        # A runtime only warns of a declared rank: a branch that computes must not go by it.
        wanted = required_rank(out, declared if _only_moves(node) else {})
        if wanted in ranks.values():
            fitting &= {name for name, rank in ranks.items() if rank == wanted}
    return next(iter(fitting)) if len(fitting) == 1 else None


def _only_moves(node: ir.Node) -> bool:
    """Return whether branches give one value with more or fewer axes of size 1, if any."""
    bodies = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    return all(is_op(inner, *_MOVES) for body in bodies for inner in body)


def _take(node: ir.Node, name: str, names: set[str | None]) -> None:
    """Put the nodes of the branch that is taken in the place of an If node."""
    graph = node.graph
    if not isinstance(graph, ir.Graph):
        return  # it went with another node
    branch = node.attributes[name].as_graph()
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
