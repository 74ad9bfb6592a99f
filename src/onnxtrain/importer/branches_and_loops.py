"""Resolve control flow and Squeeze nodes that leave ranks or shapes unknown.

``inline_known_branches`` replaces an If by one branch. The condition is a constant or follows from
static sizes, or only one branch has the rank that a consumer requires (the other would fail).

``restore_loop_state_shapes`` covers Loop states that keep their shape although shape inference lost
the name of one dimension. A Reshape to the shape of the initial state restores it. All other
dimensions are known to be equal, so the Reshape fails only if the state really changes shape.

``add_squeeze_axes`` makes the axes explicit where dimensions are symbolic: Squeeze without axes
removes every dimension of size 1. ``drop_empty_squeeze_axes`` treats an empty list of axes like a
missing one, as onnxruntime does. The standard leaves this case open, and shape inference of onnx
reads it as "no axis".
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_op, nodes, subgraphs_of
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.graph.shapes.inference import infer_shapes
from onnxtrain.graph.shapes.unknown import required_rank
from onnxtrain.importer.constants import fold_constants

_RANK_CHANGING_OPS = ("Constant", "Identity", "Squeeze", "Unsqueeze")


def inline_known_branches(
    model: ir.Model, parameters: set[str], *, infer_from_consumers: bool = True
) -> list[str]:
    """Replace If nodes by a known branch, in place; return lines for the report.

    Args:
        model: at the working opset, constants lifted, shapes inferred.
        parameters: initializers that may change, so they do not decide a condition.
        infer_from_consumers: whether the rank that consumers require may decide, too.
    """
    graph = model.graph
    counts = {"with a constant condition": 0, "of which one branch has the rank that is read": 0}
    by_condition, by_rank = counts
    declared = {y: len(y.shape) for y in graph.outputs if y.shape is not None}
    while nodes(graph, "If", subgraphs=True):
        fold_constants(model, set(graph.initializers) - parameters, subgraphs=True)
        taken = {
            n: b for n in _if_nodes(graph) if (b := _branch_by_condition(n, parameters)) is not None
        }
        kind = by_condition
        if not taken and infer_from_consumers:
            # One at a time: resolving one may decide the condition of others.
            ranked = (
                (n, b) for n in _if_nodes(graph) if (b := _branch_by_rank(n, declared)) is not None
            )
            taken, kind = dict([first] if (first := next(ranked, None)) else []), by_rank
        if not taken:
            break
        names = {v.name for n in graph.all_nodes() for v in n.outputs}
        names |= {x.name for x in graph.inputs} | set(graph.initializers)
        for node, branch in taken.items():
            _inline_branch(node, branch, names)
        infer_shapes(graph, model.opset_imports[""])
        counts[kind] += len(taken)
    return [f"{count} If node(s) {kind} resolved" for kind, count in counts.items() if count]


def _if_nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the outermost If nodes of a graph, then those in bodies."""
    inner = [body for node in graph for body in subgraphs_of(node)]
    yield from nodes(graph, "If")
    for body in inner:
        yield from _if_nodes(body)


def _branch_by_condition(node: ir.Node, parameters: set[str]) -> str | None:
    """Return the branch that a known condition selects."""
    condition = node.inputs[0]
    if condition is None or condition.name in parameters:
        return None
    known = S.constant_of(condition)
    return None if known is None else "then_branch" if known.all() else "else_branch"


def _branch_by_rank(node: ir.Node, declared: dict[ir.Value, int]) -> str | None:
    """Return the only branch whose output has the rank that consumers require."""
    fitting = {"then_branch", "else_branch"}
    for i, out in enumerate(node.outputs):
        ranks = {}
        for name in ("then_branch", "else_branch"):
            shape = node.attributes[name].as_graph().outputs[i].shape
            ranks[name] = None if shape is None else len(shape)
        if None in ranks.values() or len(set(ranks.values())) < 2:
            continue
        # Runtimes only warn about a wrong declared rank, so it must not decide for a branch that
        # computes.
        wanted = required_rank(out, declared if _only_changes_rank(node) else {})
        if wanted in ranks.values():
            fitting &= {name for name, rank in ranks.items() if rank == wanted}
    return next(iter(fitting)) if len(fitting) == 1 else None


def _only_changes_rank(node: ir.Node) -> bool:
    """Return whether the branches return the same value up to axes of size 1."""
    bodies = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    return all(is_op(inner, *_RANK_CHANGING_OPS) for body in bodies for inner in body)


def _inline_branch(node: ir.Node, name: str, names: set[str | None]) -> None:
    """Replace an If node by the nodes of a branch."""
    graph = node.graph
    if not isinstance(graph, ir.Graph):
        return  # removed together with an outer If
    branch = node.attributes[name].as_graph()
    results, body = list(branch.outputs), list(branch)
    branch.outputs.clear()
    branch.remove(body)
    for inner in body:
        for value in inner.outputs:
            # Two branches may use the same name, so prefix it with the name of the If.
            value.name = _free_name(value.name or "value", names, node.outputs[0].name or "")
    graph.insert_before(node, body)
    for old, new in zip(list(node.outputs), results, strict=True):
        if old.is_graph_output():
            # A branch may return an input or a constant, but a graph output needs its own node.
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


def restore_loop_state_shapes(model: ir.Model) -> list[str]:
    """Reshape Loop states with one unknown dimension to their initial shape, in place."""
    graph, count = model.graph, 0
    for node in nodes(graph, "Loop", subgraphs=True):
        body = node.attributes["body"].as_graph()
        for i, inner in enumerate(body.inputs[2:], 1):
            after = body.outputs[i]
            tensors = isinstance(inner.type, ir.TensorType) and isinstance(
                after.type, ir.TensorType
            )
            if tensors and _differs_in_one_symbol(S.dims_of(inner), S.dims_of(after)):
                body.outputs[i] = _reshape_state_like(body, after, inner)
                count += 1
    if count:
        infer_shapes(graph, model.opset_imports[""])
    return [f"{count} state(s) of Loop keep the shape they come with"] if count else []


def _differs_in_one_symbol(before: tuple[Dim, ...] | None, after: tuple[Dim, ...] | None) -> bool:
    """Return whether shapes differ in one dimension that is a plain symbol in both."""
    if before is None or after is None or len(before) != len(after):
        return False
    differing = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    if len(differing) != 1:
        return False
    return all(d is None or (isinstance(d, str) and d.isidentifier()) for d in differing[0])


def _reshape_state_like(body: ir.Graph, value: ir.Value, ref: ir.Value) -> ir.Value:
    shape = ir.node("Shape", [ref])
    same = ir.node("Reshape", [value, shape.outputs[0]])
    for made, what in ((shape, "shape"), (same, "kept")):
        made.outputs[0].name = f"{value.name}.{what}"
        made.name = f"{value.name}.{what}"
        body.append(made)
    same.outputs[0].type = value.type
    return same.outputs[0]


def add_squeeze_axes(model: ir.Model) -> list[str]:
    """Add axes to Squeeze nodes whose consumers imply a rank, in place.

    A symbolic dimension counts as 1 or not, whichever results in that rank. An output that
    is declared a scalar keeps its batch.
    """
    graph = model.graph
    declared = {y: len(y.shape) for y in graph.outputs if y.shape is not None}
    batches = {s for x in graph.inputs for d in (S.dims_of(x) or ())[:1] for s in D.symbols(d)}
    count = 0
    for node in nodes(graph, "Squeeze"):
        axes = _squeeze_axes(node, declared, batches)
        if axes is None:
            continue
        name = f"{node.outputs[0].name}.axes"
        value = ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.INT64),
            shape=ir.Shape([len(axes)]),
            const_value=ir.Tensor(np.asarray(axes, np.int64), name=name),
        )
        graph.register_initializer(value)
        node.resize_inputs(2)
        node.replace_input_with(1, value)
        count += 1
        infer_shapes(graph, model.opset_imports[""])
    return [f"{count} Squeeze node(s) got the axes that fit their readers"] if count else []


def _squeeze_axes(
    node: ir.Node, declared: dict[ir.Value, int], batches: set[str]
) -> list[int] | None:
    x = node.inputs[0]
    dims = None if x is None else S.dims_of(x)
    if dims is None or (len(node.inputs) > 1 and node.inputs[1] is not None):
        return None
    ones = [i for i, d in enumerate(dims) if d == 1]
    symbols = [i for i, d in enumerate(dims) if not isinstance(d, int)]
    if not symbols:
        return None
    wanted = required_rank(node.outputs[0], declared)
    if wanted == len(dims) - len(ones):
        return ones or None
    if wanted == len(dims) - len(ones) - len(symbols):
        is_batch = any(batches.intersection(D.symbols(dims[i])) for i in symbols)
        if wanted == 0 and is_batch and ones and required_rank(node.outputs[0], {}) is None:
            return ones
        return sorted([*ones, *symbols])
    return None


def drop_empty_squeeze_axes(model: ir.Model) -> None:
    """Remove empty axes from Squeeze nodes, in place; constants must be lifted."""
    for node in nodes(model.graph, "Squeeze", subgraphs=True):
        axes = node.inputs[1] if len(node.inputs) > 1 else None
        if axes is not None and axes.const_value is not None and axes.const_value.size == 0:
            node.resize_inputs(1)
