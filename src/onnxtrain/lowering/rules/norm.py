"""Normalizations as means and square roots."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.lowering.registry import lower


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
    normal, mean, inverse = _standardised(op, op.cast(x, ir.DataType(stash_type)), axes, epsilon)
    y = op.Mul(op.cast(normal, x.dtype), scale)
    return y if bias is None else op.Add(y, bias), mean, inverse


@lower("GroupNormalization")
def group_normalization(op, x, scale, bias, *, epsilon, num_groups, stash_type):
    """Standardise each group of channels: [N, C, ...] -> [N, G, C/G * ...]."""
    wide = op.cast(x, ir.DataType(stash_type or 1))
    grouped = op.Reshape(wide, [0, num_groups, -1])
    normal, _, _ = _standardised(op, grouped, [2], epsilon)
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


def _standardised(op: OpBuilder, x: ir.Value, axes: list[int], epsilon: float):
    mean = op.ReduceMean(x, axes, keepdims=1)
    centered = op.Sub(x, mean)
    variance = op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)
    inverse = op.Div(1.0, op.Sqrt(op.Add(variance, epsilon)))
    return op.Mul(centered, inverse), mean, inverse


def _per_channel(op: OpBuilder, v: ir.Value, x: ir.Value) -> ir.Value:
    """[C] -> [C, 1, 1 ...], so that it meets the channels of ``x``."""
    n = op.rank(x) - 2
    return op.Reshape(v, [-1, *[1] * n]) if n > 0 else v
