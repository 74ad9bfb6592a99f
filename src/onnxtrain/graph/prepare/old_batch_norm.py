"""Training-mode BatchNormalization from below opset 14, which onnx's version converter refuses.

There more than one output meant training; from 14 on an attribute says so and the outputs are the
normalised value and the two running statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx

from onnxtrain.graph.nodes import is_op, is_standard

_SINCE_ATTRIBUTE = 14


def convert_around_training(
    model: onnx.ModelProto, convert: Callable[[onnx.ModelProto], onnx.ModelProto]
) -> onnx.ModelProto:
    """Return the converted model with each training BatchNormalization still in training mode."""
    opset = max((o.version for o in model.opset_import if is_standard(o)), default=0)
    if opset >= _SINCE_ATTRIBUTE:
        return convert(model)
    used = _used(model.graph)
    training = set()
    for node in _batch_norms(model.graph):
        # Where a statistic is read, the converter's refusal is the answer.
        if len(node.output) > 1 and not used.intersection(node.output[1:]):
            training.add(node.output[0])
            del node.output[1:]
    converted = convert(model)
    for node in _batch_norms(converted.graph):
        if node.output[0] in training:
            node.output.extend(f"{node.output[0]}.running_{kind}" for kind in ("mean", "var"))
            node.attribute.add(name="training_mode", type=onnx.AttributeProto.INT, i=1)
    return converted


def _batch_norms(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        if is_op(node, "BatchNormalization"):
            yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _batch_norms(attribute.g)


def _used(graph: onnx.GraphProto) -> set[str]:
    """Names that a node or a graph output reads, here and in subgraphs."""
    names = {value.name for value in graph.output}
    for node in graph.node:
        names.update(node.input)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                names |= _used(attribute.g)
    return names - {""}
