"""Arithmetic on sizes: Python numbers where they are known, int64 values of shape [1] where not."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder.op_builder import OpBuilder
from onnxtrain.graph.builder.shape_ops import Size

__all__ = ["Size", "at_least", "at_most", "element", "minus", "plus", "times"]


def plus(op: OpBuilder, a: Size, b: Size) -> Size:
    """Return ``a + b``."""
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if a == 0:
        return b
    return a if b == 0 else _known(op.Add(_value(op, a), _value(op, b)))


def minus(op: OpBuilder, a: Size, b: Size) -> Size:
    """Return ``a - b``."""
    if isinstance(a, int) and isinstance(b, int):
        return a - b
    if a is b:
        return 0
    return a if b == 0 else _known(op.Sub(_value(op, a), _value(op, b)))


def times(op: OpBuilder, a: Size, b: int) -> Size:
    """Return ``a * b``."""
    if isinstance(a, int):
        return a * b
    return a if b == 1 else _known(op.Mul(a, op.const([b])))


def at_least(op: OpBuilder, a: Size, low: int) -> Size:
    """Return the larger one."""
    return max(a, low) if isinstance(a, int) else op.Max(a, op.const([low]))


def at_most(op: OpBuilder, a: Size, high: Size) -> Size:
    """Return the smaller one."""
    if isinstance(a, int) and isinstance(high, int):
        return min(a, high)
    return a if a == 0 else op.Min(_value(op, a), _value(op, high))


def element(op: OpBuilder, vector: ir.Value, i: int) -> Size:
    """Return one element of an integer vector of known length."""
    array = op.constant(vector)
    if array is not None:
        return int(array.reshape(-1)[i])
    part = vector if op.dims(vector) == (1,) else op.Slice(vector, [i], [i + 1])
    return op.cast(part, ir.DataType.INT64)


def _value(op: OpBuilder, a: Size) -> ir.Value:
    return op.const([a]) if isinstance(a, int) else a


def _known(a: ir.Value) -> Size:
    """Return the number that a result turns out to be, as in ``n + 1 - n``."""
    dims = S.symbolic_of(a)
    return dims[0] if dims is not None and len(dims) == 1 and isinstance(dims[0], int) else a
