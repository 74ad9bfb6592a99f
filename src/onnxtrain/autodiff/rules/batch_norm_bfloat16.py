"""Batch normalisation of bfloat16 images, whose passes read and write bfloat16.

A pass over images takes as long as its bytes. Per channel everything is float32: statistics, sums,
and the numbers that are multiplied and added, which are rounded once, at the end.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.rules.norm import per_channel
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.modes.batch_statistics import mean_and_variance
from onnxtrain.graph.shapes import dims as D

_FLOAT = ir.DataType.FLOAT


def narrow_gradients(
    op: OpBuilder, dy: ir.Value, x: ir.Value, scale: ir.Value, epsilon: float
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the gradients of image, scale and shift, in training mode.

    ``dx = scale * r * (dy - mean(dy) - (x - mean(x)) * r^2 * mean(dy * (x - mean(x))))`` is
    ``dy * gain - (x * tilt + shift)`` with three numbers per channel, and
    ``sum(dy * (x - mean)) = sum(dy * x) - mean * sum(dy)``.
    """
    mean, variance = (op.Reshape(v, [-1]) for v in mean_and_variance(op, x))
    r = op.Reciprocal(op.Sqrt(op.Add(variance, epsilon)))
    dbias = _channel_sum(op, dy)
    both = op.Sub(_channel_sum(op, op.Mul(dy, x)), op.Mul(mean, dbias))
    dscale = op.Mul(both, r)
    gain = op.Mul(op.cast(scale, _FLOAT), r)
    share = op.Div(gain, _count(op, x))
    tilt = op.Mul(share, op.Mul(r, dscale))
    shift = op.Sub(op.Mul(share, dbias), op.Mul(tilt, mean))
    gain, tilt, shift = (per_channel(op, op.cast(v, x.dtype), x) for v in (gain, tilt, shift))
    dx = op.Sub(op.Mul(dy, gain), op.Add(op.Mul(x, tilt), shift))
    return dx, dscale, dbias


def _channel_sum(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return the float32 sum of each channel: of an image by a product, which adds in float32.

    On a GPU that is five times as fast as ReduceSum: ``[N * C, positions] @ ones``.
    """
    sizes = D.numbers(op.dims(x)[2:])
    if sizes:
        ones = op.const(np.ones((math.prod(sizes), 1)), x.dtype)
        images = op.MatMul(op.Reshape(x, [0, 0, math.prod(sizes)]), ones)
        images = op.Squeeze(images, [2])
    elif op.rank(x) > 2:
        images = op.ReduceSum(x, list(range(2, op.rank(x))), keepdims=0)
    else:
        images = x
    return op.ReduceSum(op.cast(images, _FLOAT), [0], keepdims=0)


def _count(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return how many elements a channel has, in float32."""
    return op.count(op.cast(x, _FLOAT), [i for i in range(op.rank(x)) if i != 1])
