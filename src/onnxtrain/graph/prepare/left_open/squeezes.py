"""Squeeze without axes, which drops every size that is 1: made explicit where sizes are symbols."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import nodes
from onnxtrain.graph.shapes.infer import infer_shapes
from onnxtrain.graph.shapes.required_rank import required_rank


def explicit_squeezes(model: ir.Model) -> list[str]:
    """Give axes to Squeeze nodes whose readers tell the rank, in place; say how many.

    A size that is a symbol counts as 1 or not, whichever gives the rank that is read.
    """
    graph = model.graph
    declared = {y: len(y.shape) for y in graph.outputs if y.shape is not None}
    count = 0
    for node in nodes(graph, "Squeeze"):
        axes = _axes(node, declared)
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


def _axes(node: ir.Node, declared: dict[ir.Value, int]) -> list[int] | None:
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
        return sorted([*ones, *symbols])
    return None
