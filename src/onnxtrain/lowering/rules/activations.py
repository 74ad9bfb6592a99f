"""Activations in plain arithmetic.

NaN and infinities matter here: none of these multiplies an infinity by zero for a finite input.

Softmax and its kin.

Dropout by the runtime's uniform random numbers.

Normalizations as means and square roots.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.lowering.lowerings import lower

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
def sign_by_division(op, x):
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


@lower("Softmax", "LogSoftmax", "Hardmax")
def softmax_on_last_axis(op, x, *, axis, node):
    """Before opset 13 these flatten all axes from ``axis`` on: make it the last one."""
    last = op.rank(x) - 1
    if axis % op.rank(x) == last:
        return None
    moved = op.emit(node.op_type, op.move_axis(x, axis, last), axis=last)
    return op.move_axis(moved, last, axis)


@lower("LogSoftmax")
def log_softmax(op, x, *, axis):
    """``z - log(sum(exp(z)))`` with ``z = x - max(x)``."""
    z = op.Sub(x, op.ReduceMax(x, [axis], keepdims=1))
    return op.Sub(z, op.Log(op.ReduceSum(op.Exp(z), [axis], keepdims=1)))


@lower("Softmax")
def softmax(op, x, *, axis):
    """``exp(z) / sum(exp(z))`` with ``z = x - max(x)``."""
    e = op.Exp(op.Sub(x, op.ReduceMax(x, [axis], keepdims=1)))
    return op.Div(e, op.ReduceSum(e, [axis], keepdims=1))


@lower("Dropout")
def dropout(op, x, ratio=None, training=None, *, seed):
    """``x`` at inference; else ``x / (1 - ratio)`` where a random number is not below the ratio."""
    rate = np.asarray(0.5) if ratio is None else op.constant(ratio)
    on = np.asarray(False) if training is None else op.constant(training)
    if on is None or rate is None:
        return None
    kept, rate = op.const(True), float(rate.reshape(()))
    if not bool(on) or rate == 0:
        return op.Identity(x), op.expand_like(kept, x)
    if rate >= 1:
        return None
    attributes = {} if seed is None else {"seed": float(seed)}
    drawn = op.RandomUniformLike(x, dtype=ir.DataType.FLOAT, **attributes)
    mask = op.Not(op.Less(drawn, rate))
    return op.Where(mask, op.Mul(x, 1 / (1 - rate)), op.const(0, x.dtype)), mask


@lower("InstanceNormalization")
def instance_normalization(op, x, scale, bias, *, epsilon):
    """``(x - mean) * (scale / std) + bias`` over each picture of each channel.

    Scale and deviation meet first: they are small, and broadcasting is slow in some runtimes.
    """
    axes = list(range(2, op.rank(x)))
    centered = op.Sub(x, op.ReduceMean(x, axes, keepdims=1))
    variance = op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)
    factor = op.Div(_per_channel(op, scale, x), op.Sqrt(op.Add(variance, epsilon)))
    return op.Add(op.Mul(centered, factor), _per_channel(op, bias, x))


@lower("LayerNormalization")
def layer_normalization(op, x, scale, bias=None, *, axis, epsilon, stash_type):
    """``(x - mean) / std * scale + bias`` over the axes from ``axis`` on."""
    axes = list(range(axis % op.rank(x), op.rank(x)))
    normal, mean, inverse = _standardize(op, op.cast(x, ir.DataType(stash_type)), axes, epsilon)
    y = op.Mul(op.cast(normal, x.dtype), scale)
    return y if bias is None else op.Add(y, bias), mean, inverse


@lower("GroupNormalization")
def group_normalization(op, x, scale, bias, *, epsilon, num_groups, stash_type):
    """Standardise each group of channels: [N, C, ...] -> [N, G, C/G * ...]."""
    wide = op.cast(x, ir.DataType(stash_type or 1))
    grouped = op.Reshape(wide, [0, num_groups, -1])
    normal, _, _ = _standardize(op, grouped, [2], epsilon)
    back = op.cast(op.reshape_like(normal, x), x.dtype)
    return op.Add(op.Mul(back, _per_channel(op, scale, x)), _per_channel(op, bias, x))


@lower("MeanVarianceNormalization")
def mean_variance_normalization(op, x, *, axes):
    """``(x - mean) / (std + 1e-9)``."""
    axes = [0, 2, 3] if axes is None else list(axes)
    centered = op.Sub(x, op.ReduceMean(x, axes, keepdims=1))
    variance = op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)
    return op.Div(centered, op.Add(op.Sqrt(variance), 1e-9))


@lower("BatchNormalization")
def batch_normalization(op, x, scale, bias, mean, variance, *, epsilon, momentum, training_mode):
    """``(x - mean) / sqrt(variance + epsilon) * scale + bias``.

    In training, of the batch's own mean and variance; then also the running ones come out.
    """
    running = None, None
    here, spread = _per_channel(op, mean, x), _per_channel(op, variance, x)
    if training_mode:
        axes = [0, *range(2, op.rank(x))]
        here = op.ReduceMean(x, axes, keepdims=1)
        centered = op.Sub(x, here)
        spread = op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)
        running = tuple(
            op.Add(op.Mul(old, momentum), op.Mul(op.Reshape(new, [-1]), 1 - momentum))
            for old, new in ((mean, here), (variance, spread))
        )
    factor = op.Div(_per_channel(op, scale, x), op.Sqrt(op.Add(spread, epsilon)))
    return op.Add(op.Mul(op.Sub(x, here), factor), _per_channel(op, bias, x)), *running


@lower("LpNormalization")
def lp_normalization(op, x, *, axis, p):
    """``x / norm(x)`` along an axis."""
    reduce = op.ReduceL1 if p == 1 else op.ReduceL2
    return op.Div(x, reduce(x, [axis % op.rank(x)], keepdims=1))


def _standardize(op: OpBuilder, x: ir.Value, axes: list[int], epsilon: float):
    mean = op.ReduceMean(x, axes, keepdims=1)
    centered = op.Sub(x, mean)
    variance = op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)
    inverse = op.Div(1.0, op.Sqrt(op.Add(variance, epsilon)))
    return op.Mul(centered, inverse), mean, inverse


def _per_channel(op: OpBuilder, v: ir.Value, x: ir.Value) -> ir.Value:
    """[C] -> [C, 1, 1 ...], so that it meets the channels of ``x``."""
    n = op.rank(x) - 2
    return op.Reshape(v, [-1, *[1] * n]) if n > 0 else v
