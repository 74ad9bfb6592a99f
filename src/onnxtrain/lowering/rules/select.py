"""Comparison and selection.

``a m + b (1 - m)`` is not ``Where``: an infinity or a NaN that was not selected comes through. So
it is used only where both sides are finite.

Comparisons without booleans: the number 0 or 1.

For runtimes that have neither comparisons nor ``Cast``. The signs of differences say the same as
comparisons, but for infinities; where those may occur, nothing is lowered.
"""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_standard
from onnxtrain.lowering.lowerings import lower
from onnxtrain.lowering.value_range import may_be_infinite

_BOOL, _INT64, _DOUBLE = ir.DataType.BOOL, ir.DataType.INT64, ir.DataType.DOUBLE
_MOST = 1 << 22  # elements: positions of a larger tensor would make the file large


@lower("Where")
def where_constant(op, condition, a, b):
    """A constant condition and minus infinity on one side: add the condition's logarithm."""
    mask = op.constant(condition)
    for chosen, other, keep in ((a, b, True), (b, a, False)):
        filler = op.constant(other)
        if mask is None or filler is None or not np.all(np.isneginf(filler.astype(np.float64))):
            continue
        if not may_be_infinite(chosen):
            bias = np.where(mask == keep, 0.0, -np.inf)
            return op.Add(chosen, op.const(bias, a.dtype))
    return None


@lower("Where")
def where_booleans(op, condition, a, b):
    """``(c and a) or (not c and b)``."""
    if a.dtype != _BOOL:
        return None
    return op.Or(op.And(condition, a), op.And(op.Not(condition), b))


@lower("Where")
def where_integers(op, condition, a, b):
    """``a m + b (1 - m)``, exact for integers."""
    if a.dtype not in (ir.DataType.INT32, _INT64):
        return None
    m = op.Cast(condition, to=a.dtype)
    one = op.const(1, a.dtype)
    return op.Add(op.Mul(a, m), op.Mul(b, op.Sub(one, m)))


@lower("Where")
def where_finite(op, condition, a, b):
    """``a m + b (1 - m)`` where both are finite; minus infinity is the logarithm of ``m``."""
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


@lower("Where")
def where_by_position(op, condition, a, b):
    """Put both sides in one vector and gather: exact for every value, for static shapes."""
    shape = [S.dims_of(v) for v in (condition, a, b)]
    if any(d is None or not all(isinstance(e, int) for e in d) for d in shape):
        return None
    out = np.broadcast_shapes(*shape)  # pyright: ignore[reportArgumentType]
    count = int(np.prod(out))
    if count > _MOST:
        return None
    places = []
    start = 0
    for v in (a, b):
        dims = op.dims(v)
        n = int(np.prod(dims))
        places.append(np.broadcast_to(np.arange(n).reshape(dims), out) + start)
        start += n
    both = op.Concat(op.Reshape(a, [-1]), op.Reshape(b, [-1]), axis=0)
    m = op.Cast(condition, to=_INT64)
    here = op.const(places[1])
    index = op.Add(here, op.Mul(m, op.const(places[0] - places[1])))
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


@lower("Equal")
def equal_floats(op, a, b):
    """Neither above nor below, and no NaN: a number is above 0 or below 1."""
    if not a.dtype.is_floating_point():
        return None
    apart = op.Or(op.Greater(a, b), op.Less(a, b))
    real = [op.Or(op.Greater(v, 0.0), op.Less(v, 1.0)) for v in (a, b) if op.constant(v) is None]
    for v in (a, b):
        array = op.constant(v)
        if array is not None and np.isnan(array.astype(np.float64)).any():
            return None
    return functools.reduce(op.And, real, op.Not(apart))


@lower("Equal")
def equal_booleans(op, a, b):
    """Not either one of them alone."""
    return op.Not(op.Xor(a, b)) if a.dtype == _BOOL else None


@lower("Greater", "Less")
def compare_integers(op, a, b, *, node):
    """The sign of the difference, which a double has exactly."""
    if a.dtype not in (ir.DataType.INT32, _INT64):
        return None
    gap = op.Sub(op.cast(a, _INT64), op.cast(b, _INT64))
    return op.emit(node.op_type, op.Cast(gap, to=_DOUBLE), op.const(0.0, _DOUBLE))


@lower("GreaterOrEqual", "LessOrEqual")
def or_equal(op, a, b, *, node):
    """For integers, not the opposite; for floats, one or the other: a NaN is neither."""
    strict = "Greater" if node.op_type == "GreaterOrEqual" else "Less"
    if not a.dtype.is_floating_point():
        return op.Not(op.emit("Less" if strict == "Greater" else "Greater", a, b))
    return op.Or(op.emit(strict, a, b), op.Equal(a, b))


@lower("Max", "Min")
def variadic_pairwise(op, *inputs, node):
    """The largest of the first two and the next one, and so on."""
    if len(inputs) == 1:
        return op.Identity(inputs[0])
    if len(inputs) == 2:
        return None
    y = inputs[0]
    for x in inputs[1:]:
        y = op.emit(node.op_type, y, x)
    return y


@lower("Max", "Min")
def expand_operands(op, a, b, *, node):
    """Before opset 8 both have to have the same shape."""
    y = node.outputs[0]
    like = next((v for v in (y if op.static(y) else a, a, b) if S.same_shape(v, y)), None)
    if S.same_shape(a, b) or like is None:
        return None
    return op.emit(node.op_type, op.expand_like(a, like), op.expand_like(b, like))


@lower("Max", "Min")
def max_of_integers(op, a, b, *, node):
    """The one that compares as the larger."""
    if a.dtype.is_floating_point():
        return None
    above = op.Greater(a, b) if node.op_type == "Max" else op.Less(a, b)
    return op.Where(above, a, b)


@lower("Max", "Min")
def max_by_reduction(op, a, b, *, node):
    """The largest along a new axis with both of them."""
    if not S.same_shape(a, b):
        return None
    last = op.rank(a)
    both = op.Concat(op.Unsqueeze(a, [last]), op.Unsqueeze(b, [last]), axis=last)
    return op.emit(f"Reduce{node.op_type}", both, [last], keepdims=0)


@lower("IsNaN")
def is_nan(op, x):
    """A number is above 0 or below 1."""
    return op.Not(op.Or(op.Greater(x, 0.0), op.Less(x, 1.0)))


@lower("IsInf")
def is_inf(op, x, *, detect_negative, detect_positive):
    """Equal to one of the infinities."""
    top = float(ir.DataType(x.dtype).max)
    above, below = op.Greater(x, top), op.Less(x, -top)
    if detect_negative and detect_positive:
        return op.Or(above, below)
    return above if detect_positive else below


@lower("Not")
def negation(op, x):
    """Equal to false."""
    return op.Equal(x, op.const(False, _BOOL))


_LAYOUT_OPS = ("Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")


@lower("Cast")
def cast_comparison(op, x, *, to, saturate):
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
    if kind in _LAYOUT_OPS:
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
