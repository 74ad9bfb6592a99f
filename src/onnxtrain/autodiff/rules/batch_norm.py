"""Batch normalisation, on batch statistics (training) or on given ones (inference)."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.autodiff.registry import Gradients, vjp_multi
from onnxtrain.autodiff.rules.batch_norm_bfloat16 import narrow_gradients
from onnxtrain.autodiff.rules.batch_norm_forms import Incoming, input_gradients, statistics
from onnxtrain.autodiff.rules.norm import per_channel, working_dtype
from onnxtrain.autodiff.variants import Choice, Choices, Form, Forms, chosen
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder


@vjp_multi("BatchNormalization")
def batch_normalization(
    op, dys, x, scale, bias, mean, var, *, node, epsilon, momentum, training_mode
) -> Gradients:
    """Frozen: an affine map per channel. Training: the statistics depend on ``x`` as well."""
    inputs = (x, scale, bias, mean, var)
    if not training_mode:
        return _frozen(op, dys, inputs, epsilon, momentum)
    form = chosen(op, (x, dys), TRAINING_FORMS, TRAINING_CHOICES)
    return form(op, dys, inputs, epsilon, momentum, node)


def _frozen(op: OpBuilder, dys, inputs, epsilon: float, momentum: float) -> Gradients:
    """With ``r = 1 / sqrt(var + eps)`` the gradients are ``dx = dy * scale * r``.

    Further ``dscale = sum(dy * (x - mean)) * r``, ``dbias = sum(dy)``,
    ``dmean = -sum(dy) * scale * r`` and ``dvar = -dscale * scale * r^2 / 2``.
    """
    x, scale, _, mean, var = inputs
    dtype = working_dtype(x)
    xw, dy, scale_w, mean_w, var_w = (op.cast(v, dtype) for v in (x, dys[0], scale, mean, var))
    axes = _reduced(op, x)
    r = op.Reciprocal(op.Sqrt(op.Add(var_w, epsilon)))
    gain = op.Mul(scale_w, r)
    dx = op.Mul(dy, per_channel(op, gain, x))
    dbias = op.ReduceSum(dy, axes, keepdims=0)
    product = op.Mul(dy, op.Sub(xw, per_channel(op, mean_w, x)))
    dscale = op.Mul(op.ReduceSum(product, axes, keepdims=0), r)
    dmean = op.Neg(op.Mul(dbias, gain))
    dvar = op.Mul(op.Mul(dscale, op.Mul(gain, r)), -0.5)
    return _as_inputs(op, (dx, dscale, dbias, dmean, dvar), inputs)


def _training(
    op: OpBuilder, dys, inputs, epsilon: float, momentum: float, node: ir.Node
) -> Gradients:
    """What comes in from the result goes through ``input_gradients``.

    The running statistics are ``momentum * old + (1 - momentum) * batch``, with the variance of the
    population; they add ``(1 - momentum) * (drun_mean + 2 * xc * drun_var) / count``.
    """
    x, scale = inputs[:2]
    dy, drun_mean, drun_var = (*dys, None, None)[:3]
    dtype = working_dtype(x)
    xw, scale_w = op.cast(x, dtype), op.cast(scale, dtype)
    axes = _reduced(op, x)
    of_batch = statistics(op, xw, axes, node)
    centered, size = of_batch.centered, op.count(xw, axes)
    dx = dscale = dbias = None
    if dy is not None:
        incoming = Incoming(op.cast(dy, dtype), xw, scale_w, of_batch, epsilon)
        dx, dscale, dbias = input_gradients(op, incoming, axes)
    dmean = dvar = None
    if drun_mean is not None:
        dmean = op.Mul(op.cast(drun_mean, dtype), momentum)
        share = op.Div(op.Mul(op.cast(drun_mean, dtype), 1.0 - momentum), size)
        dx = _plus(op, dx, op.expand_like(per_channel(op, share, x), xw))
    if drun_var is not None:
        dvar = op.Mul(op.cast(drun_var, dtype), momentum)
        share = op.Div(op.Mul(op.cast(drun_var, dtype), 2.0 * (1.0 - momentum)), size)
        dx = _plus(op, dx, op.Mul(centered, per_channel(op, share, x)))
    return _as_inputs(op, (dx, dscale, dbias, dmean, dvar), inputs)


def _training_bfloat16(
    op: OpBuilder, dys, inputs, epsilon: float, momentum: float, node: ir.Node
) -> Gradients:
    """The same, with passes over images in bfloat16."""
    gradients = narrow_gradients(op, dys[0], inputs[0], inputs[1], epsilon)
    return _as_inputs(op, (*gradients, None, None), inputs)


def _narrow(facts: tuple[ir.Value, Sequence[ir.Value | None]]) -> bool:
    """Return whether images are bfloat16, and nothing but the result has a gradient."""
    x, dys = facts
    alone = dys[0] is not None and all(d is None for d in dys[1:])
    return alone and x.dtype == ir.DataType.BFLOAT16 and S.rank_of(x) > 1


TRAINING_FORMS: Forms[tuple[ir.Value, Sequence[ir.Value | None]]] = {
    "float32": Form(_training),
    "bfloat16": Form(_training_bfloat16, _narrow),
}
TRAINING_CHOICES: Choices[tuple[ir.Value, Sequence[ir.Value | None]]] = [
    Choice("bfloat16", prefers="bfloat16-images"),
    Choice("float32"),
]


def _reduced(op: OpBuilder, x: ir.Value) -> list[int]:
    """Return the axes of a channel's elements: all but axis 1; a vector is one channel."""
    return [i for i in range(op.rank(x)) if i != 1]


def _plus(op: OpBuilder, a: ir.Value | None, b: ir.Value) -> ir.Value:
    return b if a is None else op.Add(a, b)


def _as_inputs(op: OpBuilder, gradients, inputs) -> Gradients:
    """Return the gradients in the inputs' dtypes; a vector's one channel is summed to shape [1]."""
    fitted_grads = []
    for g, x in zip(gradients, inputs, strict=True):
        if g is not None:
            g = op.cast(g, x.dtype)
            g = op.reshape_like(g, x) if op.rank(g) != op.rank(x) else g
        fitted_grads.append(g)
    return tuple(fitted_grads)
