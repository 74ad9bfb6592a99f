"""Products with packed weights as plain products, the weights unpacked by operators on bytes.

``x W^T = sum of x_i W_i^T`` over the places ``i`` of a byte (:mod:`~onnxtrain.graph.builder.
packed_parts`). A kernel that unpacks number by number takes longer than a product of a few hundred
rows; three passes over the bytes do not. Weights are unpacked when ``x`` is there, and again in the
backward pass, so that no more than one layer's are floats at a time.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.packed_parts import PackedParts
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import key_of

_INPUTS = 6


def products_by_parts(model: ir.Model, op: OpBuilder) -> int:
    """Replace products whose packed weights are constants; return how many."""
    changed = 0
    for node in list(model.graph):
        if key_of(node) == "com.microsoft::MatMulNBits" and _replaced(op.before(node), node):
            changed += 1
    return changed


def _replaced(op: OpBuilder, node: ir.Node) -> bool:
    x, b, scales, points, groups, bias = [*node.inputs, *[None] * _INPUTS][:_INPUTS]
    named = S.attributes_of(node, 1)
    if x is None or scales is None or b is None or b.const_value is None or groups is not None:
        return False
    sizes = named["N"], named["K"], named["block_size"], named.get("bits", 4)
    form = PackedParts(*sizes, scales.dtype)
    if not form.fits() or S.dims_of(x) is None:
        return False
    if points is not None and (points.const_value is None or points.dtype != ir.DataType.UINT8):
        return False
    uses = list(node.outputs[0].uses())
    weights = form.weights(op, b, scales, points, wait=x)
    y = form.product(op, form.apart(op, x), weights)
    if bias is not None:
        y = op.Add(y, bias)
    replace_value(node.outputs[0], y, uses)
    return True


__all__ = ["products_by_parts"]
