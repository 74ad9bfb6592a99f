"""Finished graphs in the spelling that onnxruntime's CPU kernels run quickest."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.simplify import simplify
from onnxtrain.passes.bias_as_weight_column import bias_as_weight_column
from onnxtrain.passes.gemm_without_trans_a import gemm_without_trans_a
from onnxtrain.passes.scale_after_matmul import scale_after_matmul


def optimize_for_cpu(model: ir.Model, target: str) -> ir.Model:
    """Simplify a model and, for ``"cpu"``, choose spellings by size; in place, return it."""
    simplify(model)
    if target == "cpu":
        op = OpBuilder(model.graph, "cpu/", target=target)
        if scale_after_matmul(op) + gemm_without_trans_a(op) + bias_as_weight_column(op):
            simplify(model)
    return model
