"""Convolutions in bfloat16: which models can have them, and the opset that does.

Before opset 22 Conv knows no bfloat16. A file has one opset, so that all its operators are raised
together; of some a runtime has no kernel of that version. A model with one of these stays where it
is, with convolutions in float32. MaxPool, which nearly every net has once, is written with others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
_MANY, _MORE = 8, 2


def raise_for_images(model: ir.Model, half: ir.DataType, target: Target) -> bool:
    """Raise a model, in place, so that convolutions can be bfloat16; return whether they can.

    That is for nets of convolutions: where other products are more, their time and memory are too.
    Nets with attention between convolutions have many small products, so that work counts as well.
    """
    if half != _BFLOAT16 or not target.prefers("bfloat16-images"):
        return False
    if not _mostly_convolutions(model.graph):
        return False
    old = model.opset_imports[""]
    if old < IMAGES_OPSET:
        if not all(_is_raised(n, old) for n in model.graph.all_nodes()):
            return False
        model.opset_imports[""] = IMAGES_OPSET
    return True


def _mostly_convolutions(graph: ir.Graph) -> bool:
    """Return whether convolutions are more than other products, by number or, if many, by work."""
    convolutions, others = nodes(graph, "Conv"), nodes(graph, *_OTHERS)
    if len(convolutions) > len(others):
        return True
    return len(convolutions) >= _MANY and _work(convolutions) > _MORE * _work(others)


def _work(products: list[ir.Node]) -> int:
    """Return how many numbers are multiplied, about: those of a result, each so often."""
    return sum(_elements(S.dims_of(n.outputs[0])) * _terms(n) for n in products)


def _terms(node: ir.Node) -> int:
    """Return how many products make one element of a result."""
    first, weight = (None if x is None else S.dims_of(x) for x in node.inputs[:2])
    if node.op_type == "Conv":
        return _elements((weight or ())[1:])
    turned = node.attributes.get("transA")
    rows_first = turned is not None and bool(turned.as_int())
    return _elements((first or ())[:1] if rows_first else (first or ())[-1:])


def _elements(dims: Sequence[object] | None) -> int:
    """Return the product of sizes, where those that are not known count as one."""
    return math.prod(d for d in dims or () if isinstance(d, int))


def _is_raised(node: ir.Node, opset: int) -> bool:
    """Return whether a node runs in a file of opset 22 as well."""
    if not is_standard(node) or node.op_type in _RAISED:
        return True
    if node.op_type == "MaxPool":
        return can_be_composed(node, opset)
    old, new = (S.schema_of(node.op_type, v) for v in (opset, IMAGES_OPSET))
    return old is not None and new is not None and old.since_version == new.since_version


__all__ = ["IMAGES_OPSET", "raise_for_images"]
