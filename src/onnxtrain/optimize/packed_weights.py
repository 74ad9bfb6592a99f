"""Unpack frozen quantized weights where they are used, one layer at a time.

- `dequantize_at_use`: every reader of a quantized weight gets its own DequantizeLinear.
- `unpack_nbits_matmul` (wasm): MatMulNBits becomes a plain matmul with weights unpacked by byte
  operators.
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
    """Give each reader of a frozen quantized weight its own DequantizeLinear; return how many.

        before:  w = DequantizeLinear(q, s, z), read by the forward and the backward pass
        after:   each reader: DequantizeLinear(q, s + 0, z), with 0 computed from its other operand

    Without the dependency, onnxruntime dequantizes all layers at the start and keeps them until the
    backward pass has read them: the whole model in float32. With it, one layer at a time.
    """
    changed = 0
    for node in nodes(model.graph, "DequantizeLinear"):
        if not _is_frozen(node):
            continue
        for path, reader, i in list(_readers(node)):
            wait_for = _computed_operand(reader, i)
            if wait_for is None:
                continue
            _append_own_copy(op.before(reader), [node, *path], reader, i, wait_for)
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
    """Yield the readers of a weight after nodes that only move it: moves, reader, input index."""
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


def _computed_operand(reader: ir.Node, i: int) -> ir.Value | None:
    """Return another float operand of a reader that is not an initializer."""
    for j, x in enumerate(reader.inputs):
        if j != i and x is not None and S.is_float(x) and x.const_value is None and x.shape:
            return x
    return None


def _append_own_copy(
    op: OpBuilder, chain: list[ir.Node], reader: ir.Node, i: int, wait_for: ir.Value
) -> None:
    first, *moves = chain
    scale = first.inputs[1]
    assert scale is not None
    zero = op.Cast(op.Squeeze(runtime_zero(op, wait_for), [0]), to=scale.dtype)
    own_scale = op.Add(scale, zero)
    own_scale.shape = scale.shape
    inputs = [first.inputs[0], own_scale, *first.inputs[2:]]
    value = copy_node(op, first, inputs)
    for move in moves:
        value = copy_node(op, move, [value, *move.inputs[1:]])
    reader.replace_input_with(i, value)


_MATMUL_NBITS_INPUTS = 6  # with zero points, g_idx and bias, which are optional


def unpack_nbits_matmul(model: ir.Model, op: OpBuilder) -> int:
    """Replace MatMulNBits of constant weights with plain matmuls; return how many.

        before:  MatMulNBits(x, q)
        after:   x W^T = sum over positions i in a byte of x_i W_i^T

    On wasm, a kernel that unpacks element by element takes longer than a matmul of a few hundred
    rows; three passes over bytes do not. Weights are unpacked once `x` is computed, and again in
    the backward pass, so that only one layer is in float32 at a time.
    """
    changed = 0
    for node in list(model.graph):
        if op_key(node) == "com.microsoft::MatMulNBits" and _unpacked_matmul(op.before(node), node):
            changed += 1
    return changed


def _unpacked_matmul(op: OpBuilder, node: ir.Node) -> bool:
    x, b, scales, zero_points, groups, bias = [
        *node.inputs,
        *[None] * _MATMUL_NBITS_INPUTS,
    ][:_MATMUL_NBITS_INPUTS]
    attributes = S.attributes_of(node, 1)
    if x is None or scales is None or b is None or b.const_value is None or groups is not None:
        return False
    sizes = attributes["N"], attributes["K"], attributes["block_size"], attributes.get("bits", 4)
    packed = PackedMatMul(*sizes, scales.dtype)
    if not packed.fits() or S.dims_of(x) is None:
        return False
    if zero_points is not None and (
        zero_points.const_value is None or zero_points.dtype != ir.DataType.UINT8
    ):
        return False
    uses = list(node.outputs[0].uses())
    weights = packed.weights(op, b, scales, zero_points, wait=x)
    y = packed.product(op, packed.group_columns(op, x), weights)
    if bias is not None:
        y = op.Add(y, bias)
    replace_value(node.outputs[0], y, uses)
    return True
