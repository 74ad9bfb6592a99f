"""Emulate bfloat16 nodes on runtimes without bfloat16: compute in float32, round the results.

Kernels with float32 accumulation compute the same, up to the order of sums.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto


def element_types(model: onnx.ModelProto) -> dict[str, int]:
    """Return the element type of each value of a graph."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    values = [*graph.value_info, *graph.input, *graph.output]
    types = {v.name: v.type.tensor_type.elem_type for v in values}
    return types | {t.name: t.data_type for t in graph.initializer}


def emulated(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with casts around every node that reads or makes bfloat16."""
    types, nodes = element_types(model), []
    for number, node in enumerate(model.graph.node):
        wide = onnx.NodeProto.FromString(node.SerializeToString())
        casts = []
        if node.op_type != "Cast":
            for i, name in enumerate(node.input):
                if types.get(name) == TensorProto.BFLOAT16:
                    wide.input[i] = f"{name}.wide{number}.{i}"
                    nodes.append(_cast(name, wide.input[i], TensorProto.FLOAT))
            for i, name in enumerate(node.output):
                if types.get(name) == TensorProto.BFLOAT16:
                    wide.output[i] = f"{name}.wide{number}"
                    casts.append(_cast(wide.output[i], name, TensorProto.BFLOAT16))
        nodes += [wide, *casts]
    made = onnx.ModelProto.FromString(model.SerializeToString())
    del made.graph.node[:], made.graph.value_info[:]
    made.graph.node.extend(nodes)
    return made


def _cast(x: str, y: str, to: int) -> onnx.NodeProto:
    kind = onnx.AttributeProto(name="to", type=onnx.AttributeProto.INT, i=to)
    return onnx.NodeProto(op_type="Cast", input=[x], output=[y], attribute=[kind])
