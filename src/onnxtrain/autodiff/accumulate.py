"""What gradients flow through, and how they add up."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder

_SMALL = ("INT2", "UINT2", "INT4", "UINT4", "INT8", "UINT8", "INT16", "UINT16", "FLOAT4E2M1")
_EIGHT_BITS = ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ")
QUANTISED = frozenset(
    ir.DataType[name] for name in (*_SMALL, *_EIGHT_BITS) if name in ir.DataType.__members__
)
"""What QuantizeLinear gives: a gradient flows through it only if the user registered a rule."""


def carries_gradient(x: ir.Value) -> bool:
    """Return whether a value is a float tensor, or a sequence or optional of them."""
    inner = x.type
    while isinstance(inner, ir.SequenceType | ir.OptionalType):
        inner = inner.elem_type
    return isinstance(inner, ir.TensorType) and inner.dtype in S.FLOATS


def accumulate(op: OpBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Return the sum of two gradients of one value; sequences are added element by element."""
    if not isinstance(a.type, ir.SequenceType):
        return op.Add(a, b)
    return op.map_sequences(lambda body, x, y: body.Add(x, y), a, b)
