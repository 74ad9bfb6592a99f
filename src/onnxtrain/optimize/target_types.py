"""Types and operators that a target does not have, replaced after differentiation."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.expand.expansions import target_expansions
from onnxtrain.graph.builder import OpBuilder, replace_value
from onnxtrain.graph.call_by_signature import call_by_signature
from onnxtrain.graph.nodes import nodes


def int32_inputs(model: ir.Model, op: OpBuilder) -> int:
    """Turn int64 graph inputs into int32 inputs with a Cast behind them; return how many.

    For runtimes whose API has no 64-bit integers (labels and token ids in a browser):

        before:  labels (int64) -> ...
        after:   labels (int32) -> Cast(int64) -> ...
    """
    graph = model.graph
    int64_inputs = [x for x in graph.inputs if x.dtype == ir.DataType.INT64]
    if not int64_inputs:
        return 0
    front = op.before(next(iter(graph), None))
    for x in int64_inputs:
        uses = list(x.uses())
        # A new type object: copies of the graph share type objects with this one.
        x.type = ir.TensorType(ir.DataType.INT32)
        cast = front.Cast(x, to=ir.DataType.INT64)
        cast.shape = x.shape
        for node, index in uses:
            node.replace_input_with(index, cast)
    return len(int64_inputs)


def decompose_unsupported(model: ir.Model, op: OpBuilder) -> int:
    """Apply the expansions registered with ``on_target(...)``; return how many nodes they replaced.

    Runs on the whole training graph, so it also covers what differentiation and earlier passes
    emitted. Where an expansion returns ``None`` the node stays, and onnxruntime runs it on the CPU.
    """
    count = 0
    for operator, function in target_expansions(op.target, op.opset).items():
        for node in nodes(op.graph, operator):
            new = call_by_signature(function, op.before(node), node, context={"node": node})
            if new is None:
                continue
            results = new if isinstance(new, list | tuple) else [new]
            for old, result in zip(node.outputs, results, strict=False):
                result.type, result.shape = old.type, old.shape
                replace_value(old, result, list(old.uses()))
            op.graph.remove(node, safe=True)
            count += 1
    return count
