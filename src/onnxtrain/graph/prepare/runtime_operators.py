"""Operators that onnxruntime puts into the standard domain, where the standard has none.

Its optimizer writes LayerNormalization into files of any opset, though the standard has it from 17
on; SimplifiedLayerNormalization is in no opset at all, and a few more are older than the standard.
onnx's version converter ends in an assertion on each of them. They move to onnxruntime's own domain
first, whose decompositions say what they mean.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io.imports import RUNTIME_DOMAIN
from onnxtrain.graph.nodes import nodes

OPERATORS = frozenset(
    {
        *("Affine", "Crop", "DynamicSlice", "ImageScaler"),
        *("LayerNormalization", "ParametricSoftplus", "Scale", "ScaledTanh"),
        *("SimplifiedLayerNormalization", "ThresholdedRelu"),
    }
)
"""What onnxruntime defines in the standard domain by itself."""


def move_runtime_operators(model: ir.Model, opset: int) -> None:
    """Put nodes that only onnxruntime defines at this opset into its own domain, in place.

    Raises:
        PrepareError: if there are nodes of the standard domain that nobody defines.
    """
    unknown: list[ir.Node] = []
    for node in nodes(model.graph, subgraphs=True):
        if S.schema_of(node.op_type, opset) is not None:
            continue
        if node.op_type in OPERATORS:
            node.domain = RUNTIME_DOMAIN
            node.version = None
            model.opset_imports.setdefault(RUNTIME_DOMAIN, 1)
        elif not onnx.defs.has(node.op_type):
            unknown.append(node)
    if unknown:
        kinds = ", ".join(sorted({n.op_type for n in unknown}))
        lines = [f"operators that ONNX does not define: {kinds}"]
        lines += [f"  node {n.name!r}: {S.describe(n)}" for n in unknown[:10]]
        lines.append(
            "hint: name the domain that defines them, and give rules with onnxtrain.register_vjp"
        )
        raise PrepareError("\n".join(lines))
