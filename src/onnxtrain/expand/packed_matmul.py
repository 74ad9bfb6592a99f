"""Matmul with n-bit weights, unpacked by byte operators that every runtime has.

A byte holds ``p = 8 / bits`` consecutive weights of a row. Let ``W_i`` be the weights in position
``i`` of all bytes, and ``x_i`` the columns ``i, i + p, ...`` of ``x``. Then ``x W^T = sum_i x_i
W_i^T``, and no weight has to move: position ``i`` is masked out of all bytes at once, scaled and
multiplied. The bits need no shift either: ``(2^k q - 2^k z) (s / 2^k)`` equals ``(q - z) s`` bit
for bit. The columns of ``x``, a small matrix, are grouped by position beforehand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, runtime_zero

MIN_BLOCK_SIZE = 16
"""Smallest number of weights that share a scale for which kernels unpack."""


@dataclasses.dataclass(frozen=True)
class PackedMatMul:
    """Weights ``[rows, width]`` of 2, 4 or 8 bits; ``block`` weights of a row share a scale."""

    rows: int
    width: int
    block: int
    bits: int
    dtype: ir.DataType | None = ir.DataType.FLOAT
    """Element type of the scales and of the matmul."""

    @property
    def parts(self) -> int:
        """Weights per byte."""
        return 8 // self.bits

    @property
    def _scales(self) -> int:
        return self.rows * (self.width // self.block)

    def fits(self) -> bool:
        """Return whether these weights can be unpacked this way."""
        return (
            self.bits in (2, 4, 8)
            and self.block >= MIN_BLOCK_SIZE
            and self.width % self.block == 0
            and self.dtype == ir.DataType.FLOAT
        )

    def group_columns(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """Return ``x`` with its columns grouped by their position in a byte."""
        return self._turned(op, x, [self.width // self.parts, self.parts])

    def ungroup_columns(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """Return ``x`` with its columns back in the order of the weights."""
        return self._turned(op, x, [self.parts, self.width // self.parts])

    def _turned(self, op: OpBuilder, x: ir.Value, sizes: list[int]) -> ir.Value:
        if self.parts == 1:
            return x
        kept = [0] * (op.rank(x) - 1)
        turned = op.Reshape(op.mT(op.Reshape(x, [*kept, *sizes])), [*kept, self.width])
        S.set_dims(turned, op.dims(x))
        return turned

    def weights(
        self,
        op: OpBuilder,
        b: ir.Value,
        scales: ir.Value,
        points: ir.Value | None = None,
        wait: ir.Value | None = None,
    ) -> list[ir.Value]:
        """Return the weights as floats, ``[rows, width / parts]`` for each position in a byte.

        Args:
            op: the builder.
            b: the bytes, in any shape.
            scales: one per block, in any shape.
            points: constant zero points, packed like the weights; half of the range by default.
            wait: a value to unpack after. Without it, onnxruntime folds constant weights into
                unpacked copies when it loads the model.
        """
        late = None if wait is None else runtime_zero(op, wait)
        sizes = [self._scales, self.block // self.parts]
        # onnxruntime would fold a Reshape of constants into a copy, for every layer.
        flat = self._number(op, self._scales, ir.DataType.INT64, late)
        weights = []
        for i in range(self.parts):
            place = self.bits * i
            numbers, scale = b, op.Reshape(scales, flat)
            S.set_dims(scale, [self._scales])
            if self.parts > 1:
                mask = ((1 << self.bits) - 1) << place
                numbers = op.BitwiseAnd(b, self._number(op, mask, ir.DataType.UINT8, late))
            if place or (self.parts == 1 and late is not None):
                scale = op.Mul(scale, self._number(op, 2.0**-place, self.dtype, late))
            zeros = self._points(op, points, place, flat)
            wide = op.DequantizeLinear(op.Reshape(numbers, sizes), scale, zeros, axis=0)
            weights.append(op.Reshape(wide, [self.rows, self.width // self.parts]))
        return weights

    def _number(
        self, op: OpBuilder, value: float, dtype: ir.DataType | None, late: ir.Value | None
    ) -> ir.Value:
        """Return a constant; with ``late``, a run-time zero, it is not folded at load time."""
        if late is None:
            return op.const([value], dtype)
        if dtype == ir.DataType.INT64:
            return op.Add(late, op.const([int(value)]))
        if dtype == ir.DataType.UINT8:  # Add has no uint8 kernel
            return op.Cast(op.Add(late, op.const([int(value)])), to=dtype)
        return op.Add(op.Cast(late, to=dtype), op.const([value], dtype))

    def _points(
        self, op: OpBuilder, points: ir.Value | None, place: int, flat: ir.Value
    ) -> ir.Value:
        """Return the zero points of all blocks for one position in the bytes, as uint8."""
        if points is None:
            half = np.array([1 << (self.bits - 1 + place)], np.uint8)
            zeros = op.Expand(op.const(half), flat)
            S.set_dims(zeros, [self._scales])
            return zeros
        every = unpack_zero_points(points, self.rows, self.width // self.block, self.bits)
        return op.const(every.reshape(-1) << np.uint8(place))

    def product(self, op: OpBuilder, x: ir.Value, weights: Sequence[ir.Value]) -> ir.Value:
        """Return ``x W^T`` for columns grouped by :meth:`group_columns`."""
        columns = [x]
        if self.parts > 1:
            sizes = op.const([self.width // self.parts] * self.parts)
            columns = op.Split(x, sizes, axis=-1, _outputs=self.parts)
        flat = op.rank(x) == 2
        total = None
        for c, w in zip(columns, weights, strict=True):
            if flat:
                total = op.Gemm(c, w, total, transB=1)
            else:
                y = op.MatMul(c, op.mT(w))
                total = y if total is None else op.Add(total, y)
        assert total is not None
        return total

    def matmul_transposed_weight(
        self, op: OpBuilder, dy: ir.Value, weights: Sequence[ir.Value]
    ) -> ir.Value:
        """Return ``dy W`` with its columns grouped by position."""
        products = [op.MatMul(dy, w) for w in weights]
        return products[0] if self.parts == 1 else op.Concat(*products, axis=-1)


def unpack_zero_points(points: ir.Value, rows: int, blocks: int, bits: int) -> np.ndarray:
    """Return constant zero points, packed in bytes, as ``[rows, blocks]``."""
    raw = S.constant_of(points)
    assert raw is not None
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = (raw.reshape(rows, -1)[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return np.ascontiguousarray(numbers.reshape(rows, -1)[:, :blocks])


__all__ = ["MIN_BLOCK_SIZE", "PackedMatMul", "unpack_zero_points"]
