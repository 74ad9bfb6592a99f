"""Copies of a file with one change: adapters beside quantized matmuls, an output before the last.

Both are made by hand in the protobuf, so that stock onnxruntime runs what is differentiated.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

RANK = 2
ADAPTERS = ("*.adapter_down", "*.adapter_up")
SATURATING = {"Sigmoid", "Softmax"}
VIEWS = {"Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten"}
QUANTIZED = "MatMulNBits"


def with_adapters(path: Path, folder: Path) -> Path | None:
    """Write a copy in which each quantized matmul has a float adapter of low rank beside it.

    ``y = x W`` becomes ``y = x W + x A B``. Return ``None`` without a quantized matmul.
    """
    model = onnx.load(path)
    graph, rng = model.graph, np.random.default_rng(6)
    if not any(n.op_type == QUANTIZED for n in graph.node):
        return None
    types = {t.name: t.data_type for t in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        nodes.append(node)
        if node.op_type != QUANTIZED:
            continue
        sizes = {a.name: a.i for a in node.attribute}
        x, y, name = node.input[0], node.output[0], node.name or node.output[0]
        dtype = ir.DataType(types[node.input[2]]).numpy()
        shapes = {"down": (sizes["K"], RANK), "up": (RANK, sizes["N"])}
        for part, shape in shapes.items():
            array = (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(dtype)
            tensor = ir.Tensor(array, name=f"{name}.adapter_{part}")
            graph.initializer.append(ir.serde.serialize_tensor(tensor))
        node.output[0] = f"{name}.frozen"
        low, added = f"{name}.low", f"{name}.added"
        for kind, inputs, output in (
            ("MatMul", (x, f"{name}.adapter_down"), low),
            ("MatMul", (low, f"{name}.adapter_up"), added),
            ("Add", (node.output[0], added), y),
        ):
            nodes.append(onnx.NodeProto(op_type=kind, input=inputs, output=[output], name=output))
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.save(model, folder / "adapted.onnx", save_as_external_data=True)
    return folder / "adapted.onnx"


def before_saturation(path: Path, name: str, folder: Path) -> tuple[Path, str] | None:
    """Write a copy with one more output: what goes into the sigmoid or softmax of output ``name``.

    Near 0 and 1, float32 cannot resolve the derivative.
    """
    model = onnx.load(path)
    made = {y: node for node in model.graph.node for y in node.output}
    node = made.get(name)
    while node is not None and node.op_type in VIEWS:
        node = made.get(node.input[0])
    if node is None or node.op_type not in SATURATING or node.input[0] not in made:
        return None
    inner = node.input[0]
    if inner not in {y.name for y in model.graph.output}:
        kind = onnx.TypeProto.Tensor(elem_type=onnx.TensorProto.FLOAT)
        model.graph.output.add(name=inner).type.tensor_type.CopyFrom(kind)
    onnx.save(model, folder / "inner.onnx")
    return folder / "inner.onnx", inner
