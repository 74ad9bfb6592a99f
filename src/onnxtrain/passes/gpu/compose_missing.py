"""Operators that a runtime has no kernel for, written with others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.call_by_signature import call_by_signature
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.composed import celu, col2im, det, dft, group_normalization
from onnxtrain.graph.modes.half_images import IMAGES_OPSET
from onnxtrain.graph.nodes import nodes
from onnxtrain.graph.windows.composed_max_pool import max_pool
from onnxtrain.graph.windows.repeated_positions import repeated
from onnxtrain.targets import Target


def compose_missing(model: ir.Model, op: OpBuilder) -> int:
    """Replace what the target lacks, where a form applies; return how many nodes there were."""
    count = 0
    for operator, form in _forms(op.target, op.opset).items():
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


def _forms(target: Target, opset: int) -> dict[str, Callable[..., Any]]:
    lacking = {
        "Celu": (target.lacks("Celu"), celu),
        "Col2Im": (target.lacks("Col2Im"), col2im),
        "DFT": (target.lacks("DFT"), dft),
        "Det": (target.lacks("Det"), det),
        "GroupNormalization": (target.prefers("groups-by-layer-norm"), group_normalization),
        "MaxPool": (target.lacks("MaxPool.opset22") and opset >= IMAGES_OPSET, max_pool),
        "Resize": (target.lacks("Resize.bfloat16"), repeated),
    }
    return {operator: form for operator, (lacked, form) in lacking.items() if lacked}
