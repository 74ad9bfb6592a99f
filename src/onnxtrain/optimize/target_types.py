"""Integer inputs of 32 bits, for runtimes that have no others.

Operators that a runtime has no kernel for, written with others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from onnxtrain.expand.fourier import det, dft
from onnxtrain.expand.group_norm import group_normalization
from onnxtrain.expand.images import celu, col2im, max_pool
from onnxtrain.graph.builder import OpBuilder, replace_value
from onnxtrain.graph.call_by_signature import call_by_signature
from onnxtrain.graph.nodes import nodes
from onnxtrain.graph.windows import repeat_nearest
from onnxtrain.modes.mixed_precision import BFLOAT16_CONV_OPSET
from onnxtrain.targets import Target


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


def decompose_unsupported(model: ir.Model, op: OpBuilder) -> int:
    """Replace what the target lacks, where a form applies; return how many nodes there were."""
    count = 0
    for operator, form in _decompositions(op.target, op.opset).items():
        for node in nodes(op.graph, operator):
            new = call_by_signature(form, op.before(node), node, context={"node": node})
            if new is None:
                continue
            old = node.outputs[0]
            new.type, new.shape = old.type, old.shape
            replace_value(old, new, list(old.uses()))
            op.graph.remove(node, safe=True)
            count += 1
    return count


def _decompositions(target: Target, opset: int) -> dict[str, Callable[..., Any]]:
    lacking = {
        "Celu": (target.lacks("Celu"), celu),
        "Col2Im": (target.lacks("Col2Im"), col2im),
        "DFT": (target.lacks("DFT"), dft),
        "Det": (target.lacks("Det"), det),
        "GroupNormalization": (target.prefers("group-norm-via-layer-norm"), group_normalization),
        "MaxPool": (target.lacks("MaxPool.opset22") and opset >= BFLOAT16_CONV_OPSET, max_pool),
        "Resize": (target.lacks("Resize.bfloat16"), repeat_nearest),
    }
    return {operator: form for operator, (lacked, form) in lacking.items() if lacked}
