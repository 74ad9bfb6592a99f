"""Comparison and selection.

``a * m + b * (1 - m)`` is not ``Where(m, a, b)``: an infinity or NaN in the element that is not
selected comes through. The expansions use it only where both sides are finite.

Runtimes without booleans or Cast compare by arithmetic. For floats, the sign of a difference gives
the comparison, except for infinities: where these may occur, nothing is expanded.
``bool_as_int64`` computes a whole boolean expression with the integers 0 and 1. It is exact for
infinities and NaN: ArgMax over 0 and a difference compares floats, and a truncated quotient
compares integers.
"""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir

from onnxtrain.expand.expansions import LOWERING, TRAINING, expansion
from onnxtrain.expand.value_range import may_be_infinite
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_standard

_BOOL, _INT64, _DOUBLE = ir.DataType.BOOL, ir.DataType.INT64, ir.DataType.DOUBLE


_MAX_POSITIONS = 1 << 22  # elements; constant positions of larger tensors bloat the file


@expansion("Where", when=LOWERING)
def where_constant(op, condition, a, b):
    """A constant condition and -inf on one side: add 0 or -inf."""
    mask = op.constant(condition)
    for chosen, other, keep in ((a, b, True), (b, a, False)):
        filler = op.constant(other)
        if mask is None or filler is None or not np.all(np.isneginf(filler.astype(np.float64))):
            continue
        if not may_be_infinite(chosen):
            bias = np.where(mask == keep, 0.0, -np.inf)
            return op.Add(chosen, op.const(bias, a.dtype))
    return None


@expansion("Where", when=LOWERING)
def where_booleans(op, condition, a, b):
    """``(c and a) or (not c and b)``."""
    if a.dtype != _BOOL:
        return None
    return op.Or(op.And(condition, a), op.And(op.Not(condition), b))


@expansion("Where", when=LOWERING)
def where_integers(op, condition, a, b):
    """``a m + b (1 - m)``, exact for integers."""
    if a.dtype not in (ir.DataType.INT32, _INT64):
        return None
    m = op.Cast(condition, to=a.dtype)
    one = op.const(1, a.dtype)
    return op.Add(op.Mul(a, m), op.Mul(b, op.Sub(one, m)))


@expansion("Where", when=LOWERING)
def where_finite(op, condition, a, b):
    """``a m + b (1 - m)`` where both are finite; a constant -inf is added as ``log(m)``."""
    if not a.dtype.is_floating_point():
        return None
    if may_be_infinite(a):
        return _with_minus_infinity(op, condition, b, a, True)
    if may_be_infinite(b):
        return _with_minus_infinity(op, condition, a, b, False)
    m = op.Cast(condition, to=a.dtype)
    rest = op.Sub(1.0, m)
    left = _times(op, a, m)
    right = _times(op, b, rest)
    if left is None or right is None:
        return right if left is None else left
    return op.Add(left, right)


@expansion("Where", when=LOWERING)
def where_by_position(op, condition, a, b):
    """Concatenate both sides and gather: exact for every value, for static shapes."""
    shape = [S.dims_of(v) for v in (condition, a, b)]
    if any(d is None or not all(isinstance(e, int) for e in d) for d in shape):
        return None
    out = np.broadcast_shapes(*shape)  # pyright: ignore[reportArgumentType]
    count = int(np.prod(out))
    if count > _MAX_POSITIONS:
        return None
    positions = []
    start = 0
    for v in (a, b):
        dims = op.dims(v)
        n = int(np.prod(dims))
        positions.append(np.broadcast_to(np.arange(n).reshape(dims), out) + start)
        start += n
    both = op.Concat(op.Reshape(a, [-1]), op.Reshape(b, [-1]), axis=0)
    m = op.Cast(condition, to=_INT64)
    b_positions = op.const(positions[1])
    index = op.Add(b_positions, op.Mul(m, op.const(positions[0] - positions[1])))
    return op.Gather(both, index, axis=0)


def _with_minus_infinity(
    op: OpBuilder, condition: ir.Value, chosen: ir.Value, other: ir.Value, flip: bool
) -> ir.Value | None:
    filler = op.constant(other)
    if filler is None or not np.all(np.isneginf(filler.astype(np.float64))):
        return None
    if may_be_infinite(chosen):
        return None
    keep = op.Not(condition) if flip else condition
    return op.Add(chosen, op.Log(op.Cast(keep, to=chosen.dtype)))


def _times(op: OpBuilder, v: ir.Value, m: ir.Value) -> ir.Value | None:
    number = op.constant(v)
    if number is not None and number.size == 1 and number.ndim <= op.rank(m):
        c = float(number.reshape(()))
        if c == 0.0:
            return None
        if c == 1.0:
            return m
    return op.Mul(v, m)


@expansion("Equal", when=LOWERING)
def equal_floats(op, a, b):
    """Neither greater nor less, and not NaN: every number is above 0 or below 1."""
    if not a.dtype.is_floating_point():
        return None
    apart = op.Or(op.Greater(a, b), op.Less(a, b))
    real = [op.Or(op.Greater(v, 0.0), op.Less(v, 1.0)) for v in (a, b) if op.constant(v) is None]
    for v in (a, b):
        array = op.constant(v)
        if array is not None and np.isnan(array.astype(np.float64)).any():
            return None
    return functools.reduce(op.And, real, op.Not(apart))


@expansion("Equal", when=LOWERING)
def equal_booleans(op, a, b):
    """``Not(Xor(a, b))``."""
    return op.Not(op.Xor(a, b)) if a.dtype == _BOOL else None


@expansion("Greater", "Less", when=LOWERING)
def compare_integers(op, a, b, *, node):
    """Compare the difference with 0 in float64, which is exact."""
    if a.dtype not in (ir.DataType.INT32, _INT64):
        return None
    gap = op.Sub(op.cast(a, _INT64), op.cast(b, _INT64))
    return op.emit(node.op_type, op.Cast(gap, to=_DOUBLE), op.const(0.0, _DOUBLE))


@expansion("GreaterOrEqual", "LessOrEqual", when=LOWERING)
def or_equal(op, a, b, *, node):
    """``Not`` of the opposite for integers; ``Or`` with Equal for floats, because of NaN."""
    strict = "Greater" if node.op_type == "GreaterOrEqual" else "Less"
    if not a.dtype.is_floating_point():
        return op.Not(op.emit("Less" if strict == "Greater" else "Greater", a, b))
    return op.Or(op.emit(strict, a, b), op.Equal(a, b))


@expansion("Max", "Min", when=LOWERING)
def variadic_pairwise(op, *inputs, node):
    """A chain of binary nodes."""
    if len(inputs) == 1:
        return op.Identity(inputs[0])
    if len(inputs) == 2:
        return None
    y = inputs[0]
    for x in inputs[1:]:
        y = op.emit(node.op_type, y, x)
    return y


@expansion("Max", "Min", when=LOWERING)
def expand_operands(op, a, b, *, node):
    """Expand both to one shape: before opset 8 there is no broadcasting."""
    y = node.outputs[0]
    like = next((v for v in (y if op.static(y) else a, a, b) if S.same_shape(v, y)), None)
    if S.same_shape(a, b) or like is None:
        return None
    return op.emit(node.op_type, op.expand_like(a, like), op.expand_like(b, like))


@expansion("Max", "Min", when=LOWERING)
def max_of_integers(op, a, b, *, node):
    """Select by comparison, for integers."""
    if a.dtype.is_floating_point():
        return None
    above = op.Greater(a, b) if node.op_type == "Max" else op.Less(a, b)
    return op.Where(above, a, b)


@expansion("Max", "Min", when=LOWERING)
def max_by_reduction(op, a, b, *, node):
    """Stack both along a new axis and reduce it."""
    if not S.same_shape(a, b):
        return None
    last = op.rank(a)
    both = op.Concat(op.Unsqueeze(a, [last]), op.Unsqueeze(b, [last]), axis=last)
    return op.emit(f"Reduce{node.op_type}", both, [last], keepdims=0)


@expansion("IsNaN", when=LOWERING)
def is_nan(op, x):
    """Not a number: neither above 0 nor below 1."""
    return op.Not(op.Or(op.Greater(x, 0.0), op.Less(x, 1.0)))


@expansion("IsInf", when=LOWERING)
def is_inf(op, x, *, detect_negative, detect_positive):
    """Beyond the largest finite value."""
    top = float(ir.DataType(x.dtype).max)
    above, below = op.Greater(x, top), op.Less(x, -top)
    if detect_negative and detect_positive:
        return op.Or(above, below)
    return above if detect_positive else below


@expansion("Not", when=LOWERING)
def negation(op, x):
    """``Equal(x, False)``."""
    return op.Equal(x, op.const(False, _BOOL))


@expansion("com.microsoft::IsAllFinite", when=TRAINING)
def is_all_finite(op, *inputs, isinf_only=0, isnan_only=0):
    """Whether no element is infinite or NaN."""
    bad = None
    for x in inputs:
        terms = [] if isnan_only else [op.IsInf(x)]
        terms += [] if isinf_only else [op.IsNaN(x)]
        for term in terms:
            any_ = op.ReduceMax(op.Cast(op.Reshape(term, [-1]), to=ir.DataType.INT32), keepdims=0)
            bad = any_ if bad is None else op.Max(bad, any_)
    return op.Equal(bad, op.const(0, ir.DataType.INT32))


@expansion("Cast", when=LOWERING)
def cast_comparison(op, x, *, to, saturate):
    """Compute a comparison as 0 and 1, from signs of differences."""
    dtype = ir.DataType(to)
    if x.dtype != ir.DataType.BOOL or not dtype.is_floating_point():
        return None
    return _bool_as_float(op, x, dtype)


_FLOAT_LAYOUT_OPS = ("Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")


def _bool_as_float(op: OpBuilder, x: ir.Value, dtype: ir.DataType) -> ir.Value | None:
    """Return a condition as 0 and 1, ``None`` unless it consists of finite float comparisons."""
    array = op.constant(x)
    if array is not None:
        return op.const(array.astype(np.float32), dtype)
    node = x.producer()
    if node is None or not is_standard(node) or node.inputs[0] is None:
        return None
    kind, a = node.op_type, node.inputs[0]
    if kind in _FLOAT_LAYOUT_OPS:
        inner = _bool_as_float(op, a, dtype)
        if inner is None:
            return None
        moved = ir.Node(
            "", kind, [inner, *node.inputs[1:]], list(node.attributes.values()), version=op.opset
        )
        return op.append(moved)
    if kind == "Not":
        inner = _bool_as_float(op, a, dtype)
        return None if inner is None else op.Sub(1.0, inner)
    b = node.inputs[1] if len(node.inputs) > 1 else None
    if b is None:
        return None
    if kind in ("And", "Or"):
        left, right = _bool_as_float(op, a, dtype), _bool_as_float(op, b, dtype)
        if left is None or right is None:
            return None
        if kind == "And":
            return op.Mul(left, right)
        return op.Sub(1.0, op.Mul(op.Sub(1.0, left), op.Sub(1.0, right)))
    return _compare_by_sign(op, kind, a, b) if a.dtype == dtype else None


def _compare_by_sign(op: OpBuilder, kind: str, a: ir.Value, b: ir.Value) -> ir.Value | None:
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


BOOL, INT64 = ir.DataType.BOOL, ir.DataType.INT64


INTEGER_TYPES = (ir.DataType.INT32, INT64)


_INTEGER_LAYOUT_OPS = frozenset(
    {
        *("Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Tile"),
        *("Transpose", "Unsqueeze"),
    }
)


_Converted = dict[ir.Value, ir.Value | None]


def bool_as_int64(op: OpBuilder, x: ir.Value) -> ir.Value | None:
    """Return a boolean tensor as int64 0 and 1, ``None`` if an operator in it is not covered."""
    return _as_int64(op, x, {})


def _as_int64(op: OpBuilder, x: ir.Value, seen: _Converted) -> ir.Value | None:
    if x not in seen:
        seen[x] = _convert_producer(op, x, seen)
    return seen[x]


def _convert_producer(op: OpBuilder, x: ir.Value, seen: _Converted) -> ir.Value | None:
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
        return _combine_logic(op, kind, [_as_int64(op, v, seen) for v in inputs if v is not None])
    if kind == "IsNaN":
        return _not(op, _is_not_nan(op, a))
    if kind == "IsInf":
        return _is_infinite(op, node)
    b = inputs[1] if len(inputs) > 1 else None
    if kind == "Equal" and b is not None:
        return _equal(op, a, b)
    if kind in ("Greater", "Less") and b is not None:
        return _greater(op, a, b) if kind == "Greater" else _greater(op, b, a)
    if kind in ("GreaterOrEqual", "LessOrEqual") and b is not None:
        low, high = (a, b) if kind == "GreaterOrEqual" else (b, a)
        return _and(op, [_not(op, _greater(op, high, low)), *_mask_nans(op, a, b)])
    if kind in ("ReduceMax", "ReduceMin") or kind in _INTEGER_LAYOUT_OPS:
        return _move_integers(op, node, [_as_int64(op, a, seen), *inputs[1:]])
    if kind == "Concat":
        return _move_integers(
            op, node, [None if v is None else _as_int64(op, v, seen) for v in inputs]
        )
    return None


def _is_infinite(op: OpBuilder, node: ir.Node) -> ir.Value | None:
    x = node.inputs[0]
    assert x is not None
    top = op.const(float(ir.DataType(x.dtype).max), x.dtype)
    known = S.attributes_of(node, op.opset)
    parts = [_greater(op, x, top)] if known["detect_positive"] else []
    parts += [_greater(op, op.Neg(top), x)] if known["detect_negative"] else []
    return _combine_logic(op, "Or", parts) if len(parts) == 2 else next(iter(parts), None)


def _move_integers(op: OpBuilder, node: ir.Node, inputs: list[ir.Value | None]) -> ir.Value | None:
    """Return the same layout node over the integers."""
    if inputs[0] is None or (node.op_type == "Concat" and None in inputs):
        return None
    return op.append(
        ir.Node("", node.op_type, inputs, list(node.attributes.values()), version=op.opset)
    )


def _combine_logic(op: OpBuilder, kind: str, parts: list[ir.Value | None]) -> ir.Value | None:
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


def _greater(op: OpBuilder, a: ir.Value, b: ir.Value) -> ir.Value | None:
    """Return ``a > b``."""
    assert a.dtype is not None
    if a.dtype in INTEGER_TYPES:  # (|d| + d) / (|d| + 1), truncated
        d = op.Sub(a, b)
        size = op.Abs(d)
        y = op.Div(op.Add(size, d), op.Add(size, op.const(1, a.dtype)))
        return op.cast(y, INT64)
    return _positive(op, op.Sub(a, b)) if a.dtype.is_floating_point() else None


def _positive(op: OpBuilder, d: ir.Value) -> ir.Value | None:
    """Return ``d > 0`` as ``ArgMax([0, d])``, which returns the first of equal elements."""
    dims = op.static(d)
    if dims is None:
        return None
    last = len(dims)
    both = op.Concat(op.const(np.zeros([*dims, 1]), d.dtype), op.Unsqueeze(d, [last]), axis=last)
    return op.ArgMax(both, axis=last, keepdims=0)


def _equal(op: OpBuilder, a: ir.Value, b: ir.Value) -> ir.Value | None:
    """Return ``a == b``; inf - inf is NaN, which counts as neither greater nor less."""
    assert a.dtype is not None
    if a.dtype in INTEGER_TYPES:  # 1 - 2 |d| / (|d| + 1), truncated
        size = op.Abs(op.Sub(a, b))
        one = op.const(1, a.dtype)
        y = op.Sub(one, op.Div(op.Add(size, size), op.Add(size, one)))
        return op.cast(y, INT64)
    if not a.dtype.is_floating_point():
        return None
    apart = [_greater(op, a, b), _greater(op, b, a)]
    return _and(op, [*(_not(op, v) for v in apart), *_mask_nans(op, a, b)])


def _mask_nans(op: OpBuilder, *values: ir.Value) -> list[ir.Value | None]:
    """Return a mask of the non-NaN elements of each value that may contain NaN."""
    masks = []
    for v in values:
        if v.dtype in INTEGER_TYPES or not may_be_infinite(v):
            continue
        masks.append(_is_not_nan(op, v))
    return masks


def _is_not_nan(op: OpBuilder, x: ir.Value) -> ir.Value | None:
    """Return ``(x > 0) or (x < 1)``, which is false for NaN only."""
    zero, one = op.const(0, x.dtype), op.const(1, x.dtype)
    return _combine_logic(op, "Or", [_greater(op, x, zero), _greater(op, one, x)])
