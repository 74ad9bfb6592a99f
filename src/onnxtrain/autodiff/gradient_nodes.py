"""Replace ``Gradient`` nodes of ``ai.onnx.preview.training`` by the derivative that they define.

A Gradient node names a function in its attributes: ``y`` as a function of ``xs`` and ``zs``, which
are values of the same graph. Its inputs are the values at which the gradients of ``y`` with respect
to ``xs`` are computed, usually the named tensors themselves::

    before:  loss = f(w, x);  dw = Gradient(w, x, xs=["w"], zs=["x"], y="loss")
    after:   loss = f(w, x);  dw = <nodes of the reverse sweep of f>

The standard defines the gradient of a tensor ``y`` with several elements no further; as in
onnxruntime-training, it is that of the sum of the elements. A Gradient of another Gradient's output
is a second derivative.

Names do not survive the import pipeline, edges do. So :func:`connect` runs before it and turns the
names into inputs of a node of our own, and :func:`expand` runs after it.
"""

from __future__ import annotations

import dataclasses
from typing import NoReturn

import onnx_ir as ir

from onnxtrain.autodiff.differentiate import ancestor_nodes, differentiate
from onnxtrain.errors import PrepareError, UndifferentiableError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, copy_node_list, names_in
from onnxtrain.graph.nodes import captured, op_key, subgraphs_of
from onnxtrain.graph.shapes.inference import infer_shapes
from onnxtrain.graph.simplify import RANDOM_OPS, remove_dead
from onnxtrain.importer import Prepared
from onnxtrain.importer.functions import inline_functions

TRAINING_DOMAIN = "ai.onnx.preview.training"
GRADIENT = f"{TRAINING_DOMAIN}::Gradient"
# Inputs: a value for each of xs and zs, then xs, zs and y themselves. Attribute: the number of xs.
_CONNECTED_DOMAIN, _CONNECTED = "onnxtrain.gradients", "Gradient"


def present(model: ir.Model) -> bool:
    """Return whether the model or one of its functions has a Gradient node."""
    # all_nodes() fails on graphs that are parameters of a function.
    pending = [model.graph, *(f.graph for f in model.functions.values())]
    while pending:
        for node in pending.pop():
            if _is_gradient(node):
                return True
            pending += subgraphs_of(node)
    return False


def _is_gradient(node: ir.Node) -> bool:
    return op_key(node) == GRADIENT


@dataclasses.dataclass(frozen=True)
class Connected:
    """A model whose Gradient nodes have edges in place of names."""

    model: ir.Model
    cuts: dict[str, str]
    """Graph inputs that stand in for a computed value -> the value, a graph output."""
    outputs: frozenset[str]
    """Outputs of the file."""


def connect(model: ir.Model) -> Connected:
    """Return the model with edges in place of the names of Gradient nodes.

    A value in ``xs`` or ``zs`` that the graph computes is cut: its readers read a new graph input
    instead, until :func:`expand` joins the two. Otherwise a rewrite could merge the value with one
    that has other readers. Call before ``prepare``; the argument must not be used any more.

    Raises:
        PrepareError: a name is unknown, or the node is not valid.
    """
    for graph in (model.graph, *(f.graph for f in model.functions.values())):
        _connect_graph(graph)
    model.opset_imports[_CONNECTED_DOMAIN] = 1
    for function in model.functions.values():
        function.opset_imports[_CONNECTED_DOMAIN] = 1
    if model.functions:
        model = inline_functions(model)
    graph = model.graph
    try:
        graph.sort()
    except ValueError as error:
        raise PrepareError(
            "a Gradient node needs its own result: its y depends on its output\n"
            "hint: name in y a value that is computed without this node"
        ) from error
    connected = [n for n in graph if _is_connected(n)]
    for node in graph.all_nodes():
        if _is_connected(node) and node.graph is not graph:
            _refuse_body(node)
    infer_shapes(graph, model.opset_imports.get("", 1) or 1, _type_outputs)
    for node in connected:
        _check_independent(node)
    outputs = frozenset(y.name or "" for y in graph.outputs)
    taken, cuts = names_in(graph), dict[str, str]()
    for node in connected:
        for x in _parts(node).named:
            if x.producer() is not None:
                cuts[_cut(graph, x, taken).name or ""] = x.name or ""
    return Connected(model, cuts, outputs)


def _refuse_body(node: ir.Node) -> NoReturn:
    name = node.name or node.outputs[0].name
    raise PrepareError(
        f"node {name!r}: Gradient inside a body of If, Loop or Scan is not supported\n"
        "hint: compute the gradient outside of the body"
    )


def _connect_graph(graph: ir.Graph | ir.Function) -> None:
    nodes = [n for n in graph if _is_gradient(n)]
    for node in graph:
        for inner in (n for body in subgraphs_of(node) for n in body.all_nodes()):
            if _is_gradient(inner):
                _refuse_body(inner)
    if not nodes:
        return
    known = {x.name: x for x in graph.inputs}
    if isinstance(graph, ir.Graph):
        known |= dict(graph.initializers)
    known |= {y.name: y for node in graph for y in node.outputs if y.name}
    for node in nodes:
        xs, zs = _strings(node, "xs"), _strings(node, "zs")
        y = node.attributes["y"].as_string()
        label = f"node {node.name!r}: {S.describe(node)}"
        unknown = [name for name in (*xs, *zs, y) if name not in known]
        if unknown:
            raise PrepareError(f"{label}: {unknown[0]!r} is not a value of this graph")
        names = [*xs, *zs]
        if len(set(names)) < len(names):
            raise PrepareError(f"{label}: a name is twice in xs and zs: {', '.join(names)}")
        if len(node.inputs) != len(names) or len(node.outputs) > len(xs):
            raise PrepareError(
                f"{label}: {len(names)} names in xs and zs, {len(node.inputs)} inputs; "
                f"{len(xs)} names in xs, {len(node.outputs)} outputs"
            )
        new = ir.Node(
            _CONNECTED_DOMAIN,
            _CONNECTED,
            [*node.inputs, *(known[name] for name in (*names, y))],
            [ir.AttrInt64("xs", len(xs))],
            num_outputs=len(node.outputs),
            name=node.name or f"gradient of {y}",
        )
        for old, out in zip(node.outputs, new.outputs, strict=True):
            out.name, out.type, out.shape = old.name, old.type, old.shape
            if old.name:
                old.name = f"{old.name}.replaced"
                old.replace_all_uses_with(out, replace_graph_outputs=True)
            known[out.name] = out
        graph.insert_before(node, new)
        graph.remove(node)


def _strings(node: ir.Node, name: str) -> list[str]:
    attribute = node.attributes.get(name)
    return [] if attribute is None else list(attribute.as_strings())


def _is_connected(node: ir.Node) -> bool:
    return node.domain == _CONNECTED_DOMAIN


@dataclasses.dataclass(frozen=True)
class _Parts:
    """Inputs of a connected Gradient node."""

    values: list[ir.Value]
    """Values at which the gradients are computed, those of ``xs`` first."""
    named: list[ir.Value]
    """Values named in ``xs`` and ``zs``."""
    y: ir.Value
    xs: int
    """How many of ``named`` are in ``xs``."""


def _parts(node: ir.Node) -> _Parts:
    inputs = [x for x in node.inputs if x is not None]
    count = len(inputs) // 2
    xs = node.attributes["xs"].as_int()
    return _Parts(inputs[:count], inputs[count : 2 * count], inputs[-1], xs)


def _type_outputs(node: ir.Node) -> bool:
    """Give the outputs of a connected node the types of ``xs``."""
    if _is_connected(node):
        for out, x in zip(node.outputs, _parts(node).named, strict=False):
            out.type, out.shape = x.type, x.shape
    return False


def _check_independent(node: ir.Node) -> None:
    """Raise if one of the named values determines another: the standard forbids it."""
    parts = _parts(node)
    graph = node.graph
    assert graph is not None
    for x in parts.named:
        before = ancestor_nodes(list(graph), [x])
        read = {v for n in before for v in (*n.inputs, *captured(n))}
        others = [v.name for v in parts.named if v is not x and v in read]
        if others:
            raise PrepareError(
                f"node {node.name!r}: Gradient with {x.name!r} and {others[0]!r} in xs and zs, but "
                f"{x.name!r} is computed from {others[0]!r}\nhint: name independent values only"
            )


def _cut(graph: ir.Graph, x: ir.Value, taken: set[str]) -> ir.Value:
    """Let all nodes that read ``x`` read a new graph input; return it. ``x`` becomes an output."""
    name = f"{x.name}.cut"
    while name in taken:
        name += "_"
    taken.add(name)
    new = ir.Value(name=name, type=x.type, shape=x.shape)
    for use in list(x.uses()):
        use.node.replace_input_with(use.idx, new)
    graph.inputs.append(new)
    if not x.is_graph_output():
        graph.outputs.append(x)
    return new


def expand(prepared: Prepared, connected: Connected) -> Prepared:
    """Replace the Gradient nodes of a model that :func:`connect` returned, in place.

    Raises:
        UndifferentiableError: a function has no derivative; the message names its node.
    """
    graph = prepared.graph
    op = OpBuilder(graph, "gradient/")
    _join(op, connected)
    before = set(graph.initializers)
    lines = [
        _expand_node(OpBuilder(graph, op.prefix, before=node, parent=op), node)
        for node in list(graph)
        if _is_connected(node)
    ]
    prepared.model.opset_imports.pop(_CONNECTED_DOMAIN, None)
    remove_dead(prepared.model)
    return dataclasses.replace(
        prepared,
        constants=prepared.constants | (set(graph.initializers) - before),
        repairs=(*prepared.repairs, *lines),
    )


def _join(op: OpBuilder, connected: Connected) -> None:
    """Replace the inputs that :func:`_cut` added by the values that they stand in for.

    The Identity keeps a value apart from one that it is equal to: a gradient with respect to it
    must not count the readers of the other one.
    """
    graph = op.graph
    inputs = {x.name: x for x in graph.inputs}
    outputs = {y.name: y for y in graph.outputs}
    for name, source in connected.cuts.items():
        new, x = inputs[name], outputs[source]
        new.replace_all_uses_with(op.Identity(x))
        graph.inputs.remove(new)
        if source not in connected.outputs:
            graph.outputs.remove(x)
    graph.sort()


def _expand_node(op: OpBuilder, node: ir.Node) -> str:
    """Insert the gradients before a connected node and remove it; return a line that names them."""
    parts = _parts(node)
    named, y = parts.named, parts.y
    label = f"node {node.name!r}: Gradient of {y.name!r}"
    line = f"Gradient node {node.name!r}: gradient of {y.name!r} with respect to " + ", ".join(
        repr(x.name) for x in named[: parts.xs]
    )
    if not S.is_float(y) or not all(S.is_float(x) for x in named[: parts.xs]):
        raise UndifferentiableError(f"{label}: y and xs must be float tensors")
    if any(a is not b for a, b in zip(parts.values, named, strict=True)):
        y, named = _copy_function(op, parts, label)
    gradients = differentiate(op, {y: op.ones_like(y)}, named[: parts.xs])
    graph = op.graph
    for out, x, like in zip(node.outputs, named, parts.named, strict=False):
        if not out.name:
            continue
        found = gradients[x]
        new = op.Identity(op.zeros_like(like) if found is None else found)
        new.type, new.shape = like.type, like.shape
        name, out.name = out.name, f"{out.name}.replaced"
        out.replace_all_uses_with(new, replace_graph_outputs=True)
        new.name = name
    graph.remove(node, safe=True)
    return line


def _copy_function(op: OpBuilder, parts: _Parts, label: str) -> tuple[ir.Value, list[ir.Value]]:
    """Append copies of the nodes between the named values and ``y``, at other values.

    Return the copies of ``y`` and of the named values.
    """
    mapping: dict[ir.Value, ir.Value] = {}
    for old, value in zip(parts.named, parts.values, strict=True):
        mapping[old] = op.Identity(value)
    named = list(mapping.values())
    needed = ancestor_nodes(list(op.graph), [parts.y])
    for node in [n for n in op.graph if n in needed]:
        read = [x for x in (*node.inputs, *captured(node)) if x is not None]
        if any(y in mapping for y in node.outputs) or not any(x in mapping for x in read):
            continue
        if node.op_type in RANDOM_OPS:
            raise UndifferentiableError(
                f"{label}, at other values than those of xs and zs: node {node.name!r} "
                f"({node.op_type}) would draw other random numbers\n"
                "hint: pass the tensors named in xs and zs as inputs"
            )
        copy_node_list(op, [node], mapping)
    return mapping.get(parts.y, parts.y), named
