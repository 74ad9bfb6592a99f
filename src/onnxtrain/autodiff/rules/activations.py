"""Activation functions, the Softmax family and Dropout.

Kinks follow torch: ``Relu'(0) = 0``; LeakyRelu, PRelu, Elu, Celu and Selu take the left derivative
at 0. Formulas avoid factors that overflow where the result does not, at any order of derivative.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.rule_registry import (
    Choice,
    Choices,
    Gradients,
    Variant,
    Variants,
    select_variant,
    vjp,
    zero_gradient,
)
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import may_be_guarded
from onnxtrain.graph.shapes import dims as D
from onnxtrain.modes.mixed_precision import (
    GELU_TANH_DERIVATIVE,
    TWICE_GELU_DERIVATIVE,
    mark_derivative,
)
from onnxtrain.modes.train_eval import prefers_fused_kernel

vjp("Sigmoid")(lambda op, dy, x, *, y: op.Mul(dy, op.Mul(y, op.Sub(1.0, y))))
vjp("Softplus")(lambda op, dy, x: op.Mul(dy, op.Sigmoid(x)))


@vjp("Relu")
def relu(op, dy, x, *, y):
    """``dx = dy`` where ``y > 0``, else 0.

    Multiplying by the step would be faster on CPU, but gives NaN where ``dy`` is infinite.
    """
    return op.Where(select_variant(op, y, POSITIVE_VARIANTS, POSITIVE_CHOICES)(op, y), dy, 0.0)


# x > 0 for non-negative x. onnxruntime has no bfloat16 comparison on CUDA, and a cast is faster
# than a comparison there.
POSITIVE_VARIANTS: Variants[ir.Value] = {
    "compared": Variant(lambda op, y: op.Greater(y, 0.0)),
    "cast": Variant(lambda op, y: op.Cast(y, to=ir.DataType.BOOL)),
}
POSITIVE_CHOICES: Choices[ir.Value] = [
    Choice("cast", lambda y: y.dtype == ir.DataType.BFLOAT16),
    Choice("cast", prefers="masks-by-cast"),
    Choice("compared"),
]


@vjp("LeakyRelu")
def leaky_relu(op, dy, x, *, alpha):
    """``dx = dy`` where ``x > 0``, else ``alpha dy``."""
    return op.Where(op.Greater(x, 0.0), dy, op.Mul(dy, alpha))


@vjp("PRelu", broadcasts=True)
def p_relu(op, dy, x, slope):
    """``dx = dy`` where ``x > 0``, else ``slope dy``; ``dslope = x dy`` where not ``x > 0``."""
    positive = op.Greater(x, 0.0)
    dx = op.Where(positive, dy, op.Mul(dy, slope))
    return dx, op.Where(positive, 0.0, op.Mul(dy, x))


@vjp("ThresholdedRelu")
def thresholded_relu(op, dy, x, *, alpha):
    """``dx = dy`` where ``x > alpha``, else 0."""
    return op.Where(op.Greater(x, alpha), dy, 0.0)


@vjp("Shrink")
def shrink(op, dy, x, *, lambd):
    """``dx = dy`` where ``|x| > lambd``, else 0."""
    return op.Where(op.Greater(op.Abs(x), lambd), dy, 0.0)


@vjp("Elu")
def elu(op, dy, x, *, y, alpha):
    """``dx = dy`` where ``x > 0``, else ``dy alpha e^x = dy (y + alpha)``."""
    return op.Where(op.Greater(x, 0.0), dy, op.Mul(dy, op.Add(y, alpha)))


@vjp("Celu")
def celu(op, dy, x, *, y, alpha):
    """``dx = dy`` where ``x > 0``, else ``dy e^(x / alpha) = dy (y / alpha + 1)``."""
    scaled = y if alpha == 1.0 else op.Div(y, alpha)
    return op.Where(op.Greater(x, 0.0), dy, op.Mul(dy, op.Add(scaled, 1.0)))


@vjp("Selu")
def selu(op, dy, x, *, y, alpha, gamma):
    """``dx = gamma dy`` where ``x > 0``, else ``dy gamma alpha e^x = dy (y + gamma alpha)``."""
    left = op.Mul(dy, op.Add(y, gamma * alpha))
    return op.Where(op.Greater(x, 0.0), op.Mul(dy, gamma), left)


@vjp("HardSigmoid")
def hard_sigmoid(op, dy, x, *, y, alpha):
    """``dx = alpha dy`` where ``0 < y < 1``, that is ``y (1 - y) > 0``; else 0."""
    return op.Where(_between_0_and_1(op, y), op.Mul(dy, alpha), 0.0)


def _between_0_and_1(op, y):
    """Return the mask ``0 < y < 1`` for ``y`` in [0, 1]: ``y (1 - y)`` is not 0."""
    rest = op.Mul(y, op.Sub(1.0, y))
    if y.dtype == ir.DataType.BFLOAT16:  # no comparison of bfloat16 on CUDA
        return op.Cast(rest, to=ir.DataType.BOOL)
    return op.Greater(rest, 0.0)


@vjp("HardSwish")
def hard_swish(op, dy, x):
    """``dx = dy (x / 3 + 1/2)`` where ``-3 < x < 3``, 0 below, ``dy`` above."""
    if x.dtype == ir.DataType.BFLOAT16:  # no comparison on CUDA: h is 0 below, 1 above
        h = op.HardSigmoid(x, alpha=1 / 6, beta=0.5)
        return op.Mul(dy, op.Add(h, op.Where(_between_0_and_1(op, h), op.Mul(x, 1 / 6), 0.0)))
    middle = op.Mul(dy, op.Add(op.Div(x, 3.0), 0.5))
    left = op.Where(op.Greater(x, -3.0), middle, 0.0)
    return op.Where(op.Less(x, 3.0), left, dy)


@vjp("Softsign")
def softsign(op, dy, x):
    """``dx = dy / (1 + |x|)^2``."""
    t = op.Add(op.Abs(x), 1.0)
    return op.Div(dy, op.Mul(t, t))


@vjp("Swish")
def swish(op, dy, x, *, y, alpha):
    """With ``s = sigmoid(alpha x)``: ``dx = dy (s + alpha y (1 - s))``."""
    s = op.Sigmoid(x if alpha == 1.0 else op.Mul(x, alpha))
    bend = op.Mul(y, op.Sub(1.0, s))
    return op.Mul(dy, op.Add(s, bend if alpha == 1.0 else op.Mul(bend, alpha)))


@vjp("Mish")
def mish(op, dy, x):
    """With ``t = tanh(softplus(x))``: ``dx = dy (t + x sigmoid(x) (1 - t^2))``."""
    t = op.Tanh(op.Softplus(x))
    bend = op.Mul(op.Mul(x, op.Sigmoid(x)), op.Sub(1.0, op.Mul(t, t)))
    return op.Mul(dy, op.Add(t, bend))


@vjp("Gelu")
def gelu(op, dy, x, *, y, approximate):
    """``dx = dy (P(x) + x P'(x))``, where ``y = x P(x)``.

    ``P`` is the normal distribution function, or for ``"tanh"`` ``(1 + tanh(u)) / 2 = sigmoid(2u)``
    with ``u = sqrt(2 / pi) (x + 0.044715 x^3)``; then ``x P' = y (1 - P) 2u'``.
    """
    if approximate == "tanh":
        c, k = 2.0 * math.sqrt(2.0 / math.pi), 0.044715
        steep = _affine(op, op.Mul(x, x), c * k, c)  # 2u / x
        below = op.Sigmoid(op.Mul(x, steep))
        bend = op.Mul(y, op.Sub(1.0, below))
        if x.dtype == ir.DataType.FLOAT16:
            # x^2 may overflow, so multiply by the vanishing factor first.
            bend = op.Mul(bend, c)
            derivative = op.Add(bend, op.Mul(op.Mul(op.Mul(bend, x), x), 3.0 * k))
        else:
            derivative = op.Mul(bend, _affine(op, steep, 3.0, -2.0 * c))
        return op.Mul(dy, mark_derivative(op.Add(below, derivative), GELU_TANH_DERIVATIVE))
    return select_variant(op, x, GELU_VARIANTS, GELU_CHOICES)(op, dy, x)


def _affine(op: OpBuilder, x: ir.Value, scale: float, offset: float) -> ir.Value:
    """Return ``scale x + offset``."""
    facts = _AffineFacts(x, prefers_fused_kernel(op, x))
    return select_variant(op, facts, AFFINE_VARIANTS, AFFINE_CHOICES)(op, x, scale, offset)


class _AffineFacts(NamedTuple):
    """Shape of the input of an affine map, and whether a normalization kernel pays."""

    x: ir.Value
    worth: bool


def _by_statistics(op: OpBuilder, x: ir.Value, scale: float, offset: float) -> ir.Value:
    """One pass: BatchNormalization in inference mode with a mean of 0 and a variance of 1."""
    channels = D.static_sizes(op.dims(x)[1:2])
    gain, shift, mean, variance = (
        op.const(np.full(channels or (), v), x.dtype) for v in (scale, offset, 0.0, 1.0)
    )
    return op.BatchNormalization(x, gain, shift, mean, variance, epsilon=0.0)


AFFINE_VARIANTS: Variants[_AffineFacts] = {
    "two passes": Variant(lambda op, x, scale, offset: op.Add(op.Mul(x, scale), offset)),
    "statistics": Variant(
        _by_statistics,
        lambda v: v.worth and bool(D.static_sizes((S.dims_of(v.x) or ())[1:2])),
    ),
}
AFFINE_CHOICES: Choices[_AffineFacts] = [
    Choice("statistics", prefers="fused-row-affine"),
    Choice("two passes"),
]


_DENSITY = -math.log(math.sqrt(2.0 * math.pi))  # log of the normal density at 0


def _with_affine(op, dy, x):
    """``(erf + 1) / 2`` in one pass; HardSigmoid clips to [0, 1], which holds anyway."""
    u = op.Mul(x, math.sqrt(0.5))
    below = op.HardSigmoid(op.Erf(u), alpha=0.5, beta=0.5)
    derivative = op.Mul(x, op.Exp(op.Sub(_DENSITY, op.Mul(u, u))))
    return op.Mul(dy, op.Add(below, derivative))


def _with_doubled_erf(op, dy, x):
    """Twice the derivative times ``dy / 2``: a matmul that computes ``dy`` can absorb the half."""
    u = op.Mul(x, math.sqrt(0.5))
    derivative = op.Mul(x, op.Exp(op.Sub(_DENSITY + math.log(2.0), op.Mul(u, u))))
    twice = mark_derivative(op.Add(op.Add(op.Erf(u), 1.0), derivative), TWICE_GELU_DERIVATIVE)
    return op.Mul(op.Mul(dy, 0.5), twice)


GELU_VARIANTS: Variants[ir.Value] = {
    "halved": Variant(_with_doubled_erf),
    "with_affine": Variant(_with_affine, lambda x: x.dtype == ir.DataType.FLOAT),
}
GELU_CHOICES: Choices[ir.Value] = [
    Choice("with_affine", prefers="fused-affine"),
    Choice("halved"),
]


zero_gradient("Hardmax", why="the result is constant between its steps")


@vjp("Softmax")
def softmax(op, dy, x, *, y, axis):
    """``dx = y (dy - sum(dy y))`` along ``axis``."""
    if may_be_guarded(y):  # NaN rows have dy = 0, but 0 * NaN is NaN
        y = op.Where(op.IsNaN(y), 0.0, y)
    total = op.ReduceSum(op.Mul(dy, y), [axis], keepdims=1)
    return op.Mul(y, op.Sub(dy, total))


@vjp("LogSoftmax")
def log_softmax(op, dy, x, *, y, axis):
    """``dx = dy - e^y sum(dy)`` along ``axis``."""
    return op.Sub(dy, op.Mul(op.Exp(y), op.ReduceSum(dy, [axis], keepdims=1)))


@vjp("Dropout", constant_inputs={1: "the ratio is a probability"})
def dropout(op, dy, x, ratio=None, training_mode=None, *, node) -> Gradients:
    """``dx = dy * mask / (1 - ratio)`` with the forward mask; ``dy`` in inference mode."""
    training, drop = op.constant(training_mode), op.constant(ratio)
    if training_mode is None or (training is not None and not training.any()):
        return dy
    if ratio is None:
        drop = 0.5
    if drop is not None and float(drop) == 0.0:
        return dy
    mask = op.extra_output(node, 1)  # all true in inference mode
    if drop is not None:
        scale = op.const(1.0 / (1.0 - float(drop)), x.dtype)
    else:
        scale = op.Reciprocal(op.Sub(op.const(1.0, x.dtype), op.cast(ratio, x.dtype)))
    if training is None:
        scale = op.Where(training_mode, scale, op.const(1.0, x.dtype))
    scale = _as_scalar(op, scale)
    return op.Where(mask, op.Mul(dy, scale), op.const(0.0, x.dtype))


def _as_scalar(op: OpBuilder, v: ir.Value) -> ir.Value:
    """Return a scalar; some exporters write ratio and mode as vectors with one element."""
    return v if op.rank(v) == 0 else op.Reshape(v, op.const([], ir.DataType.INT64))
