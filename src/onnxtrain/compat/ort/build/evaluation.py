"""The evaluation model: the forward model as it is, out of training mode, parameters as inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx

from onnxtrain.graph.nodes import is_standard


def evaluation_model(
    forward: onnx.ModelProto, inputs: Sequence[str], weights: Sequence[str]
) -> onnx.ModelProto:
    """Return the forward model with Dropout off and BatchNormalization on its statistics.

    Args:
        forward: the model with its loss; it is not changed.
        inputs: names of its inputs, in the order wanted.
        weights: initializers that become inputs, after those.
    """
    model = onnx.ModelProto()
    model.CopyFrom(forward)
    graph = model.graph
    graph.name = "eval_model"
    renamed: dict[str, str] = {}
    for node in nodes_of(graph):
        if is_standard(node):
            _switch_off(node, renamed)
    for node in nodes_of(graph):
        node.input[:] = [renamed.get(x, x) for x in node.input]
    for old, new in renamed.items():
        if any(y.name == old for y in graph.output):
            graph.node.add(op_type="Identity", input=[new], output=[old], name=old)
    known = {x.name: x for x in graph.input}
    wanted = [known[n] for n in inputs]
    tensors = {t.name: t for t in graph.initializer}
    for name in weights:
        value = onnx.ValueInfoProto(name=name)
        kind = value.type.tensor_type
        kind.elem_type = tensors[name].data_type
        kind.shape.SetInParent()
        for size in tensors[name].dims:
            kind.shape.dim.add(dim_value=size)
        wanted.append(value)
    kept = [t for n, t in tensors.items() if n not in set(weights)]
    del graph.input[:], graph.initializer[:]
    graph.input.extend(wanted)
    graph.initializer.extend(kept)
    return model


def _switch_off(node: onnx.NodeProto, renamed: dict[str, str]) -> None:
    if node.op_type == "Dropout" and len(node.input) > 2:
        node.input[2] = ""
    elif node.op_type == "BatchNormalization":
        for attribute in node.attribute:
            if attribute.name == "training_mode":
                attribute.i = 0
        # Whoever reads a new statistic gets the one it would have started from.
        renamed.update(zip(node.output[1:3], node.input[3:5], strict=False))
        del node.output[1:]


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Return the nodes of a graph and of its subgraphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes_of(attribute.g)
            for inner in attribute.graphs:
                yield from nodes_of(inner)


def rename(model: onnx.ModelProto, old: str, new: str) -> None:
    """Give a value of the graph another name."""
    for node in nodes_of(model.graph):
        for names in (node.input, node.output):
            names[:] = [new if name == old else name for name in names]
    for values in (model.graph.output, model.graph.value_info):
        for value in values:
            if value.name == old:
                value.name = new
