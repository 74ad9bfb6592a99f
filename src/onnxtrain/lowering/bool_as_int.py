"""Booleans as the integers 0 and 1, for runtimes that have no comparisons.

Everything here is exact, for infinities and NaN too: the largest of 0 and a difference of floats
says which of two numbers is larger, and for integers a quotient that is cut off does.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_standard
from onnxtrain.lowering.value_range import may_be_infinite

BOOL, INT64 = ir.DataType.BOOL, ir.DataType.INT64
WHOLE = (ir.DataType.INT32, INT64)
_MOVING = frozenset(
    {
        *("Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Tile"),
        *("Transpose", "Unsqueeze"),
    }
)
_Seen = dict[ir.Value, ir.Value | None]


def as_integer(op: OpBuilder, x: ir.Value) -> ir.Value | None:
    """Return a boolean tensor as int64, ``None`` if it is not made of what is known here."""
    return _integer(op, x, {})


def _integer(op: OpBuilder, x: ir.Value, seen: _Seen) -> ir.Value | None:
    if x not in seen:
        seen[x] = _look(op, x, seen)
    return seen[x]


def _look(op: OpBuilder, x: ir.Value, seen: _Seen) -> ir.Value | None:
    array = op.constant(x)
    if array is not None:
        return op.const(array.astype(np.int64))
    node = x.producer()
    if node is None or not is_standard(node) or not node.inputs or node.inputs[0] is None:
        return None
    kind, inputs = node.op_type, list(node.inputs)
    a = node.inputs[0]
    if kind == "Cast":
        return _not(op, _equal(op, a, op.const(0, a.dtype)))
    if kind in ("Not", "And", "Or", "Xor") or (kind == "Equal" and a.dtype == BOOL):
        return _combined(op, kind, [_integer(op, v, seen) for v in inputs if v is not None])
    if kind == "IsNaN":
        return _not(op, _is_number(op, a))
    if kind == "IsInf":
        return _is_infinite(op, node)
    b = inputs[1] if len(inputs) > 1 else None
    if kind == "Equal" and b is not None:
        return _equal(op, a, b)
    if kind in ("Greater", "Less") and b is not None:
        return _above(op, a, b) if kind == "Greater" else _above(op, b, a)
    if kind in ("GreaterOrEqual", "LessOrEqual") and b is not None:
        low, high = (a, b) if kind == "GreaterOrEqual" else (b, a)
        return _and(op, [_not(op, _above(op, high, low)), *_numbers(op, a, b)])
    if kind in ("ReduceMax", "ReduceMin") or kind in _MOVING:
        return _moved(op, node, [_integer(op, a, seen), *inputs[1:]])
    if kind == "Concat":
        return _moved(op, node, [None if v is None else _integer(op, v, seen) for v in inputs])
    return None


def _is_infinite(op: OpBuilder, node: ir.Node) -> ir.Value | None:
    x = node.inputs[0]
    assert x is not None
    top = op.const(float(ir.DataType(x.dtype).max), x.dtype)
    known = S.attributes_of(node, op.opset)
    parts = [_above(op, x, top)] if known["detect_positive"] else []
    parts += [_above(op, op.Neg(top), x)] if known["detect_negative"] else []
    return _combined(op, "Or", parts) if len(parts) == 2 else next(iter(parts), None)


def _moved(op: OpBuilder, node: ir.Node, inputs: list[ir.Value | None]) -> ir.Value | None:
    """Return the same node over integers."""
    if inputs[0] is None or (node.op_type == "Concat" and None in inputs):
        return None
    return op.append(
        ir.Node("", node.op_type, inputs, list(node.attributes.values()), version=op.opset)
    )


def _combined(op: OpBuilder, kind: str, parts: list[ir.Value | None]) -> ir.Value | None:
    a, b = parts[0], parts[-1]
    if a is None or b is None:
        return None
    if kind == "Not":
        return _not(op, a)
    if kind == "And":
        return op.Mul(a, b)
    if kind == "Or":
        return op.Sub(op.Add(a, b), op.Mul(a, b))
    apart = op.Sub(a, b)
    apart = op.Mul(apart, apart)
    return apart if kind == "Xor" else _not(op, apart)


def _not(op: OpBuilder, a: ir.Value | None) -> ir.Value | None:
    return None if a is None else op.Sub(op.const(1), a)


def _and(op: OpBuilder, parts: list[ir.Value | None]) -> ir.Value | None:
    y = parts[0]
    for part in parts[1:]:
        if y is None or part is None:
            return None
        y = op.Mul(y, part)
    return y


def _above(op: OpBuilder, a: ir.Value, b: ir.Value) -> ir.Value | None:
    """Return ``a > b``."""
    assert a.dtype is not None
    if a.dtype in WHOLE:  # (|d| + d) / (|d| + 1), cut off
        d = op.Sub(a, b)
        size = op.Abs(d)
        y = op.Div(op.Add(size, d), op.Add(size, op.const(1, a.dtype)))
        return op.cast(y, INT64)
    return _positive(op, op.Sub(a, b)) if a.dtype.is_floating_point() else None


def _positive(op: OpBuilder, d: ir.Value) -> ir.Value | None:
    """Return ``d > 0``: the place of the larger of 0 and d; the first of two that are equal."""
    dims = op.static(d)
    if dims is None:
        return None
    last = len(dims)
    both = op.Concat(op.const(np.zeros([*dims, 1]), d.dtype), op.Unsqueeze(d, [last]), axis=last)
    return op.ArgMax(both, axis=last, keepdims=0)


def _equal(op: OpBuilder, a: ir.Value, b: ir.Value) -> ir.Value | None:
    """Return ``a == b``: infinity less infinity is NaN, which is neither above nor below."""
    assert a.dtype is not None
    if a.dtype in WHOLE:  # 1 - 2 |d| / (|d| + 1), cut off
        size = op.Abs(op.Sub(a, b))
        one = op.const(1, a.dtype)
        y = op.Sub(one, op.Div(op.Add(size, size), op.Add(size, one)))
        return op.cast(y, INT64)
    if not a.dtype.is_floating_point():
        return None
    apart = [_above(op, a, b), _above(op, b, a)]
    return _and(op, [*(_not(op, v) for v in apart), *_numbers(op, a, b)])


def _numbers(op: OpBuilder, *values: ir.Value) -> list[ir.Value | None]:
    """Give, for each float that may be NaN, where it is not."""
    masks = []
    for v in values:
        if v.dtype in WHOLE or not may_be_infinite(v):
            continue
        masks.append(_is_number(op, v))
    return masks


def _is_number(op: OpBuilder, x: ir.Value) -> ir.Value | None:
    """Return where ``x`` is above 0 or below 1."""
    zero, one = op.const(0, x.dtype), op.const(1, x.dtype)
    return _combined(op, "Or", [_above(op, x, zero), _above(op, one, x)])
