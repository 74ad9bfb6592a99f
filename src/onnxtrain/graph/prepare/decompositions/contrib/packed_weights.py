"""Weights of 2, 4 or 8 bits in blocks, as tensors of the standard's narrow types.

They stay narrow: what is multiplied is the result of a DequantizeLinear of the graph. Each block is
a row of its own, since a scale per row is dequantised faster than a scale per block of a row.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_op
from onnxtrain.graph.prepare.decompositions.contrib.heads import refuse


@dataclasses.dataclass(frozen=True)
class Packed:
    """How whole numbers lie in bytes: the first in the lowest bits; ``block`` share a scale."""

    bits: int
    block: int | None
    """``None``: a whole row."""

    @property
    def middle(self) -> int:
        """The zero point where none is given."""
        return 1 << (self.bits - 1)

    def unpack(self, array: np.ndarray) -> np.ndarray:
        """Return the numbers of the last axis, one per element."""
        if self.bits == 8:
            return array
        shifts = np.arange(0, 8, self.bits, dtype=np.uint8)
        numbers = (array[..., None] >> shifts) & np.uint8((1 << self.bits) - 1)
        return numbers.reshape(*array.shape[:-1], -1)

    @property
    def dtype(self) -> ir.DataType:
        """The standard's type that holds the numbers."""
        return ir.DataType.UINT8 if self.bits == 8 else ir.DataType.UINT4


def constant_bytes(op: OpBuilder, x: ir.Value | None) -> np.ndarray | None:
    """Return the array of a constant, also of one that a Reshape turns into another shape."""
    maker = None if x is None else x.producer()
    if maker is None or not is_op(maker, "Reshape"):
        return op.constant(x)
    array, shape = op.constant(maker.inputs[0]), op.constant(maker.inputs[1])
    return None if array is None or shape is None else array.reshape(shape.tolist())


def dequantised(
    op: OpBuilder, weights: ir.Value, scales: ir.Value, points: ir.Value | None, packed: Packed,
    node: ir.Node, *, rows: int | None = None, width: int | None = None,
) -> ir.Value:  # fmt: skip
    """Return [..., rows, width] of ``(numbers - zero point) * scale``; the numbers are constants.

    Args:
        op: the builder.
        weights: packed numbers, [..., rows, bytes].
        scales: one per block, [..., rows] or [..., rows, blocks].
        points: zero points, packed like the weights along blocks, or floats.
        packed: the packing.
        node: whose weights they are, for messages.
        rows: how many rows the bytes are, if their shape does not tell.
        width: how many numbers of a row count; all by default.
    """
    raw = constant_bytes(op, weights)
    if raw is None or packed.bits not in (2, 4, 8):
        refuse(node, "can be expressed for constant weights of 2, 4 or 8 bits only")
    numbers = packed.unpack(raw if rows is None else raw.reshape(rows, -1))
    lead, size = list(numbers.shape[:-1]), numbers.shape[-1]
    block = packed.block or size
    blocks = -(-size // block)
    if blocks * block != size:
        refuse(node, "rows that are no whole number of blocks")
    count = int(np.prod(lead)) * blocks
    table = op.const(numbers.reshape(count, block).astype(packed.dtype.numpy()), packed.dtype)
    scale = op.Reshape(scales, [count])
    zeros, offset = _points(op, points, packed, lead, blocks, count, node)
    wide = op.DequantizeLinear(table, scale, zeros, axis=0)
    if offset is not None:
        wide = op.Sub(wide, op.Mul(op.Unsqueeze(scale, [1]), offset))
    y = op.Reshape(wide, [*lead, size])
    if width is not None and width != size:
        y = op.Slice(y, [0], [width], [len(lead)])
    return y


def _points(
    op: OpBuilder, points: ir.Value | None, packed: Packed, lead: list[int], blocks: int,
    rows: int, node: ir.Node,
) -> tuple[ir.Value | None, ir.Value | None]:  # fmt: skip
    """Return zero points as integers, or as floats [rows, 1] that have to be subtracted."""
    if points is None:
        middle = np.full(rows, packed.middle, np.uint8).astype(packed.dtype.numpy())
        return op.const(middle, packed.dtype), None
    if points.dtype != ir.DataType.UINT8:
        return None, op.Reshape(points, [rows, 1])
    raw = op.constant(points)
    if raw is None:
        refuse(node, "zero points that are computed")
    # Without blocks, the points of all rows lie one behind the other; else rows are padded.
    lines = int(np.prod(lead)) if packed.block else lead[0]
    each = rows // lines
    whole = packed.unpack(raw.reshape(lines, -1))[:, :each].reshape(-1)
    return op.const(whole.astype(packed.dtype.numpy()), packed.dtype), None
