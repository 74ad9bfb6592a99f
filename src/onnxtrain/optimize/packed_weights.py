"""Frozen weights are dequantised where they are used, each time anew.

``(q - z) * (s + 0) = (q - z) * s``: the zero depends on the other operand of the reader. Without
it, a runtime dequantises all layers at the start and keeps them until the backward pass has read
them: the whole model in float32. With it, one layer at a time is unpacked.

Products with packed weights as plain products, the weights unpacked by operators on bytes.

``x W^T = sum of x_i W_i^T`` over the places ``i`` of a byte (:mod:`~onnxtrain.expand.
packed_parts`). A kernel that unpacks number by number takes longer than a product of a few hundred
rows; three passes over the bytes do not. Weights are unpacked when ``x`` is there, and again in the
backward pass, so that no more than one layer's are floats at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnxtrain.expand.packed_matmul import PackedMatMul
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, copy_node, replace_value, runtime_zero
from onnxtrain.graph.nodes import is_op, nodes, op_key
from onnxtrain.thresholds import DEQUANTIZE_AT_USE_ELEMENTS

_MOVES = ("Transpose", "Reshape", "Slice", "Cast", "Identity", "Squeeze", "Unsqueeze")


def dequantize_at_use(model: ir.Model, op: OpBuilder) -> int:
    """Let each reader of a frozen quantised weight have its own copy, made when it is needed."""
    changed = 0
    for node in nodes(model.graph, "DequantizeLinear"):
        if not _is_frozen(node):
            continue
        for path, reader, i in list(_readers(node)):
            wait = _operand(reader, i)
            if wait is None:
                continue
            _append_own_copy(op.before(reader), [node, *path], reader, i, wait)
            changed += 1
    return changed


def _is_frozen(node: ir.Node) -> bool:
    constant = all(x is None or S.constant_of(x) is not None for x in node.inputs)
    weights = node.inputs[0]
    return (
        constant
        and weights is not None
        and weights.const_value is not None
        and weights.const_value.size >= DEQUANTIZE_AT_USE_ELEMENTS
    )


def _readers(node: ir.Node) -> Iterator[tuple[list[ir.Node], ir.Node, int]]:
    """Return what reads a weight, behind nodes that only move it: (moves, reader, which input)."""
    pending: list[tuple[list[ir.Node], ir.Value]] = [([], node.outputs[0])]
    while pending:
        path, value = pending.pop()
        if value.is_graph_output():
            continue
        for reader, i in list(value.uses()):
            if reader.graph is not node.graph:
                continue
            moved = i == 0 and is_op(reader, *_MOVES)
            if moved and all(S.constant_of(x) is not None for x in reader.inputs[1:] if x):
                pending.append(([*path, reader], reader.outputs[0]))
            else:
                yield path, reader, i


def _operand(reader: ir.Node, i: int) -> ir.Value | None:
    """Return another float operand of a reader that is computed or fed."""
    for j, x in enumerate(reader.inputs):
        if j != i and x is not None and S.is_float(x) and x.const_value is None and x.shape:
            return x
    return None


def _append_own_copy(
    op: OpBuilder, chain: list[ir.Node], reader: ir.Node, i: int, wait: ir.Value
) -> None:
    first, *moves = chain
    scale = first.inputs[1]
    assert scale is not None
    zero = op.Cast(op.Squeeze(runtime_zero(op, wait), [0]), to=scale.dtype)
    late = op.Add(scale, zero)
    late.shape = scale.shape
    inputs = [first.inputs[0], late, *first.inputs[2:]]
    value = copy_node(op, first, inputs)
    for move in moves:
        value = copy_node(op, move, [value, *move.inputs[1:]])
    reader.replace_input_with(i, value)


_INPUTS = 6


def unpack_nbits_matmul(model: ir.Model, op: OpBuilder) -> int:
    """Replace products whose packed weights are constants; return how many."""
    changed = 0
    for node in list(model.graph):
        if op_key(node) == "com.microsoft::MatMulNBits" and _unpacked_matmul(op.before(node), node):
            changed += 1
    return changed


def _unpacked_matmul(op: OpBuilder, node: ir.Node) -> bool:
    x, b, scales, points, groups, bias = [*node.inputs, *[None] * _INPUTS][:_INPUTS]
    named = S.attributes_of(node, 1)
    if x is None or scales is None or b is None or b.const_value is None or groups is not None:
        return False
    sizes = named["N"], named["K"], named["block_size"], named.get("bits", 4)
    form = PackedMatMul(*sizes, scales.dtype)
    if not form.fits() or S.dims_of(x) is None:
        return False
    if points is not None and (points.const_value is None or points.dtype != ir.DataType.UINT8):
        return False
    uses = list(node.outputs[0].uses())
    weights = form.weights(op, b, scales, points, wait=x)
    y = form.product(op, form.group_columns(op, x), weights)
    if bias is not None:
        y = op.Add(y, bias)
    replace_value(node.outputs[0], y, uses)
    return True
