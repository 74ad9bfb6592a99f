"""Activations, Softmax and Dropout.

Order: GELU, Softplus and the functions built on it, Swish, the piecewise linear and exponential
activations, sigmoid and tanh, activations of fused operators, Softmax, Dropout.

The expansions for lowering keep NaN and infinities: none multiplies an infinity by zero for a
finite input.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.expand.expansions import LOWERING, TRAINING, expansion, on_target
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder

# Abramowitz and Stegun, 7.1.26: erf to 1.5e-7.
_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


_ERF_SCALE = 0.3275911


@expansion("Erf", when=LOWERING)
def erf(op, x):
    """``sign(x) (1 - p(t) exp(-x^2))`` with ``t = 1 / (1 + 0.3275911 |x|)``."""
    size = op.Abs(x)
    t = op.Div(1.0, op.Add(op.Mul(size, _ERF_SCALE), 1.0))
    poly = op.const(_ERF[-1], x.dtype)
    for c in reversed(_ERF[:-1]):
        poly = op.Add(op.Mul(poly, t), c)
    rest = op.Mul(op.Mul(poly, t), op.Exp(op.Neg(op.Mul(size, size))))
    return op.Mul(op.Sign(x), op.Sub(1.0, rest))


@expansion("Gelu", when=LOWERING)
def gelu(op, x, *, approximate):
    """``x / 2 (1 + erf(x / sqrt 2))``, or its tanh approximation."""
    if approximate == "tanh":
        cube = op.Mul(op.Mul(x, x), x)
        inner = op.Mul(op.Add(x, op.Mul(cube, 0.044715)), math.sqrt(2 / math.pi))
        gate = op.Tanh(inner)
    else:
        gate = op.Erf(op.Mul(x, math.sqrt(0.5)))
    return op.Mul(op.Mul(x, 0.5), op.Add(gate, 1.0))


@expansion("com.microsoft::Gelu", when=TRAINING)
def contrib_gelu(op, x):
    """Gelu with erf."""
    return op.Gelu(x)


@expansion("com.microsoft::FastGelu", when=TRAINING)
def fast_gelu(op, x, bias=None):
    """Gelu of ``x + bias`` with the tanh approximation."""
    return op.Gelu(x if bias is None else op.Add(x, bias), approximate="tanh")


@expansion("com.microsoft::BiasGelu", when=TRAINING)
def bias_gelu(op, x, bias):
    """Gelu of ``x + bias``."""
    return op.Gelu(op.Add(x, bias))


@expansion("com.microsoft::QuickGelu", when=TRAINING)
def quick_gelu(op, x, *, alpha=1.702):
    """``x * sigmoid(alpha * x)``."""
    return op.Mul(x, op.Sigmoid(op.Mul(x, alpha)))


@expansion("com.microsoft::BiasSplitGelu", when=TRAINING)
def bias_split_gelu(op, x, bias):
    """The first half of ``x + bias`` times Gelu of the second half."""
    left, right = op.Split(op.Add(x, bias), axis=-1, num_outputs=2, _outputs=2)
    return op.Mul(left, op.Gelu(right))


@expansion("Softplus", when=LOWERING)
def softplus(op, x):
    """``log(1 + exp(-|x|)) + relu(x)``: ``exp(x)`` itself overflows."""
    return op.Add(op.Log(op.Add(op.Exp(op.Neg(op.Abs(x))), 1.0)), op.Relu(x))


def smooth_softplus(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return ``x / 2 + (|x| / 2 + log(1 + exp(-|x|)))``, the softplus of the losses.

    Not the formula of :func:`softplus`: a loss is differentiated after this, and ``relu`` would add
    its derivative at 0. Here the bracket is even and smooth, so its derivative at 0 is 0, whatever
    the derivative of ``|x|`` is there.
    """
    a = op.Abs(x)
    even = op.Add(op.Mul(a, 0.5), op.Log(op.Add(op.Exp(op.Neg(a)), 1.0)))
    return op.Add(op.Mul(x, 0.5), even)


@expansion("com.microsoft::ParametricSoftplus", when=TRAINING)
def parametric_softplus(op, x, *, alpha=0.0, beta=0.0):
    """``alpha * log(1 + exp(beta * x))``."""
    return op.Mul(op.Softplus(op.Mul(x, beta)), alpha)


@expansion("Mish", when=LOWERING)
def mish(op, x):
    """``x tanh(softplus(x))``."""
    return op.Mul(x, op.Tanh(op.Softplus(x)))


@expansion("Swish", when=TRAINING)
def swish(op, x, *, alpha=1.0):
    """``x * sigmoid(alpha * x)``."""
    return op.Mul(x, op.Sigmoid(x if alpha == 1.0 else op.Mul(x, alpha)))


@expansion("com.microsoft::ScaledSiLU", when=TRAINING)
def scaled_silu(op, x, scale=None, *, alpha=1.0):
    """``z * sigmoid(z)`` of ``z = scale * x``; the input overrides the attribute."""
    z = op.Mul(x, alpha if scale is None else op.cast(scale, x.dtype))
    z.shape = x.shape
    return op.Mul(z, op.Sigmoid(z))


@expansion("HardSigmoid", when=LOWERING)
def hard_sigmoid(op, x, *, alpha, beta):
    """``clip(alpha x + beta, 0, 1)``."""
    return op.Clip(op.Add(op.Mul(x, alpha), beta), 0.0, 1.0)


@expansion("HardSwish", when=LOWERING)
def hard_swish(op, x):
    """``x clip(x / 6 + 1/2, 0, 1)``."""
    return op.Mul(x, op.HardSigmoid(x, alpha=1 / 6, beta=0.5))


@expansion("Elu", when=LOWERING)
def elu(op, x, *, alpha):
    """``relu(x) + alpha (exp(min(x, 0)) - 1)``."""
    below = op.Sub(op.Exp(_negative(op, x)), 1.0)
    return op.Add(op.Relu(x), below if alpha == 1.0 else op.Mul(below, alpha))


@expansion("Celu", when=LOWERING)
def celu(op, x, *, alpha):
    """``relu(x) + alpha (exp(min(x, 0) / alpha) - 1)``."""
    below = op.Mul(op.Sub(op.Exp(op.Div(_negative(op, x), alpha)), 1.0), alpha)
    return op.Add(op.Relu(x), below)


@expansion("Celu", when=on_target(lacks="Celu"))
def celu_by_elu(op, x, *, alpha):
    """``alpha elu(x / alpha)``: where Elu has a kernel, one node instead of seven."""
    if alpha == 1.0:
        return op.Elu(x)
    return op.Mul(op.Elu(op.Div(x, alpha)), alpha)


@expansion("Atan", when=on_target(lacks="Atan"))
def atan_series(op, x):
    """The power series of ``4 atan(v)``, after ``atan(u) = 2 atan(u / (1 + sqrt(1 + u^2)))`` twice.

    ``atan(x) = sign(x) pi / 2 - atan(1 / x)`` for ``|x| > 1``, so ``v`` is at most 0.2.
    """
    wide = x if x.dtype == ir.DataType.DOUBLE else op.cast(x, ir.DataType.FLOAT)
    large = op.Greater(op.Abs(wide), 1.0)
    v = op.Where(large, op.Div(1.0, wide), wide)
    for _ in range(2):
        v = op.Div(v, op.Add(op.Sqrt(op.Add(op.Mul(v, v), 1.0)), 1.0))
    terms = 12 if wide.dtype == ir.DataType.DOUBLE else 6
    square, total = op.Mul(v, v), op.const((-1.0) ** (terms - 1) / (2 * terms - 1), wide.dtype)
    for k in reversed(range(terms - 1)):
        total = op.Add(op.Mul(total, square), (-1.0) ** k / (2 * k + 1))
    angle = op.Mul(op.Mul(v, total), 4.0)
    right = op.Mul(op.sign(wide), math.pi / 2)
    return op.cast(op.Where(large, op.Sub(right, angle), angle), x.dtype)


@expansion("Selu", when=LOWERING)
def selu(op, x, *, alpha, gamma):
    """``gamma elu(x, alpha)``."""
    return op.Mul(op.Elu(x, alpha=alpha), gamma)


@expansion("LeakyRelu", when=LOWERING)
def leaky_relu(op, x, *, alpha):
    """``relu(x) + alpha min(x, 0)``."""
    return op.Add(op.Relu(x), op.Mul(_negative(op, x), alpha))


@expansion("PRelu", when=LOWERING)
def p_relu(op, x, slope):
    """``relu(x) + slope min(x, 0)``."""
    return op.Add(op.Relu(x), op.Mul(slope, _negative(op, x)))


@expansion("ThresholdedRelu", when=LOWERING)
def thresholded_relu(op, x, *, alpha):
    """``x`` where ``x > alpha``, else 0."""
    return op.Where(op.Greater(x, alpha), x, 0.0)


@expansion("com.microsoft::ThresholdedRelu", when=TRAINING)
def contrib_thresholded_relu(op, x, *, alpha=1.0):
    """The standard operator of the same name, which older opsets lack."""
    return op.ThresholdedRelu(x, alpha=alpha)


@expansion("Shrink", when=LOWERING)
def shrink(op, x, *, bias, lambd):
    """``x + bias`` below ``-lambd``, ``x - bias`` above ``lambd``, else 0."""
    below = op.Where(op.Less(x, -lambd), op.Add(x, bias), 0.0)
    return op.Where(op.Greater(x, lambd), op.Sub(x, bias), below)


@expansion("Sign", when=LOWERING)
def sign(op, x):
    """``(x > 0) - (x < 0)``; 0 for NaN, as in onnxruntime."""
    above = op.Cast(op.Greater(x, op.const(0, x.dtype)), to=x.dtype)
    return op.Sub(above, op.Cast(op.Less(x, op.const(0, x.dtype)), to=x.dtype))


@expansion("Sign", when=LOWERING)
def sign_by_division(op, x):
    """``x / max(|x|, tiny)``, for runtimes without comparisons; exact except for subnormals."""
    if not x.dtype.is_floating_point():
        return None
    size = op.Abs(x)
    return op.Div(x, op.Clip(size, float(np.finfo(x.dtype.numpy()).tiny), None))


@expansion("Relu", when=LOWERING)
def relu(op, x):
    """``max(x, 0)``."""
    return op.Clip(x, op.const(0, x.dtype), None)


@expansion("Clip", when=LOWERING)
def clip(op, x, low=None, high=None):
    """``min(max(x, low), high)``."""
    y = x if low is None else op.Max(x, low)
    return y if high is None else op.Min(y, high)


@expansion("Clip", when=LOWERING)
def clip_by_relu(op, x, low=None, high=None):
    """``relu(x - low) + low`` and its mirror image, for constant bounds.

    Not exact: a small ``x`` loses digits next to a large bound. Infinite bounds are skipped.
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
            return None  # loses too many digits
        gap = op.Sub(c, y) if flip else op.Sub(y, c)
        y = op.Sub(c, op.Relu(gap)) if flip else op.Add(op.Relu(gap), c)
    return op.Identity(x) if y is x else y


@expansion("Sigmoid", when=LOWERING)
def sigmoid(op, x):
    """``1 / (1 + exp(-x))``; where exp overflows, the result is 0, which is right."""
    return op.Div(1.0, op.Add(op.Exp(op.Neg(x)), 1.0))


@expansion("Tanh", when=LOWERING)
def tanh(op, x):
    """``2 sigmoid(2x) - 1``."""
    return op.Sub(op.Mul(op.Sigmoid(op.Mul(x, 2.0)), 2.0), 1.0)


@expansion("com.microsoft::ScaledTanh", when=TRAINING)
def scaled_tanh(op, x, *, alpha=0.0, beta=0.0):
    """``alpha * tanh(beta * x)``."""
    return op.Mul(op.Tanh(op.Mul(x, beta)), alpha)


@expansion("Softsign", when=LOWERING)
def softsign(op, x):
    """``x / (1 + |x|)``."""
    return op.Div(x, op.Add(op.Abs(x), 1.0))


@expansion("Abs", when=LOWERING)
def absolute(op, x):
    """``relu(x) + relu(-x)``."""
    return op.Add(op.Relu(x), op.Relu(op.Neg(x)))


@expansion("Sinh", when=LOWERING)
def sinh(op, x):
    """``(exp(x) - exp(-x)) / 2``; near 0, where that cancels, the Taylor series."""
    square = op.Mul(x, x)
    series = op.Mul(x, op.Add(op.Mul(square, op.Add(op.Mul(square, 1 / 120), 1 / 6)), 1.0))
    plain = op.Mul(op.Sub(op.Exp(x), op.Exp(op.Neg(x))), 0.5)
    return op.Where(op.Less(op.Abs(x), 0.3), series, plain)


@expansion("Cosh", when=LOWERING)
def cosh(op, x):
    """``(exp(x) + exp(-x)) / 2``."""
    return op.Mul(op.Add(op.Exp(x), op.Exp(op.Neg(x))), 0.5)


def _negative(op, x):
    """Return ``min(x, 0)`` as ``-relu(-x)``: exact, and without broadcasting."""
    return op.Neg(op.Relu(op.Neg(x)))


_ACTIVATIONS = {
    "": lambda op, x, p: x,
    "Clip": lambda op, x, p: op.Clip(x, p[0], p[1]),
    "Elu": lambda op, x, p: op.Elu(x, alpha=p[0] if p else None),
    "HardSigmoid": lambda op, x, p: op.HardSigmoid(x, alpha=p[0], beta=p[1]),
    "LeakyRelu": lambda op, x, p: op.LeakyRelu(x, alpha=p[0] if p else None),
    "Relu": lambda op, x, p: op.Relu(x),
    "Sigmoid": lambda op, x, p: op.Sigmoid(x),
    "Tanh": lambda op, x, p: op.Tanh(x),
}


def apply_activation(
    op: OpBuilder, x: ir.Value, name: str | None, parameters: list[float] | None, node: ir.Node
) -> ir.Value:
    """Return an activation that a fused operator names, with its ``activation_params``."""
    function = _ACTIVATIONS.get(name or "")
    if function is None:
        raise PrepareError(f"node {node.name!r}: {S.describe(node)}: unknown activation {name!r}")
    return function(op, x, parameters or [])


@expansion("Softmax", "LogSoftmax", "Hardmax", when=LOWERING)
def softmax_on_last_axis(op, x, *, axis, node):
    """Move ``axis`` to the end: before opset 13 these flatten all axes from ``axis`` on."""
    last = op.rank(x) - 1
    if axis % op.rank(x) == last:
        return None
    moved = op.emit(node.op_type, op.move_axis(x, axis, last), axis=last)
    return op.move_axis(moved, last, axis)


@expansion("Softmax", when=LOWERING)
def softmax(op, x, *, axis):
    """``exp(z) / sum(exp(z))`` with ``z = x - max(x)``."""
    e = op.Exp(op.Sub(x, op.ReduceMax(x, [axis], keepdims=1)))
    return op.Div(e, op.ReduceSum(e, [axis], keepdims=1))


@expansion("LogSoftmax", when=LOWERING)
def log_softmax(op, x, *, axis):
    """``z - log(sum(exp(z)))`` with ``z = x - max(x)``."""
    z = op.Sub(x, op.ReduceMax(x, [axis], keepdims=1))
    return op.Sub(z, op.Log(op.ReduceSum(op.Exp(z), [axis], keepdims=1)))


def shifted_log_sum_exp(op: OpBuilder, x: ir.Value, axis: int) -> tuple[ir.Value, ir.Value]:
    """Return ``z``, which is ``x`` shifted to at most 0 along an axis, and ``log(sum(exp(z)))``.

    The LogSoftmax of the losses, ``z - log(sum(exp(z)))``. Any shift gives the same result. Other
    than in :func:`log_softmax` it is rounded up: Ceil has derivative 0, so differentiation emits
    nothing for the maximum.
    """
    z = op.Sub(x, op.Ceil(op.ReduceMax(x, [axis], keepdims=1)))
    return z, op.Log(op.ReduceSum(op.Exp(z), [axis], keepdims=1))


@expansion("com.microsoft::BiasSoftmax", when=TRAINING)
def bias_softmax(op, x, bias, *, is_inner_broadcast, axis=1):
    """Softmax of ``x + bias`` over all axes from ``axis`` on."""
    total = op.Add(x, bias)
    total.shape = x.shape
    rank = op.rank(x)
    at = axis % rank
    if at == rank - 1:
        return op.Softmax(total, axis=-1)
    rows = op.Reshape(total, op.const([*[0] * at, -1]))
    return op.reshape_like(op.Softmax(rows, axis=-1), x)


@expansion("Dropout", when=LOWERING)
def dropout(op, x, ratio=None, training=None, *, seed):
    """``x`` at inference; in training ``x / (1 - ratio)`` with probability ``1 - ratio``."""
    rate = np.asarray(0.5) if ratio is None else op.constant(ratio)
    on = np.asarray(False) if training is None else op.constant(training)
    if on is None or rate is None:
        return None
    all_true, rate = op.const(True), float(rate.reshape(()))
    if not bool(on) or rate == 0:
        return op.Identity(x), op.expand_like(all_true, x)
    if rate >= 1:
        return None
    attributes = {} if seed is None else {"seed": float(seed)}
    drawn = op.RandomUniformLike(x, dtype=ir.DataType.FLOAT, **attributes)
    mask = op.Not(op.Less(drawn, rate))
    return op.Where(mask, op.Mul(x, 1 / (1 - rate)), op.const(0, x.dtype)), mask


@expansion("com.microsoft::BiasDropout", when=TRAINING)
def bias_dropout(op, x, bias, residual=None, ratio=None, training_mode=None, *, seed=None):
    """``dropout(x + bias) + residual`` and the mask."""
    y, mask = op.Dropout(op.Add(x, bias), ratio, training_mode, seed=seed, _outputs=2)
    return y if residual is None else op.Add(y, residual), mask


@expansion("com.microsoft::BitmaskBiasDropout", when=TRAINING)
def bitmask_bias_dropout(op, x, bias, residual=None, ratio=None, training_mode=None, *, seed=None):
    """``dropout(x + bias) + residual``."""
    y = op.Dropout(op.Add(x, bias), ratio, training_mode, seed=seed)
    return y if residual is None else op.Add(y, residual)


@expansion("com.microsoft::BitmaskDropout", when=TRAINING)
def bitmask_dropout(op, x, ratio=None, training_mode=None, *, seed=None):
    """Dropout without its packed mask."""
    return op.Dropout(x, ratio, training_mode, seed=seed)
