"""A finished graph at a newer opset, for one operator that came with it."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_standard

ATTENTION_SINCE = 23
"""The opset that has an operator for attention."""
_IR_VERSION = 11
# Of the operators that opsets 22 and 23 change, those that mean the same as before, and that CUDA
# has in their new version.
_RAISED = frozenset(
    {
        *("AveragePool", "Cast", "ConstantOfShape", "Conv", "ConvTranspose", "Cos", "Flatten"),
        *("GlobalAveragePool", "HardSigmoid", "HardSwish", "Identity", "Mish", "Pad", "Reshape"),
        *("Round", "Shape", "Sin", "Size", "Softplus", "Squeeze", "Transpose", "Unsqueeze"),
    }
)


def can_be_raised(model: ir.Model, opset: int) -> bool:
    """Return whether all nodes of a model mean the same at a newer opset, and run there."""
    old = model.opset_imports[""]
    return old >= opset or all(_is_same(n, old, opset) for n in model.graph.all_nodes())


def raise_opset(model: ir.Model, opset: int) -> None:
    """Let a model be of a newer opset, in place."""
    if model.opset_imports[""] < opset:
        model.opset_imports[""] = opset
        model.ir_version = max(model.ir_version or 0, _IR_VERSION)


def _is_same(node: ir.Node, old: int, new: int) -> bool:
    if not is_standard(node) or node.op_type in _RAISED:
        return True
    before, after = (S.schema_of(node.op_type, v) for v in (old, new))
    return before is not None and after is not None and before.since_version == after.since_version


__all__ = ["ATTENTION_SINCE", "can_be_raised", "raise_opset"]
