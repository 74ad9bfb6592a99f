"""A graph cut in two: what no trained parameter touches, run once, and the tail that is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph.io import load
from onnxtrain.runtime import session as runtime


@dataclasses.dataclass(frozen=True)
class Parts:
    """Pre-processing and tail of a model."""

    before: onnx.ModelProto | None
    """Returns the inputs of the tail, under their names; ``None`` if it does nothing."""
    tail: ir.Model


def depends_on(graph: ir.Graph, names: Iterable[str]) -> set[ir.Node]:
    """Return every node that a change of these values may reach."""
    wanted = set(names)
    changed = {x for n, x in graph.initializers.items() if n in wanted}
    nodes: set[ir.Node] = set()
    for node in graph:
        if any(x in changed for x in _reads(node) if x is not None):
            nodes.add(node)
            changed.update(node.outputs)
    return nodes


def _reads(node: ir.Node) -> list[ir.Value | None]:
    """Return the inputs of a node, and what its subgraphs read from outside."""
    values = list(node.inputs)
    for attribute in node.attributes.values():
        graphs = []
        if attribute.type == ir.AttributeType.GRAPH:
            graphs = [attribute.as_graph()]
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs = list(attribute.as_graphs())
        for graph in graphs:
            values += [*graph.outputs, *(x for inner in graph for x in _reads(inner))]
    return values


def keep_output(model: ir.Model, value: ir.Value) -> None:
    """Make a value the only output and drop what it does not need, in place."""
    graph = model.graph
    needed: set[ir.Value | None] = {value}
    for node in reversed(list(graph)):
        if needed & set(node.outputs):
            needed.update(_reads(node))
        else:
            graph.remove(node)
    graph.outputs.clear()
    graph.outputs.append(value)
    for name, x in list(graph.initializers.items()):
        if x not in needed:
            graph.initializers.pop(name)
    unused = [x for x in graph.inputs if x not in needed]
    for x in unused:
        graph.inputs.remove(x)


def split(model: ir.Model, names: Sequence[str], rows: Mapping[str, np.ndarray]) -> Parts:
    """Cut a model with one output in front of the nodes that depend on ``names``.

    Args:
        model: is used up.
        names: of the trained initializers.
        rows: a few rows of data for each input, to see what the first part gives.
    """
    graph = model.graph
    late = depends_on(graph, names)
    fixed = _from_constants(graph)
    edge: dict[ir.Value, None] = {}
    for node in late:
        for x in _reads(node):
            if x is None or x.const_value is not None or x in fixed:
                continue
            producer = x.producer()
            if producer is None or (producer not in late and producer.graph is graph):
                edge[x] = None
    outer = [x for x in edge if x.producer() is not None]
    if not outer or not _outer_values(graph, edge):
        return Parts(None, model)
    before = model.clone()
    values = {x.name: x for node in before.graph for x in node.outputs}
    values.update({x.name: x for x in before.graph.inputs})
    before.graph.outputs.clear()
    before.graph.outputs.extend(values[x.name] for x in outer)
    proto = _pruned(before)
    shapes = _measure(proto, rows)
    for x in outer:
        array, batched = shapes[x.name or ""]
        if not batched:  # not one entry per row: the tail computes it for itself
            return Parts(None, model)
        producer = x.producer()
        assert producer is not None
        new = ir.Value(
            name=x.name,
            type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
            shape=ir.Shape(["batch", *array.shape[1:]]),
        )
        x.name = f"{x.name}/before"
        x.replace_all_uses_with(new)
        graph.inputs.append(new)
    keep_output(model, graph.outputs[0])
    return Parts(proto, ir.from_proto(ir.to_proto(model)))


def _outer_values(graph: ir.Graph, edge: Mapping[ir.Value, None]) -> bool:
    """Return whether the whole edge can become inputs: a graph input on it keeps its role."""
    return all(x.producer() is not None or x in list(graph.inputs) for x in edge)


def _from_constants(graph: ir.Graph) -> set[ir.Value]:
    known: set[ir.Value | None] = set(graph.initializers.values())
    for node in graph:
        if all(x is None or x in known for x in _reads(node)):
            known.update(node.outputs)
    return {x for x in known if x is not None}


def _pruned(model: ir.Model) -> onnx.ModelProto:
    needed: set[ir.Value | None] = set(model.graph.outputs)
    for node in reversed(list(model.graph)):
        if needed & set(node.outputs):
            needed.update(_reads(node))
        else:
            model.graph.remove(node)
    for name, x in list(model.graph.initializers.items()):
        if x not in needed:
            model.graph.initializers.pop(name)
    for y in model.graph.outputs:
        if y.type is None:
            y.type = ir.TensorType(ir.DataType.FLOAT)
    return ir.to_proto(model)


def _measure(
    proto: onnx.ModelProto, rows: Mapping[str, np.ndarray]
) -> dict[str, tuple[np.ndarray, bool]]:
    """Run the first part on few rows; tell for each result whether it has one entry per row."""
    session = runtime.create(proto.SerializeToString(), threads=1)
    names = [y.name for y in session.get_outputs()]
    wanted = {x.name for x in session.get_inputs()}
    feeds = {n: a for n, a in rows.items() if n in wanted}
    count = len(next(iter(feeds.values()))) if feeds else 0
    if not count:
        raise PrepareError("the model reads no input\nhint: is its data a constant?")
    whole = runtime.run(session, names, feeds)
    part = runtime.run(session, names, {n: a[:1] for n, a in feeds.items()})
    return {
        n: (a, a.ndim > 0 and a.shape[0] == count and b.shape[0] == 1)
        for n, a, b in zip(names, whole, part, strict=True)
    }


def open_source(model: object) -> ir.Model:
    """Load a model that may hold operators of any standard domain."""
    return load(model, allow_domains={"ai.onnx.ml"})  # pyright: ignore[reportArgumentType]
