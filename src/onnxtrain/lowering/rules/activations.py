"""Activations in plain arithmetic.

NaN and infinities matter here: none of these multiplies an infinity by zero for a finite input.
"""

from __future__ import annotations

import math

import numpy as np

from onnxtrain.lowering.registry import lower

# Abramowitz and Stegun, 7.1.26: erf to 1.5e-7.
_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
_ERF_SCALE = 0.3275911


@lower("Erf")
def erf(op, x):
    """``sign(x) (1 - p(t) exp(-x^2))`` with ``t = 1 / (1 + 0.3275911 |x|)``."""
    size = op.Abs(x)
    t = op.Div(1.0, op.Add(op.Mul(size, _ERF_SCALE), 1.0))
    poly = op.const(_ERF[-1], x.dtype)
    for c in reversed(_ERF[:-1]):
        poly = op.Add(op.Mul(poly, t), c)
    rest = op.Mul(op.Mul(poly, t), op.Exp(op.Neg(op.Mul(size, size))))
    return op.Mul(op.Sign(x), op.Sub(1.0, rest))


@lower("Gelu")
def gelu(op, x, *, approximate):
    """``x / 2 (1 + erf(x / sqrt 2))``, or the tanh that comes close to it."""
    if approximate == "tanh":
        cube = op.Mul(op.Mul(x, x), x)
        inner = op.Mul(op.Add(x, op.Mul(cube, 0.044715)), math.sqrt(2 / math.pi))
        gate = op.Tanh(inner)
    else:
        gate = op.Erf(op.Mul(x, math.sqrt(0.5)))
    return op.Mul(op.Mul(x, 0.5), op.Add(gate, 1.0))


@lower("Softplus")
def softplus(op, x):
    """``log(1 + exp(-|x|)) + relu(x)``: ``exp(x)`` itself overflows."""
    return op.Add(op.Log(op.Add(op.Exp(op.Neg(op.Abs(x))), 1.0)), op.Relu(x))


@lower("Mish")
def mish(op, x):
    """``x tanh(softplus(x))``."""
    return op.Mul(x, op.Tanh(op.Softplus(x)))


@lower("HardSigmoid")
def hard_sigmoid(op, x, *, alpha, beta):
    """``clip(alpha x + beta, 0, 1)``."""
    return op.Clip(op.Add(op.Mul(x, alpha), beta), 0.0, 1.0)


@lower("HardSwish")
def hard_swish(op, x):
    """``x clip(x / 6 + 1/2, 0, 1)``."""
    return op.Mul(x, op.HardSigmoid(x, alpha=1 / 6, beta=0.5))


@lower("Elu")
def elu(op, x, *, alpha):
    """``relu(x) + alpha (exp(min(x, 0)) - 1)``."""
    below = op.Sub(op.Exp(_negative(op, x)), 1.0)
    return op.Add(op.Relu(x), below if alpha == 1.0 else op.Mul(below, alpha))


@lower("Celu")
def celu(op, x, *, alpha):
    """``relu(x) + alpha (exp(min(x, 0) / alpha) - 1)``."""
    below = op.Mul(op.Sub(op.Exp(op.Div(_negative(op, x), alpha)), 1.0), alpha)
    return op.Add(op.Relu(x), below)


@lower("Selu")
def selu(op, x, *, alpha, gamma):
    """``gamma elu(x, alpha)``."""
    return op.Mul(op.Elu(x, alpha=alpha), gamma)


@lower("LeakyRelu")
def leaky_relu(op, x, *, alpha):
    """``relu(x) + alpha min(x, 0)``."""
    return op.Add(op.Relu(x), op.Mul(_negative(op, x), alpha))


@lower("PRelu")
def p_relu(op, x, slope):
    """``relu(x) + slope min(x, 0)``."""
    return op.Add(op.Relu(x), op.Mul(slope, _negative(op, x)))


@lower("ThresholdedRelu")
def thresholded_relu(op, x, *, alpha):
    """``x`` where it is above ``alpha``, else 0."""
    return op.Where(op.Greater(x, alpha), x, 0.0)


@lower("Shrink")
def shrink(op, x, *, bias, lambd):
    """``x -+ bias`` outside of ``[-lambd, lambd]``, else 0."""
    below = op.Where(op.Less(x, -lambd), op.Add(x, bias), 0.0)
    return op.Where(op.Greater(x, lambd), op.Sub(x, bias), below)


@lower("Sign")
def sign(op, x):
    """``(x > 0) - (x < 0)``; for a NaN, 0, as onnxruntime does."""
    above = op.Cast(op.Greater(x, op.const(0, x.dtype)), to=x.dtype)
    return op.Sub(above, op.Cast(op.Less(x, op.const(0, x.dtype)), to=x.dtype))


@lower("Sign")
def sign_by_quotient(op, x):
    """``x / max(|x|, smallest)``, for runtimes without comparisons: exact for normal numbers."""
    if not x.dtype.is_floating_point():
        return None
    size = op.Abs(x)
    return op.Div(x, op.Clip(size, float(np.finfo(x.dtype.numpy()).tiny), None))


@lower("Relu")
def relu(op, x):
    """``max(x, 0)``."""
    return op.Clip(x, op.const(0, x.dtype), None)


@lower("Clip")
def clip(op, x, low=None, high=None):
    """``min(max(x, low), high)``."""
    y = x if low is None else op.Max(x, low)
    return y if high is None else op.Min(y, high)


@lower("Clip")
def clip_by_relu(op, x, low=None, high=None):
    """``relu(x - low) + low``, and the same from above; for constant bounds.

    Not exact: a small x near a large bound loses digits; infinite bounds are none.
    """
    if not x.dtype.is_floating_point():
        return None
    y = x
    for bound, flip in ((low, False), (high, True)):
        if bound is None:
            continue
        number = op.constant(bound)
        if number is None:
            return None
        c = float(number.reshape(()))
        if math.isinf(c) or abs(c) >= float(x.dtype.max):
            continue
        if abs(c) > 64:
            return None  # the loss of digits would show
        gap = op.Sub(c, y) if flip else op.Sub(y, c)
        y = op.Sub(c, op.Relu(gap)) if flip else op.Add(op.Relu(gap), c)
    return op.Identity(x) if y is x else y


@lower("Sigmoid")
def sigmoid(op, x):
    """``1 / (1 + exp(-x))``; an overflow gives the right 0."""
    return op.Div(1.0, op.Add(op.Exp(op.Neg(x)), 1.0))


@lower("Tanh")
def tanh(op, x):
    """``2 sigmoid(2x) - 1``."""
    return op.Sub(op.Mul(op.Sigmoid(op.Mul(x, 2.0)), 2.0), 1.0)


@lower("Softsign")
def softsign(op, x):
    """``x / (1 + |x|)``."""
    return op.Div(x, op.Add(op.Abs(x), 1.0))


@lower("Abs")
def absolute(op, x):
    """``relu(x) + relu(-x)``."""
    return op.Add(op.Relu(x), op.Relu(op.Neg(x)))


@lower("Sinh")
def sinh(op, x):
    """``(exp(x) - exp(-x)) / 2``, by Taylor's series near 0, where that loses digits."""
    square = op.Mul(x, x)
    series = op.Mul(x, op.Add(op.Mul(square, op.Add(op.Mul(square, 1 / 120), 1 / 6)), 1.0))
    plain = op.Mul(op.Sub(op.Exp(x), op.Exp(op.Neg(x))), 0.5)
    return op.Where(op.Less(op.Abs(x), 0.3), series, plain)


@lower("Cosh")
def cosh(op, x):
    """``(exp(x) + exp(-x)) / 2``."""
    return op.Mul(op.Add(op.Exp(x), op.Exp(op.Neg(x))), 0.5)


def _negative(op, x):
    """Return ``min(x, 0)`` as ``-relu(-x)``: exact, and no broadcasting."""
    return op.Neg(op.Relu(op.Neg(x)))
