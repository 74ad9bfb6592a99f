"""Integer inputs of 32 bits, for runtimes that have no others."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder


def int32_inputs(model: ir.Model, op: OpBuilder) -> int:
    """Make int64 inputs int32; inside the graph they are widened again. Return how many."""
    graph = model.graph
    wide = [x for x in graph.inputs if x.dtype == ir.DataType.INT64]
    if not wide:
        return 0
    front = op.before(next(iter(graph), None))
    for x in wide:
        uses = list(x.uses())
        x.type = ir.TensorType(ir.DataType.INT32)  # copies of the graph share types
        widened = front.Cast(x, to=ir.DataType.INT64)
        widened.shape = x.shape
        for node, index in uses:
            node.replace_input_with(index, widened)
    return len(wide)
