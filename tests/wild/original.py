"""The original file in stock onnxruntime, with its weights as inputs: an independent loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime


class Original:
    """A file as it came, run by stock onnxruntime."""

    def __init__(self, path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        self.options = options
        self.session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        self.path, self.proto = path, onnx.load(path)

    def outputs(self, feeds: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Return all outputs by name."""
        names = [y.name for y in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, dict(feeds)), strict=True))

    def weights(self, names: list[str]) -> dict[str, np.ndarray]:
        """Return those of some weights that the file has as tensors."""
        tensors = {}
        for graph in reversed(list(graphs(self.proto.graph))):
            tensors |= {t.name: t for t in graph.initializer}
            tensors |= {n.output[0]: n.attribute[0].t for n in _constants(graph)}
        return {n: ir.serde.deserialize_tensor(tensors[n]).numpy() for n in names if n in tensors}

    def adjustable(self, names: list[str]) -> Any:
        """Return a session of the same file whose weights can be passed as inputs.

        Kernels that round activations to 8 bits are stepwise: the session disables that rounding.
        """
        model = onnx.ModelProto()
        model.CopyFrom(self.proto)
        graph = model.graph
        for attribute in (a for node in graph.node for a in node.attribute):
            if attribute.name == "accuracy_level":
                attribute.i = 0
        inputs = {x.name for x in graph.input}
        for part in list(graphs(graph)):
            _lift(part, graph, names)
        for tensor in graph.initializer:
            if tensor.name in names and tensor.name not in inputs:
                graph.input.add(name=tensor.name).type.tensor_type.CopyFrom(_type(tensor))
        model.ir_version = max(model.ir_version, 4)
        return onnxruntime.InferenceSession(
            model.SerializeToString(), self.options, providers=["CPUExecutionProvider"]
        )


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Return a graph and all that lie in its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from graphs(attribute.g)


def _constants(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    return [
        n
        for n in graph.node
        if n.op_type == "Constant" and n.attribute and n.attribute[0].HasField("t")
    ]


def _lift(part: onnx.GraphProto, graph: onnx.GraphProto, names: list[str]) -> None:
    """Move tensors of a body, and of Constant nodes, to the graph: what is inside sees them."""
    known = {t.name for t in graph.initializer}
    for node in [n for n in _constants(part) if n.output[0] in names]:
        if node.output[0] not in known:
            tensor = graph.initializer.add()
            tensor.CopyFrom(node.attribute[0].t)
            tensor.name = node.output[0]
            part.node.remove(node)
    if part is not graph:
        for tensor in [t for t in part.initializer if t.name in names and t.name not in known]:
            graph.initializer.append(tensor)
            part.initializer.remove(tensor)


def _type(tensor: onnx.TensorProto) -> onnx.TypeProto.Tensor:
    kind = onnx.TypeProto.Tensor(elem_type=tensor.data_type)
    for d in tensor.dims:
        kind.shape.dim.add(dim_value=d)
    if not tensor.dims:
        kind.shape.SetInParent()
    return kind


def mean_square(y: np.ndarray, target: np.ndarray) -> float:
    """Return the loss, in float64."""
    return float(np.square(y.astype(np.float64) - target).mean())
