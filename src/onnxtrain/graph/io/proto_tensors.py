"""Every tensor that a ModelProto holds, wherever it hides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import onnx


def all_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield the tensors of all graphs, subgraphs, functions and attributes, sparse ones too."""
    pending: list[Any] = [model.graph, *model.functions]
    for info in model.training_info:
        pending += [info.initialization, info.algorithm]
    while pending:
        body = pending.pop()
        attributes = [a for node in body.node for a in node.attribute]
        if isinstance(body, onnx.GraphProto):
            yield from body.initializer
            yield from _parts(body.sparse_initializer)
        else:
            attributes += body.attribute_proto
        for attribute in attributes:
            # By what is there and not by the type that is named: readers differ in what they trust.
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            if attribute.HasField("sparse_tensor"):
                yield from _parts([attribute.sparse_tensor])
            yield from _parts(attribute.sparse_tensors)
            if attribute.HasField("g"):
                pending.append(attribute.g)
            pending += attribute.graphs


def _parts(sparse: Iterable[onnx.SparseTensorProto]) -> Iterator[onnx.TensorProto]:
    for tensor in sparse:
        yield tensor.values
        yield tensor.indices
