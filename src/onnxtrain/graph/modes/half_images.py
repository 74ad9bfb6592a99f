"""Convolutions in bfloat16: which models can have them, and the opset that does.

Before opset 22 Conv knows no bfloat16. A file has one opset, so that all its operators are raised
together; of some a runtime has no kernel of that version. A model with one of these stays where it
is, with convolutions in float32. MaxPool, which nearly every net has once, is written with others.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_standard, nodes
from onnxtrain.graph.windows.composed_max_pool import can_be_composed
from onnxtrain.targets import Target

IMAGES_OPSET = 22
_BFLOAT16 = ir.DataType.BFLOAT16
# Of the operators that opset 22 changes, those that CUDA has in their new version.
_RAISED = frozenset(
    {
        *("AveragePool", "Conv", "ConvTranspose", "Cos", "GlobalAveragePool", "GlobalMaxPool"),
        *("HardSigmoid", "HardSwish", "Mish", "Round", "Sin", "Softplus", "Softsign"),
    }
)
_OTHERS = ("Einsum", "Gemm", "MatMul")


def raise_for_images(model: ir.Model, half: ir.DataType, target: Target) -> bool:
    """Raise a model, in place, so that convolutions can be bfloat16; return whether they can.

    That is for nets of convolutions: where other products are more, their time and memory are too.
    """
    if half != _BFLOAT16 or not target.prefers("bfloat16-images"):
        return False
    convolutions = len(nodes(model.graph, "Conv"))
    if not convolutions > len(nodes(model.graph, *_OTHERS)):
        return False
    old = model.opset_imports[""]
    if old < IMAGES_OPSET:
        if not all(_is_raised(n, old) for n in model.graph.all_nodes()):
            return False
        model.opset_imports[""] = IMAGES_OPSET
    return True


def _is_raised(node: ir.Node, opset: int) -> bool:
    """Return whether a node runs in a file of opset 22 as well."""
    if not is_standard(node) or node.op_type in _RAISED:
        return True
    if node.op_type == "MaxPool":
        return can_be_composed(node, opset)
    old, new = (S.schema_of(node.op_type, v) for v in (opset, IMAGES_OPSET))
    return old is not None and new is not None and old.since_version == new.since_version


__all__ = ["IMAGES_OPSET", "raise_for_images"]
