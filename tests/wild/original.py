"""The original file in stock onnxruntime, with its weights as inputs: an independent loss."""

from __future__ import annotations

from collections.abc import Mapping
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
        self.proto = onnx.load(path)

    def outputs(self, feeds: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Return all outputs by name."""
        names = [y.name for y in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, dict(feeds)), strict=True))

    def weights(self, names: list[str]) -> dict[str, np.ndarray]:
        """Return those of some weights that the file has as tensors."""
        tensors = {t.name: t for t in self.proto.graph.initializer}
        for node in self.proto.graph.node:
            if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
                tensors[node.output[0]] = node.attribute[0].t
        return {n: ir.serde.deserialize_tensor(tensors[n]).numpy() for n in names if n in tensors}

    def adjustable(self, names: list[str]) -> Any:
        """Return a session of the same file whose weights may be given as inputs.

        Kernels that round activations to 8 bits have steps, not slopes: they are told not to.
        """
        model = onnx.ModelProto()
        model.CopyFrom(self.proto)
        graph = model.graph
        for attribute in (a for node in graph.node for a in node.attribute):
            if attribute.name == "accuracy_level":
                attribute.i = 0
        known = {t.name for t in graph.initializer}
        inputs = {x.name for x in graph.input}
        for node in [n for n in graph.node if n.op_type == "Constant" and n.output[0] in names]:
            if node.output[0] in known:
                continue
            tensor = graph.initializer.add()
            tensor.CopyFrom(node.attribute[0].t)
            tensor.name = node.output[0]
            graph.node.remove(node)
        for tensor in graph.initializer:
            if tensor.name in names and tensor.name not in inputs:
                graph.input.add(name=tensor.name).type.tensor_type.CopyFrom(_type(tensor))
        model.ir_version = max(model.ir_version, 4)
        return onnxruntime.InferenceSession(
            model.SerializeToString(), self.options, providers=["CPUExecutionProvider"]
        )


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
