"""Sequences of tensors whose structure is known, and what can be read from them."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes import dims as D


@dataclasses.dataclass(frozen=True)
class Items:
    """A sequence of so many known tensors."""

    values: list[ir.Value]

    def at(self, op: OpBuilder, position: ir.Value) -> ir.Value | None:
        """Return one element; ``None`` if it is chosen at run time only, among various shapes."""
        where = scalar_of(position)
        if where is not None:
            inside = -len(self.values) <= where < len(self.values)
            return self.values[where] if inside else None
        first = self.values[0] if self.values else None
        if first is None or not all(S.same_shape(x, first) for x in self.values):
            return None
        return op.Gather(self.joined(op, 0, new_axis=True), position, axis=0)

    def length(self, op: OpBuilder) -> ir.Value:
        """Return the number of elements as an int64 scalar."""
        return op.const(len(self.values))

    def joined(self, op: OpBuilder, axis: int, new_axis: bool) -> ir.Value | None:
        """Return the elements concatenated or stacked along an axis."""
        if not self.values:
            return None
        parts = [op.Unsqueeze(x, [axis]) for x in self.values] if new_axis else self.values
        return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=axis)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """A tensor cut along an axis into pieces, whose number is only known at run time."""

    x: ir.Value
    axis: int
    size: int | None
    """Of a piece along the axis; the last one may be shorter. ``None``: single slices."""
    keepdims: bool

    def at(self, op: OpBuilder, position: ir.Value) -> ir.Value | None:
        """Return one piece."""
        if self.size is None:
            piece = op.Gather(self.x, position, axis=self.axis)
            return op.Unsqueeze(piece, [self.axis]) if self.keepdims else piece
        where = scalar_of(position)
        if where is not None and where >= 0:
            ends = [self.size * where, self.size * (where + 1)]
            return op.Slice(self.x, ends[:1], ends[1:], [self.axis])
        line = op.Reshape(op.cast(position, ir.DataType.INT64), [1])
        line = op.Where(op.Less(line, 0), op.Add(line, op.Unsqueeze(self.length(op), [0])), line)
        start = op.Mul(line, self.size)
        return op.Slice(self.x, start, op.Add(start, self.size), [self.axis])

    def length(self, op: OpBuilder) -> ir.Value:
        """Return the number of pieces as an int64 scalar."""
        total = op.vector([op.size(self.x, self.axis)])
        if self.size is not None and self.size > 1:
            total = op.Div(op.Add(total, self.size - 1), self.size)
        return op.Squeeze(total, [0])

    def joined(self, op: OpBuilder, axis: int, new_axis: bool) -> ir.Value | None:
        """Return the pieces concatenated or stacked; ``None`` for what nobody writes."""
        rank = op.rank(self.x)
        if self.keepdims:
            return self.x if not new_axis and axis % rank == self.axis else None
        if new_axis:
            return op.move_axis(self.x, self.axis, axis)
        axis %= rank - 1
        x = op.move_axis(self.x, self.axis, axis)
        sizes = [op.size(x, a) for a in range(rank)]
        dims = op.dims(x)
        merged = D.mul(dims[axis], dims[axis + 1])
        merged = merged if isinstance(merged, int) else -1
        return op.reshape(x, [*sizes[:axis], merged, *sizes[axis + 2 :]])


Sequence = Items | Chunks


def scalar_of(x: ir.Value | None) -> int | None:
    """Return a constant integer, ``None`` if it is computed or absent."""
    array = S.constant_of(x)
    return None if array is None or array.size != 1 else int(array.reshape(-1)[0])
