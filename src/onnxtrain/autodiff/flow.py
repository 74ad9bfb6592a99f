"""What gradients flow through, and how they add up."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import dims as D
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder

_SMALL = ("INT2", "UINT2", "INT4", "UINT4", "INT8", "UINT8", "INT16", "UINT16", "FLOAT4E2M1")
_EIGHT_BITS = ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ")
QUANTISED = frozenset(
    ir.DataType[name] for name in (*_SMALL, *_EIGHT_BITS) if name in ir.DataType.__members__
)
"""What QuantizeLinear gives: a gradient flows through it only if the user registered a rule."""


def carries_gradient(x: ir.Value) -> bool:
    """Tell whether a value is a float tensor, or a sequence or optional of them."""
    inner = x.type
    while isinstance(inner, ir.SequenceType | ir.OptionalType):
        inner = inner.elem_type
    return isinstance(inner, ir.TensorType) and inner.dtype in S.FLOATS


def accumulate(op: OpBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Give the sum of two gradients of one value; sequences are added element by element."""
    if not isinstance(a.type, ir.SequenceType):
        return op.Add(a, b)
    body = op.body([element_of(op, a), element_of(op, a)])
    left, right = body.graph.inputs
    right.shape = left.shape  # elements of the same value
    body.graph.outputs.append(body.Add(left, right))
    return op.SequenceMap(a, b, body=body.graph)


def element_of(op: OpBuilder, sequence: ir.Value) -> ir.Value:
    """Give a value that has the type of one element, with names for the sizes that vary."""
    assert isinstance(sequence.type, ir.SequenceType)
    name = op.names.fresh(f"{op.prefix}element")
    element = ir.Value(name=name, type=sequence.type.elem_type)
    dims = S.dims_of(sequence)
    if dims is not None:
        named = [D.symbol(f"{name}.{i}") if d is None else d for i, d in enumerate(dims)]
        S.set_dims(element, named)
    return element
