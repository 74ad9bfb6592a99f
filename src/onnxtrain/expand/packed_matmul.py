"""Products with weights of few bits, by operators on bytes that every runtime has.

A byte holds ``p = 8 / bits`` numbers of a row. With ``W_i`` the numbers in place ``i`` of all
bytes and ``x_i`` the columns ``i, i + p, ...`` of ``x``: ``x W^T = sum of x_i W_i^T``. So no number
has to change its place: a place is cut out of all bytes at once, scaled and multiplied. Not even
its bits move: ``(2^k q - 2^k z) (s / 2^k)`` is ``(q - z) s`` to the last bit. Columns of ``x`` that
belong together are put side by side before, which is a small matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, runtime_zero

MIN_BLOCK_SIZE = 16
"""Numbers that share a scale, at least, where kernels unpack them."""


@dataclasses.dataclass(frozen=True)
class PackedMatMul:
    """Weights ``[rows, width]`` of 2, 4 or 8 bits; ``block`` numbers of a row share a scale."""

    rows: int
    width: int
    block: int
    bits: int
    dtype: ir.DataType | None = ir.DataType.FLOAT
    """Of the scales, and of what is multiplied."""

    @property
    def parts(self) -> int:
        """How many numbers a byte holds."""
        return 8 // self.bits

    @property
    def _scales(self) -> int:
        return self.rows * (self.width // self.block)

    def fits(self) -> bool:
        """Return whether weights of this form can be unpacked so."""
        return (
            self.bits in (2, 4, 8)
            and self.block >= MIN_BLOCK_SIZE
            and self.width % self.block == 0
            and self.dtype == ir.DataType.FLOAT
        )

    def apart(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """Return ``x``, its columns sorted by their place in a byte."""
        return self._turned(op, x, [self.width // self.parts, self.parts])

    def together(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """Return ``x``, its columns in the order of the weights again."""
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
        """Return the weights as floats, ``[rows, width / parts]`` for each place in a byte.

        Args:
            op: the builder.
            b: the bytes, in any shape.
            scales: one per block, in any shape.
            points: constant zero points, packed like the weights; half of the range by default.
            wait: what must be there before the first weight is unpacked, where ``b`` is constant.
        """
        late = None if wait is None else runtime_zero(op, wait)
        sizes = [self._scales, self.block // self.parts]
        # A view of constants alone would be stored beside them, for every layer.
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
        """Return a number that is only known when ``late`` is, if there is such a zero."""
        if late is None:
            return op.const([value], dtype)
        if dtype == ir.DataType.INT64:
            return op.Add(late, op.const([int(value)]))
        if dtype == ir.DataType.UINT8:  # kernels add no bytes
            return op.Cast(op.Add(late, op.const([int(value)])), to=dtype)
        return op.Add(op.Cast(late, to=dtype), op.const([value], dtype))

    def _points(
        self, op: OpBuilder, points: ir.Value | None, place: int, flat: ir.Value
    ) -> ir.Value:
        """Return the zero points of all blocks in one place of the bytes, a byte each."""
        if points is None:
            half = np.array([1 << (self.bits - 1 + place)], np.uint8)
            zeros = op.Expand(op.const(half), flat)
            S.set_dims(zeros, [self._scales])
            return zeros
        every = unpack_zero_points(points, self.rows, self.width // self.block, self.bits)
        return op.const(every.reshape(-1) << np.uint8(place))

    def product(self, op: OpBuilder, x: ir.Value, weights: Sequence[ir.Value]) -> ir.Value:
        """Return ``x W^T`` of columns that :meth:`apart` sorted."""
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
        """Return ``dy W``, its columns sorted by place."""
        products = [op.MatMul(dy, w) for w in weights]
        return products[0] if self.parts == 1 else op.Concat(*products, axis=-1)


def unpack_zero_points(points: ir.Value, rows: int, blocks: int, bits: int) -> np.ndarray:
    """Return constant zero points, packed one behind the other in a file, as ``[rows, blocks]``."""
    raw = S.constant_of(points)
    assert raw is not None
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = (raw.reshape(rows, -1)[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return np.ascontiguousarray(numbers.reshape(rows, -1)[:, :blocks])


__all__ = ["MIN_BLOCK_SIZE", "PackedMatMul", "unpack_zero_points"]
