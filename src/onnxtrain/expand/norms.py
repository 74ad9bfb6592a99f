"""Normalization: layer, RMS, instance, batch and group normalization.

GroupNormalization has two expansions. :func:`group_normalization` (lowering) uses means and square
roots, which every runtime has. :func:`group_normalization_by_layer_norm` (CUDA) uses the
LayerNormalization kernel, which accumulates its statistics in float32; the gradient rule shares
it.

A group is one row of that kernel if there are enough groups to occupy the GPU. Otherwise each
image of one channel is a row, ``y = (x - m) * q`` with ``q = 1 / sqrt(v + epsilon)``, and the
kernel also returns ``m`` and ``q``. With ``M = mean(m)`` and ``1 / r^2 = mean(1 / q^2 + (m -
M)^2)`` over the images of a group, the normalized group is an affine function of each row:

    (x - M) * r = y * (r / q) + (m - M) * r

Sums of products with ``y`` keep their digits, because ``y`` has mean 0 whatever the mean of ``x``
is.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.expand.conv import channels_first, channels_last
from onnxtrain.expand.expansions import LOWERING, TRAINING, expansion, on_target, raise_unsupported
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes import dims as D


@expansion("LayerNormalization", when=LOWERING)
def layer_normalization(op, x, scale, bias=None, *, axis, epsilon, stash_type):
    """``(x - mean) / std * scale + bias`` over the axes from ``axis`` on."""
    axes = list(range(axis % op.rank(x), op.rank(x)))
    normal, mean, inverse = _standardize(op, op.cast(x, ir.DataType(stash_type)), axes, epsilon)
    y = op.Mul(op.cast(normal, x.dtype), scale)
    return y if bias is None else op.Add(y, bias), mean, inverse


@expansion("LayerNormalization", when=on_target(lacks="LayerNormalization.statistics"))
def layer_normalization_with_statistics(
    op, x, scale, bias=None, *, axis, epsilon, stash_type, node
):
    """:func:`layer_normalization`, if the gradient reads mean or deviation."""
    if not any(y.uses() or y.is_graph_output() for y in node.outputs[1:]):
        return None
    return layer_normalization(
        op, x, scale, bias, axis=axis, epsilon=epsilon, stash_type=stash_type
    )


@expansion("com.microsoft::LayerNormalization", when=TRAINING)
def contrib_layer_normalization(op, x, scale, bias=None, *, axis=-1, epsilon=1e-5, stash_type=1):
    """The standard operator of the same name, which older opsets lack; three outputs.

    The scale may have another type than ``x``: the result has the type of the scale.
    """
    dtype, values = scale.dtype, [x, scale, bias]
    if x.dtype != dtype:
        values = [None if v is None else op.cast(v, ir.DataType.FLOAT) for v in values]
    y, mean, inverse = op.LayerNormalization(
        *values, axis=axis, epsilon=epsilon, stash_type=stash_type, _outputs=3
    )
    return op.cast(y, dtype), mean, inverse


@expansion("com.microsoft::SkipLayerNormalization", when=TRAINING)
def skip_layer_normalization(op, x, skip, gamma, beta=None, bias=None, *, epsilon=1e-12):
    """LayerNormalization of ``x + skip + bias``; the fourth output is that sum."""
    total = op.Add(x, skip)
    if bias is not None:
        total = op.Add(total, bias)
    y, mean, inverse = op.LayerNormalization(
        total, gamma, beta, axis=-1, epsilon=epsilon, _outputs=3
    )
    return y, mean, inverse, total


@expansion("com.microsoft::EmbedLayerNormalization", when=TRAINING)
def embed_layer_normalization(
    op,
    ids,
    segments,
    words,
    positions,
    segment_table,
    gamma,
    beta,
    mask=None,
    position_ids=None,
    *,
    epsilon=1e-12,
    mask_index_type=0,
):
    """LayerNormalization of the sum of word, position and segment embeddings."""
    total = op.Gather(words, ids, axis=0)
    if position_ids is None:
        stop = op.size(ids, 1)
        stop = op.const(stop) if isinstance(stop, int) else op.Squeeze(stop, [0])
        position_ids = op.Range(op.const(0), stop, op.const(1))
    total = op.Add(total, op.Gather(positions, position_ids, axis=0))
    if segments is not None and segment_table is not None:
        total = op.Add(total, op.Gather(segment_table, segments, axis=0))
    y = op.LayerNormalization(total, gamma, beta, axis=-1, epsilon=epsilon)
    return y, _lengths(op, mask, ids), total


def _lengths(op: OpBuilder, mask: ir.Value | None, ids: ir.Value) -> ir.Value:
    """Return the number of tokens of each row before the first masked one.

    Without a mask the result is zeros, as in onnxruntime.
    """
    if mask is None:
        zeros = op.full([op.size(ids, 0)], 0, ir.DataType.INT32)
        zeros.shape = ir.Shape([op.dims(ids)[0]])
        return zeros
    # Ones over the longest prefix without a masked token.
    counted = op.Cast(op.Cast(mask, to=ir.DataType.BOOL), to=ir.DataType.INT32)
    ahead = op.CumSum(op.Sub(1, counted), op.const(1))
    prefix = op.Cast(op.Equal(ahead, op.const(0, ir.DataType.INT32)), to=ir.DataType.INT32)
    return op.ReduceSum(prefix, [1], keepdims=0)


def rms_norm(op: OpBuilder, x: ir.Value, weight: ir.Value | None, epsilon: float) -> ir.Value:
    """Return ``x / sqrt(mean(x^2) + epsilon) * weight`` along the last axis."""
    wide = op.cast(x, ir.DataType.FLOAT) if x.dtype != ir.DataType.DOUBLE else x
    mean = op.ReduceMean(op.Mul(wide, wide), [-1], keepdims=1)
    normal = op.cast(op.Div(wide, op.Sqrt(op.Add(mean, epsilon))), x.dtype)
    return normal if weight is None else op.Mul(normal, weight)


@expansion("RMSNormalization", when=TRAINING)
def rms_normalization(op, x, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    """``x / sqrt(mean(x^2) + epsilon) * scale`` over the axes from ``axis`` on.

    The statistics are computed in ``stash_type``.
    """
    axes = list(range(axis % op.rank(x), op.rank(x)))
    wide = op.cast(x, ir.DataType(stash_type))
    mean = op.ReduceMean(op.Mul(wide, wide), axes, keepdims=1)
    normal = op.Div(wide, op.Sqrt(op.Add(mean, epsilon)))
    return op.Mul(op.cast(normal, x.dtype), scale)


@expansion(
    "SimplifiedLayerNormalization", "com.microsoft::SimplifiedLayerNormalization", when=TRAINING
)
def simplified_layer_normalization(op, x, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    """``x / sqrt(mean(x^2) + epsilon) * scale``; the second output is the reciprocal root."""
    axes = list(range(axis % op.rank(x), op.rank(x)))
    wide = x if x.dtype == ir.DataType.DOUBLE else op.cast(x, ir.DataType(stash_type))
    root = op.Sqrt(op.Add(op.ReduceMean(op.Mul(wide, wide), axes, keepdims=1), epsilon))
    return op.Mul(op.cast(op.Div(wide, root), scale.dtype), scale), op.Reciprocal(root)


@expansion("com.microsoft::SkipSimplifiedLayerNormalization", when=TRAINING)
def skip_simplified_layer_normalization(op, x, skip, gamma, bias=None, *, epsilon=1e-12):
    """RMS normalization of ``x + skip + bias``; the fourth output is that sum."""
    total = op.Add(x, skip)
    if bias is not None:
        total = op.Add(total, bias)
    y, inverse = simplified_layer_normalization(op, total, gamma, epsilon=epsilon)
    return y, None, inverse, total


@expansion("com.microsoft::BranchwiseRMSNorm", when=TRAINING)
def branchwise_rms_norm(op, x, scale=None, *, num_branches=0, epsilon=1e-5, node):
    """RMS normalization of each branch; ``scale`` covers all branches or is shared by them."""
    grouped = _branches(op, x, num_branches, node)
    weight = scale
    if scale is not None and op.rank(scale) == 1 and op.dims(scale) != op.dims(grouped)[-1:]:
        weight = op.Reshape(scale, op.vector([op.size(grouped, -2), op.size(grouped, -1)]))
    y = rms_norm(op, grouped, None if weight is None else op.cast(weight, x.dtype), epsilon)
    return op.reshape_like(y, x)


@expansion("com.microsoft::GatedRMSNorm", when=TRAINING)
def gated_rms_norm(op, x, scale, gate, *, activation="silu", epsilon=1e-5, node):
    """RMS normalization of chunks of ``len(scale)`` elements, times a gate."""
    size = op.dims(scale)[0]
    if not isinstance(size, int):
        raise_unsupported(node, "the size of the scale is not known")
    rank = op.rank(x)
    pieces = op.Reshape(x, [*[0] * (rank - 1), -1, size])
    y = op.reshape_like(rms_norm(op, pieces, op.cast(scale, x.dtype), epsilon), x)
    opened = op.Sigmoid(gate)
    if activation in ("silu", "swish"):
        opened = op.Mul(gate, opened)
    elif activation != "sigmoid":
        raise_unsupported(node, f"unknown activation {activation!r}")
    return op.Mul(y, opened)


@expansion("com.microsoft::EngramGate", when=TRAINING)
def engram_gate(
    op, key, query, value, key_scale, query_scale, conv_scale=None, *, epsilon=1e-5, node
):
    """``sigmoid(sign(d) sqrt(max(|d|, 1e-6))) * value`` of the scaled dot product ``d``."""
    size = op.dims(key)[-1]
    if not isinstance(size, int):
        raise_unsupported(node, "the width of the keys is not known")
    product = op.Mul(
        rms_norm(op, key, key_scale, epsilon), rms_norm(op, query, query_scale, epsilon)
    )
    d = op.Mul(op.ReduceSum(product, [-1], keepdims=1), size**-0.5)
    root = op.Sqrt(op.Max(op.Abs(d), op.const(1e-6, d.dtype)))
    y = op.Mul(op.Sigmoid(op.Mul(op.sign(d), root)), op.Unsqueeze(value, [2]))
    y.shape = key.shape
    return y, None if conv_scale is None else rms_norm(op, y, conv_scale, epsilon)


@expansion("com.microsoft::HyperConnectionPreMix", when=TRAINING)
def hyper_connection_pre_mix(op, streams, pre_mix, *, num_branches=0, reduction_scale=1.0, node):
    """``scale * sum_c(streams_c * pre_mix_c)``."""
    grouped = _branches(op, streams, num_branches, node)
    mix = op.cast(_mix(op, pre_mix, grouped), streams.dtype)
    y = op.ReduceSum(op.Mul(grouped, mix), [-2], keepdims=0)
    return y if reduction_scale == 1.0 else op.Mul(y, reduction_scale)


@expansion("com.microsoft::HyperConnectionPostMix", when=TRAINING)
def hyper_connection_post_mix(
    op, streams, block_output, post_mix, stream_mix=None, *, num_branches=0, node
):
    """``stream_mix^T streams + post_mix * block_output``."""
    grouped = _branches(op, streams, num_branches, node)
    mixed = grouped
    if stream_mix is not None:
        mixed = op.MatMul(op.mT(op.cast(stream_mix, streams.dtype)), grouped)
    gate = op.cast(_mix(op, post_mix, grouped), streams.dtype)
    y = op.Add(mixed, op.Mul(gate, op.Unsqueeze(block_output, [-2])))
    y.shape = grouped.shape
    return op.reshape_like(y, streams)


def _mix(op: OpBuilder, mix: ir.Value, grouped: ir.Value) -> ir.Value:
    """Reshape gates [..., C], [..., C, 1], [..., C, H] or [..., C * H] to [..., C, 1 or H]."""
    if op.rank(mix) == op.rank(grouped):
        return mix
    if op.dims(mix)[-1] == op.dims(grouped)[-2]:
        return op.Unsqueeze(mix, [-1])
    return op.reshape_like(mix, grouped)


def _branches(op: OpBuilder, x: ir.Value, number: int, node: ir.Node) -> ir.Value:
    """Return [..., C * H] as [..., C, H]."""
    if not number:
        return x
    width = op.dims(x)[-1]
    if not isinstance(width, int):
        raise_unsupported(node, "the width of the branches is not known")
    return op.Reshape(x, [*[0] * (op.rank(x) - 1), number, width // number])


@expansion("InstanceNormalization", when=LOWERING)
def instance_normalization(op, x, scale, bias, *, epsilon):
    """``(x - mean) * (scale / std) + bias`` over each channel of each image.

    ``scale / std`` is computed first: both are small, and broadcasting is slow in some runtimes.
    """
    axes = list(range(2, op.rank(x)))
    centered = op.Sub(x, op.ReduceMean(x, axes, keepdims=1))
    variance = op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)
    factor = op.Div(_per_channel(op, scale, x), op.Sqrt(op.Add(variance, epsilon)))
    return op.Add(op.Mul(centered, factor), _per_channel(op, bias, x))


@expansion("MeanVarianceNormalization", when=LOWERING)
def mean_variance_normalization(op, x, *, axes):
    """``(x - mean) / (std + 1e-9)``."""
    axes = [0, 2, 3] if axes is None else list(axes)
    centered = op.Sub(x, op.ReduceMean(x, axes, keepdims=1))
    variance = op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)
    return op.Div(centered, op.Add(op.Sqrt(variance), 1e-9))


@expansion("BatchNormalization", when=LOWERING)
def batch_normalization(op, x, scale, bias, mean, variance, *, epsilon, momentum, training_mode):
    """``(x - mean) / sqrt(variance + epsilon) * scale + bias``.

    In training mode with the batch statistics; the running statistics are outputs 1 and 2.
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


@expansion("LpNormalization", when=LOWERING)
def lp_normalization(op, x, *, axis, p):
    """``x / norm(x)`` along an axis."""
    reduce = op.ReduceL1 if p == 1 else op.ReduceL2
    return op.Div(x, reduce(x, [axis % op.rank(x)], keepdims=1))


@expansion("GroupNormalization", when=LOWERING)
def group_normalization(op, x, scale, bias, *, epsilon, num_groups, stash_type):
    """Normalize the rows of ``[N, G, C/G * ...]``, then apply scale and bias per channel."""
    wide = op.cast(x, ir.DataType(stash_type or 1))
    grouped = op.Reshape(wide, [0, num_groups, -1])
    normal, _, _ = _standardize(op, grouped, [2], epsilon)
    back = op.cast(op.reshape_like(normal, x), x.dtype)
    return op.Add(op.Mul(back, _per_channel(op, scale, x)), _per_channel(op, bias, x))


@expansion("GroupNormalization", when=on_target(prefers="group-norm-via-layer-norm"))
def group_normalization_by_layer_norm(
    op: OpBuilder,
    x: ir.Value,
    scale: ir.Value,
    bias: ir.Value,
    *,
    num_groups: int,
    epsilon: float,
) -> ir.Value | None:
    """``scale * (x - mean) / deviation + bias`` over the channels and positions of a group."""
    if not can_normalize_groups(x, num_groups):
        return None
    parts = normalize_groups(op, x, num_groups, epsilon)
    return op.reshape_like(
        apply_row_affine(op, parts.y, fold_scale_and_bias(op, parts, scale, bias)), x
    )


FLOAT = ir.DataType.FLOAT


_TYPES = frozenset({FLOAT, ir.DataType.BFLOAT16})


class NormalizedGroups(NamedTuple):
    """A normalized batch ``y * gain + level``, before scale and bias.

    ``gain`` and ``level`` are float32 ``[batch, groups, channels of a group]``.
    """

    y: ir.Value
    """``[batch, channels, positions]``."""
    gain: ir.Value | None
    """``None`` means 1."""
    level: ir.Value | None
    """``None`` means 0."""
    r: ir.Value
    """``1 / deviation`` of each group, ``[batch, groups, 1]``."""


class RowAffine(NamedTuple):
    """The affine map ``x * factor + offset`` of rows ``[batch, rows, length]``.

    Both are ``[batch, rows, 1]``, or ``[rows, 1]`` if they do not depend on the example.
    """

    factor: ir.Value
    offset: ir.Value


def can_normalize_groups(x: ir.Value, groups: int) -> bool:
    """Return whether the sizes of channels and positions are static, and the type has kernels."""
    sizes = D.static_sizes((S.dims_of(x) or (None,))[1:])
    if not sizes or len(sizes) < 2 or x.dtype not in _TYPES or groups < 1:
        return False
    return min(sizes) > 0 and sizes[0] % groups == 0


def sizes_of(op: OpBuilder, x: ir.Value) -> tuple[int, int]:
    """Return the numbers of channels and positions."""
    sizes = D.static_sizes(op.dims(x)[1:])
    assert sizes is not None
    return sizes[0], math.prod(sizes[1:])


def normalize_groups(op: OpBuilder, x: ir.Value, groups: int, epsilon: float) -> NormalizedGroups:
    """Return a batch normalized over groups of channels, without scale and bias."""
    channels, positions = sizes_of(op, x)
    width = channels // groups
    if not _prefers_image_rows(op, x, groups):
        y, _, r = _rows(op, x, groups, width * positions, epsilon)
        return NormalizedGroups(op.Reshape(y, [0, channels, positions]), None, None, r)
    y, m, q = _rows(op, x, channels, positions, epsilon)
    m, q = (op.Reshape(v, [0, groups, width]) for v in (m, q))
    away = op.Sub(m, op.ReduceMean(m, [2], keepdims=1))
    spread = op.Add(op.Reciprocal(op.Mul(q, q)), op.Mul(away, away))
    r = op.Reciprocal(op.Sqrt(op.ReduceMean(spread, [2], keepdims=1)))
    return NormalizedGroups(y, op.Div(r, q), op.Mul(away, r), r)


def _prefers_image_rows(op: OpBuilder, x: ir.Value, groups: int) -> bool:
    """Return whether groups are too few to be rows, and images large enough for that."""
    batch = op.dims(x)[0]
    channels, positions = sizes_of(op, x)
    few = isinstance(batch, int) and batch * groups < T.GROUP_NORM_KERNEL_ROWS
    return few and channels > groups and positions >= T.NORM_KERNEL_POSITIONS


def _rows(
    op: OpBuilder, x: ir.Value, rows: int, length: int, epsilon: float
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the normalized rows of each example, their means and inverse deviations."""
    one = op.const(np.ones(length), x.dtype)
    table = op.Reshape(x, [0, rows, length])
    y, m, q = op.LayerNormalization(table, one, axis=2, epsilon=epsilon, _outputs=3)
    return y, m, q


def fold_scale_and_bias(
    op: OpBuilder, parts: NormalizedGroups, scale: ir.Value, bias: ir.Value
) -> RowAffine:
    """Return the affine map from ``parts.y`` to the output with scale and bias of the channels."""
    scale, bias = (op.cast(v, FLOAT) for v in (scale, bias))
    if parts.gain is None:
        return RowAffine(op.Unsqueeze(scale, [1]), op.Unsqueeze(bias, [1]))
    groups, width = op.dims(parts.gain)[1:]
    scale, bias = (op.Reshape(v, [groups, width]) for v in (scale, bias))
    line = op.Mul(parts.gain, scale), op.Add(op.Mul(parts.level, scale), bias)
    return RowAffine(*(op.Reshape(v, [0, op.dims(parts.y)[1], 1]) for v in line))


def apply_row_affine(op: OpBuilder, y: ir.Value, line: RowAffine) -> ir.Value:
    """Return ``y * factor + offset`` for ``[batch, rows, length]``.

    In float32 with static sizes, one BatchNormalization kernel in inference mode does both.
    """
    rows, length = op.dims(y)[1:]
    sizes = D.static_sizes(op.dims(y))
    large = isinstance(length, int) and length >= T.NORM_KERNEL_POSITIONS
    in_one = op.target.prefers("fused-affine") and y.dtype == FLOAT and large
    if in_one and sizes is not None:
        return op.Reshape(_apply_by_batch_norm(op, y, line, sizes), [-1, rows, length])
    factor, offset = (op.cast(v, y.dtype) for v in line)
    if op.rank(factor) == 2:
        return op.Add(op.Mul(y, factor), offset)
    table = op.Reshape(y, [-1, length])  # broadcasting a column has a fast kernel
    factor, offset = (op.Reshape(v, [-1, 1]) for v in (factor, offset))
    return op.Reshape(op.Add(op.Mul(table, factor), offset), [-1, rows, length])


def _apply_by_batch_norm(op: OpBuilder, y: ir.Value, line: RowAffine, sizes: list[int]) -> ir.Value:
    """Apply by BatchNormalization; rows are split, as its kernel runs one block per channel."""
    length, count = sizes[-1], math.prod(sizes[:-1])
    most = length // T.NORM_KERNEL_POSITIONS
    pieces = [k for k in range(1, most + 1) if length % k == 0]
    pieces = next((k for k in pieces if count * k >= T.AFFINE_KERNEL_CHANNELS), pieces[-1])
    count *= pieces
    zero, one = (op.const(np.full(count, v), FLOAT) for v in (0.0, 1.0))
    whole = op.const([*sizes[:-1], pieces])
    spread = pieces > 1 or op.rank(line.factor) == 2
    factor, offset = (op.Reshape(op.Expand(v, whole) if spread else v, [-1]) for v in line)
    table = op.Reshape(y, [1, count, length // pieces])
    return op.BatchNormalization(table, factor, offset, zero, one, epsilon=0.0)


@expansion("com.microsoft::GroupNorm", when=TRAINING)
def group_norm(op, x, gamma, beta, *, groups, activation, channels_last=1, epsilon=1e-5, node):
    """GroupNormalization, channels last by default; followed by SiLU if ``activation`` is 1."""
    return _group_norm(op, x, gamma, beta, groups, activation, channels_last, epsilon, node)


@expansion("com.microsoft::SkipGroupNorm", when=TRAINING)
def skip_group_norm(
    op, x, gamma, beta, skip, bias=None, *, groups, activation, channels_last=1, epsilon=1e-5, node
):
    """GroupNorm of ``x + skip + bias``; the second output is that sum."""
    if op.rank(skip) == 2:
        skip = op.Unsqueeze(skip, [1, 2])
    total = op.Add(x, skip)
    if bias is not None:
        total = op.Add(total, bias)
    total.shape = x.shape
    y = _group_norm(op, total, gamma, beta, groups, activation, channels_last, epsilon, node)
    return y, total


def _group_norm(
    op: OpBuilder,
    x: ir.Value,
    gamma: ir.Value,
    beta: ir.Value,
    groups: int,
    activation: int,
    last: int,
    epsilon: float,
    node: ir.Node,
) -> ir.Value:
    if activation not in (0, 1):
        raise_unsupported(node, f"unknown activation {activation}")
    y = op.GroupNormalization(
        channels_first(op, x) if last else x,
        op.cast(gamma, x.dtype),
        op.cast(beta, x.dtype),
        epsilon=epsilon,
        num_groups=groups,
    )
    y = op.Mul(y, op.Sigmoid(y)) if activation else y
    return channels_last(op, y) if last else y


def _standardize(op: OpBuilder, x: ir.Value, axes: list[int], epsilon: float):
    mean = op.ReduceMean(x, axes, keepdims=1)
    centered = op.Sub(x, mean)
    variance = op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)
    inverse = op.Div(1.0, op.Sqrt(op.Add(variance, epsilon)))
    return op.Mul(centered, inverse), mean, inverse


def _per_channel(op: OpBuilder, v: ir.Value, x: ir.Value) -> ir.Value:
    """Reshape [C] to [C, 1, ...], to broadcast along the channels of ``x``."""
    n = op.rank(x) - 2
    return op.Reshape(v, [-1, *[1] * n]) if n > 0 else v
