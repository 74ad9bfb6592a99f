"""Finished graphs in the spelling that onnxruntime's CPU kernels run quickest."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.late_scale import scale_late
from onnxtrain.graph.simplify import simplify
from onnxtrain.graph.turned_products import turn_products
from onnxtrain.graph.wide_bias import widen_inputs


def finish_for(model: ir.Model, target: str) -> ir.Model:
    """Simplify a model and, for ``"cpu"``, choose spellings by size; in place, give it back."""
    simplify(model)
    if target == "cpu":
        op = OpBuilder(model.graph, "cpu/", target=target)
        if scale_late(op) + turn_products(op) + widen_inputs(op):
            simplify(model)
    return model
