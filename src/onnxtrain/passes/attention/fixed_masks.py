"""Masks that depend on no input: computed here, once for all rows of a batch, or left out.

Once sizes are numbers, an exporter's causal mask is known: the same for each row of the batch and
for each layer, or zero everywhere. As nodes it is kept for each row and added by a kernel for any
broadcast. ``x + 0 = x`` and ``Where(true, x, 0) = x`` leave the rest out, the guards of rows that
see nothing among it; an axis along which all elements are equal has size 1.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.simplify.closed_values import ClosedValues


def fixed_masks(model: ir.Model, op: OpBuilder) -> int:
    """Compute masks that depend on no input; return how many nodes changed or went."""
    closed = ClosedValues(op.graph, op.opset, T.COMPUTED_MASK_ELEMENTS)
    changed = 0
    for node in nodes(op.graph, "Add", "Sub", "Where"):
        y = node.outputs[0]
        if y in closed:
            continue
        for i, x in enumerate(node.inputs):
            if x in closed and (y.uses() or y.is_graph_output()):
                changed += _fix(op, node, i, closed)
    return changed


def _fix(op: OpBuilder, node: ir.Node, at: int, closed: ClosedValues) -> int:
    """Put the elements of an operand in its place, or leave the node out."""
    x, y = node.inputs[at], node.outputs[0]
    array = None if x is None else closed.array(x)
    sizes = D.numbers(S.dims_of(y))
    if x is None or array is None or not array.size:
        return 0
    stands = _stands_for(node, at, array)
    if stands is not None and S.same_shape(stands, y) and not y.is_graph_output():
        replace_value(y, stands, list(y.uses()))
        return 1
    others = [S.dims_of(z) for j, z in enumerate(node.inputs) if j != at and z is not None]
    array = _without_copies(array, sizes, [D.numbers(d) for d in others])
    kept = x.const_value.size if x.const_value is not None else T.FIXED_MASK_ELEMENTS + 1
    if array.size >= kept:
        return 0
    node.replace_input_with(at, op.const(array, x.dtype))
    return 1


def _stands_for(node: ir.Node, at: int, array: np.ndarray) -> ir.Value | None:
    """Return the operand that a node gives as it is."""
    if is_op(node, "Where"):
        if at != 0 or array.any() != array.all():
            return None
        return node.inputs[1 if array.flat[0] else 2]
    if array.any() or (is_op(node, "Sub") and at == 0):
        return None
    return node.inputs[1 - at]


def _without_copies(
    array: np.ndarray, sizes: list[int] | None, others: list[list[int] | None]
) -> np.ndarray:
    """Return an array that gives the same where it is broadcast to ``sizes``."""
    for axis in range(array.ndim):
        back = axis - array.ndim  # counted from the last one, as broadcasting does
        if sizes is None or array.shape[axis] == 1:
            continue
        told = any(d is not None and len(d) >= -back and d[back] == sizes[back] for d in others)
        first = array.take([0], axis)
        if told and (array == first).all():
            array = first
    return array


__all__ = ["fixed_masks"]
