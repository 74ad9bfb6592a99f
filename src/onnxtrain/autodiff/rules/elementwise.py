"""Elementwise arithmetic and unary math functions.

Kinks and poles follow torch: ``Abs'(0) = 0``; equal arguments of Max and Min share the gradient
evenly; Clip passes the gradient at its bounds, except as ReLU6; ``Sqrt'(0)`` is infinite.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.autodiff.rule_registry import elementwise, no_gradient, vjp, zero_gradient

# Arguments that broadcast against each other.
elementwise("Add", lambda op, dy, a, b: (dy, dy))
elementwise("Sub", lambda op, dy, a, b: (dy, op.Neg(dy)))
elementwise(
    "Mul",
    lambda op, dy, a, b: (
        (op.Mul(dy, b), op.Mul(dy, a)) if a is not b else (op.Mul(op.Mul(dy, 2.0), a), None)
    ),
)
elementwise("Sum", lambda op, dy, *xs: (dy,) * len(xs))
elementwise("Where", lambda op, dy, c, a, b: (None, op.Where(c, dy, 0.0), op.Where(c, 0.0, dy)))

# One argument.
vjp("Identity")(lambda op, dy, x: dy)
vjp("Neg")(lambda op, dy, x: op.Neg(dy))
vjp("Abs")(lambda op, dy, x: op.Mul(dy, op.sign(x)))
vjp("Reciprocal")(lambda op, dy, x, *, y: op.Neg(op.Mul(dy, op.Mul(y, y))))
vjp("Sqrt")(lambda op, dy, x, *, y: op.Div(op.Mul(dy, 0.5), y))
vjp("Exp")(lambda op, dy, x, *, y: op.Mul(dy, y))
vjp("Log")(lambda op, dy, x: op.Div(dy, x))
vjp("Erf")(
    lambda op, dy, x: op.Mul(dy, op.Mul(op.Exp(op.Neg(op.Mul(x, x))), 2.0 / math.sqrt(math.pi)))
)

vjp("Sin")(lambda op, dy, x: op.Mul(dy, op.Cos(x)))
vjp("Cos")(lambda op, dy, x: op.Neg(op.Mul(dy, op.Sin(x))))
vjp("Tan")(lambda op, dy, x, *, y: op.Mul(dy, op.Add(op.Mul(y, y), 1.0)))
vjp("Asin")(lambda op, dy, x: op.Div(dy, op.Sqrt(_one_minus_square(op, x))))
vjp("Acos")(lambda op, dy, x: op.Neg(op.Div(dy, op.Sqrt(_one_minus_square(op, x)))))
vjp("Atan")(lambda op, dy, x: op.Div(dy, op.Add(op.Mul(x, x), 1.0)))
vjp("Sinh")(lambda op, dy, x: op.Mul(dy, op.Cosh(x)))
vjp("Cosh")(lambda op, dy, x: op.Mul(dy, op.Sinh(x)))
vjp("Tanh")(lambda op, dy, x, *, y: op.Mul(dy, op.Sub(1.0, op.Mul(y, y))))
vjp("Asinh")(lambda op, dy, x: op.Div(dy, op.Sqrt(op.Add(op.Mul(x, x), 1.0))))
vjp("Acosh")(lambda op, dy, x: op.Div(dy, op.Sqrt(op.Mul(op.Sub(x, 1.0), op.Add(x, 1.0)))))
vjp("Atanh")(lambda op, dy, x: op.Div(dy, _one_minus_square(op, x)))

zero_gradient("Ceil", "Floor", "Round", "Sign", why="the result is constant between its steps")
no_gradient(
    *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"),
    *("And", "Or", "Xor", "Not", "IsInf", "IsNaN"),
    why="the result is a truth value",
)


def _one_minus_square(op, x):
    """``(1 - x) (1 + x)``, which is accurate near 1."""
    return op.Mul(op.Sub(1.0, x), op.Add(x, 1.0))


@vjp("Div", broadcasts=True)
def div(op, dy, a, b, *, y):
    """``da = dy / b``, ``db = -dy / b * y``."""
    da = op.Div(dy, b)
    return da, op.Neg(op.Mul(da, y))


@vjp("Mod", broadcasts=True)
def mod(op, dy, a, b, *, y):
    """``y = a - q b`` with an integer ``q``, so ``da = dy`` and ``db = -dy q``.

    ``q`` is derived from ``y``: dividing again might round to another integer.
    """
    q = op.Div(op.Sub(a, y), b)
    if q.dtype == ir.DataType.BFLOAT16:  # Round does not support it
        q = op.Cast(q, to=ir.DataType.FLOAT)
    return dy, op.Neg(op.Mul(dy, op.cast(op.Round(q), dy.dtype)))


@vjp("Pow", broadcasts=True)
def pow_(op, dy, x, e, *, y):
    """``dx = dy e x^(e - 1)``, ``de = dy y log(x)``.

    At ``x = 0`` as torch: ``dx = 0`` for ``e = 0``, and ``de = 0`` unless ``e < 0``. For ``x < 0``
    the derivative with respect to ``e`` does not exist: it is NaN.
    """
    exponent = op.cast(e, x.dtype)
    # Zeros of the base become ones, whose logarithm is 0, except where y is infinite anyway.
    base = op.Where(op.Equal(x, 0.0), op.Where(op.Less(exponent, 0.0), x, 1.0), x)
    de = op.cast(op.Mul(dy, op.Mul(y, op.Log(base))), e.dtype)
    known = op.constant(e)
    if known is not None and known.size == 1:
        p = float(known.reshape(()))
        if p == 0:
            return None, de
        if p == 1:
            return dy, de
        rest = x if p == 2 else op.Pow(x, op.const(p - 1, x.dtype))
        return op.Mul(
            op.Mul(dy, rest), p
        ), de  # a constant factor last, so that it folds with others
    lower = op.Sub(exponent, 1.0)
    # 0 * 0^-1 would be NaN; use 0 * 0^0.
    lower = op.Where(op.Equal(exponent, 0.0), op.Where(op.Equal(x, 0.0), 0.0, lower), lower)
    return op.Mul(dy, op.Mul(exponent, op.Pow(x, lower))), de


@vjp("Max", "Min", broadcasts=True)
def extremum(op, dy, *xs, y):
    """The selected argument gets the gradient; equal ones share it evenly."""
    if len(xs) == 1:
        return (dy,)
    taken = [op.Equal(x, y) for x in xs]
    share = op.Div(dy, op.Sum(*(op.Cast(t, to=dy.dtype) for t in taken)))
    return tuple(op.Where(t, share, 0.0) for t in taken)


@vjp("Mean", broadcasts=True)
def mean(op, dy, *xs):
    """Every argument gets ``dy / n``."""
    return (op.Div(dy, float(len(xs))),) * len(xs)


_RELU6 = [0.0, 6.0]


@vjp("Clip", broadcasts=True)
def clip(op, dy, x, low=None, high=None, *, y):
    """``dx = dy`` where ``low <= x <= high``; otherwise the active bound gets ``dy``.

    If the bounds cross, ``high`` gets all of it. With bounds 0 and 6 the operator is ReLU6, whose
    derivative at the bounds is 0 as for ReLU, because dead channels lie on a bound.
    """
    if low is None and high is None:
        return (dy,)
    dlow = None if low is None else op.Where(op.Less(x, low), dy, 0.0)
    dhigh = None if high is None else op.Where(op.Greater(x, high), dy, 0.0)
    a, b = op.constant(low), op.constant(high)
    if a is not None and b is not None and [a.item(), b.item()] == _RELU6:
        inside = op.And(op.Greater(y, low), op.Less(y, high))
    else:
        inside = op.Equal(x, y)
    dx = op.Where(inside, dy, 0.0)
    ordered = a is not None and b is not None and bool(a <= b)
    if low is not None and high is not None and not ordered:
        crossed = op.Less(high, low)
        dx = op.Where(crossed, 0.0, dx)
        dlow = op.Where(op.Less(low, high), dlow, 0.0)
        dhigh = op.Where(crossed, dy, dhigh)
    return dx, dlow, dhigh
