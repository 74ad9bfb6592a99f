"""Comparisons without booleans: the number 0 or 1.

For runtimes that have neither comparisons nor ``Cast``. The signs of differences say the same as
comparisons, but for infinities; where those may occur, nothing is lowered.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_standard
from onnxtrain.lowering.registry import lower
from onnxtrain.lowering.value_range import may_be_infinite

_MOVING = ("Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")


@lower("Cast")
def cast_of_a_comparison(op, x, *, to, saturate):
    """The number that stands for the truth."""
    dtype = ir.DataType(to)
    if x.dtype != ir.DataType.BOOL or not dtype.is_floating_point():
        return None
    return _mask(op, x, dtype)


def _mask(op: OpBuilder, x: ir.Value, dtype: ir.DataType) -> ir.Value | None:
    """Return a condition as 0 and 1, ``None`` if it is not made of comparisons of finite floats."""
    array = op.constant(x)
    if array is not None:
        return op.const(array.astype(np.float32), dtype)
    node = x.producer()
    if node is None or not is_standard(node) or node.inputs[0] is None:
        return None
    kind, a = node.op_type, node.inputs[0]
    if kind in _MOVING:
        inner = _mask(op, a, dtype)
        if inner is None:
            return None
        moved = ir.Node(
            "", kind, [inner, *node.inputs[1:]], list(node.attributes.values()), version=op.opset
        )
        return op.append(moved)
    if kind == "Not":
        inner = _mask(op, a, dtype)
        return None if inner is None else op.Sub(1.0, inner)
    b = node.inputs[1] if len(node.inputs) > 1 else None
    if b is None:
        return None
    if kind in ("And", "Or"):
        left, right = _mask(op, a, dtype), _mask(op, b, dtype)
        if left is None or right is None:
            return None
        if kind == "And":
            return op.Mul(left, right)
        return op.Sub(1.0, op.Mul(op.Sub(1.0, left), op.Sub(1.0, right)))
    return _compared(op, kind, a, b) if a.dtype == dtype else None


def _compared(op: OpBuilder, kind: str, a: ir.Value, b: ir.Value) -> ir.Value | None:
    if may_be_infinite(a) or may_be_infinite(b):
        return None
    sign = op.Sign(op.Sub(a, b))
    if kind == "Equal":
        return op.Sub(1.0, op.Abs(sign))
    if kind in ("Greater", "LessOrEqual"):
        above = op.Relu(sign)
        return above if kind == "Greater" else op.Sub(1.0, above)
    if kind in ("Less", "GreaterOrEqual"):
        below = op.Relu(op.Neg(sign))
        return below if kind == "Less" else op.Sub(1.0, below)
    return None
