"""Normalisations that take something else along: a sum, embeddings, a gate, an activation."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.prepare.decompose import decomposition
from onnxtrain.graph.prepare.decompositions.contrib.fused import channels_first, channels_last
from onnxtrain.graph.prepare.decompositions.contrib.heads import refuse, rms


@decomposition("SimplifiedLayerNormalization", "com.microsoft::SimplifiedLayerNormalization")
def simplified_layer_normalization(op, x, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    """``x / sqrt(mean(x^2) + epsilon) * scale``; the second output is the reciprocal root."""
    axes = list(range(axis % op.rank(x), op.rank(x)))
    wide = x if x.dtype == ir.DataType.DOUBLE else op.cast(x, ir.DataType(stash_type))
    root = op.Sqrt(op.Add(op.ReduceMean(op.Mul(wide, wide), axes, keepdims=1), epsilon))
    return op.Mul(op.cast(op.Div(wide, root), x.dtype), scale), op.Reciprocal(root)


@decomposition("com.microsoft::SkipLayerNormalization")
def skip_layer_normalization(op, x, skip, gamma, beta=None, bias=None, *, epsilon=1e-12):
    """Layer normalisation of ``x + skip + bias``; the fourth output is that sum."""
    total = op.Add(x, skip)
    if bias is not None:
        total = op.Add(total, bias)
    y, mean, inverse = op.LayerNormalization(
        total, gamma, beta, axis=-1, epsilon=epsilon, _outputs=3
    )
    return y, mean, inverse, total


@decomposition("com.microsoft::SkipSimplifiedLayerNormalization")
def skip_simplified_layer_normalization(op, x, skip, gamma, bias=None, *, epsilon=1e-12):
    """Root-mean-square normalisation of ``x + skip + bias``; the fourth output is that sum."""
    total = op.Add(x, skip)
    if bias is not None:
        total = op.Add(total, bias)
    y, inverse = simplified_layer_normalization(op, total, gamma, epsilon=epsilon)
    return y, None, inverse, total


@decomposition("com.microsoft::EmbedLayerNormalization")
def embed_layer_normalization(
    op, ids, segments, words, positions, segment_table, gamma, beta, mask=None, position_ids=None,
    *, epsilon=1e-12, mask_index_type=0,
):  # fmt: skip
    """Layer normalisation of the sum of word, position and segment embeddings."""
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
    """Return how many tokens of each row count: those up to the first that is masked.

    The runtime gives zeros if there is no mask.
    """
    if mask is None:
        zeros = op.full([op.size(ids, 0)], 0, ir.DataType.INT32)
        zeros.shape = ir.Shape([op.dims(ids)[0]])
        return zeros
    # Ones of the longest prefix without a zero.
    counted = op.Cast(op.Cast(mask, to=ir.DataType.BOOL), to=ir.DataType.INT32)
    ahead = op.CumSum(op.Sub(1, counted), op.const(1))
    prefix = op.Cast(op.Equal(ahead, op.const(0, ir.DataType.INT32)), to=ir.DataType.INT32)
    return op.ReduceSum(prefix, [1], keepdims=0)


@decomposition("com.microsoft::GroupNorm")
def group_norm(op, x, gamma, beta, *, groups, activation, channels_last=1, epsilon=1e-5, node):
    """Normalisation over groups of channels, which come last by default; then SiLU if asked."""
    return _group_norm(op, x, gamma, beta, groups, activation, channels_last, epsilon, node)


@decomposition("com.microsoft::SkipGroupNorm")
def skip_group_norm(
    op, x, gamma, beta, skip, bias=None, *, groups, activation, channels_last=1, epsilon=1e-5, node
):
    """The same of ``x + skip + bias``; the second output is that sum."""
    if op.rank(skip) == 2:
        skip = op.Unsqueeze(skip, [1, 2])
    total = op.Add(x, skip)
    if bias is not None:
        total = op.Add(total, bias)
    total.shape = x.shape
    y = _group_norm(op, total, gamma, beta, groups, activation, channels_last, epsilon, node)
    return y, total


def _group_norm(
    op: OpBuilder, x: ir.Value, gamma: ir.Value, beta: ir.Value, groups: int, activation: int,
    last: int, epsilon: float, node: ir.Node,
) -> ir.Value:  # fmt: skip
    if activation not in (0, 1):
        refuse(node, f"unknown activation {activation}")
    y = op.GroupNormalization(
        channels_first(op, x) if last else x,
        op.cast(gamma, x.dtype), op.cast(beta, x.dtype), epsilon=epsilon, num_groups=groups,
    )  # fmt: skip
    y = op.Mul(y, op.Sigmoid(y)) if activation else y
    return channels_last(op, y) if last else y


@decomposition("com.microsoft::BranchwiseRMSNorm")
def branchwise_rms_norm(op, x, scale=None, *, num_branches=0, epsilon=1e-5, node):
    """Root-mean-square normalisation of each branch; ``scale`` is for all branches or for one."""
    grouped = _branches(op, x, num_branches, node)
    weight = scale
    if scale is not None and op.rank(scale) == 1 and op.dims(scale) != op.dims(grouped)[-1:]:
        weight = op.Reshape(scale, op.vector([op.size(grouped, -2), op.size(grouped, -1)]))
    y = rms(op, grouped, None if weight is None else op.cast(weight, x.dtype), epsilon)
    return op.reshape_like(y, x)


@decomposition("com.microsoft::GatedRMSNorm")
def gated_rms_norm(op, x, scale, gate, *, activation="silu", epsilon=1e-5, node):
    """Root-mean-square normalisation of each ``len(scale)`` elements, times a gate."""
    size = op.dims(scale)[0]
    if not isinstance(size, int):
        refuse(node, "the size of the scale is not known")
    rank = op.rank(x)
    pieces = op.Reshape(x, [*[0] * (rank - 1), -1, size])
    y = op.reshape_like(rms(op, pieces, op.cast(scale, x.dtype), epsilon), x)
    opened = op.Sigmoid(gate)
    if activation in ("silu", "swish"):
        opened = op.Mul(gate, opened)
    elif activation != "sigmoid":
        refuse(node, f"unknown activation {activation!r}")
    return op.Mul(y, opened)


def _branches(op: OpBuilder, x: ir.Value, number: int, node: ir.Node) -> ir.Value:
    """Return [..., C * H] as [..., C, H]."""
    if not number:
        return x
    width = op.dims(x)[-1]
    if not isinstance(width, int):
        refuse(node, "the width of the branches is not known")
    return op.Reshape(x, [*[0] * (op.rank(x) - 1), number, width // number])


@decomposition("com.microsoft::HyperConnectionPreMix")
def hyper_connection_pre_mix(op, streams, pre_mix, *, num_branches=0, reduction_scale=1.0, node):
    """``scale * sum_c(streams_c * pre_mix_c)``."""
    grouped = _branches(op, streams, num_branches, node)
    mix = op.cast(_mix(op, pre_mix, grouped), streams.dtype)
    y = op.ReduceSum(op.Mul(grouped, mix), [-2], keepdims=0)
    return y if reduction_scale == 1.0 else op.Mul(y, reduction_scale)


@decomposition("com.microsoft::HyperConnectionPostMix")
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
    """Return gates [..., C], [..., C, 1], [..., C, H] or [..., C * H] as [..., C, 1 or H]."""
    if op.rank(mix) == op.rank(grouped):
        return mix
    if op.dims(mix)[-1] == op.dims(grouped)[-2]:
        return op.Unsqueeze(mix, [-1])
    return op.reshape_like(mix, grouped)


@decomposition("com.microsoft::EngramGate")
def engram_gate(
    op, key, query, value, key_scale, query_scale, conv_scale=None, *, epsilon=1e-5, node
):
    """``sigmoid(sign(d) sqrt(max(|d|, 1e-6))) * value`` of the scaled product ``d``."""
    size = op.dims(key)[-1]
    if not isinstance(size, int):
        refuse(node, "the width of the keys is not known")
    product = op.Mul(rms(op, key, key_scale, epsilon), rms(op, query, query_scale, epsilon))
    d = op.Mul(op.ReduceSum(product, [-1], keepdims=1), size**-0.5)
    root = op.Sqrt(op.Max(op.Abs(d), op.const(1e-6, d.dtype)))
    y = op.Mul(op.Sigmoid(op.Mul(op.sign(d), root)), op.Unsqueeze(value, [2]))
    y.shape = key.shape
    return y, None if conv_scale is None else rms(op, y, conv_scale, epsilon)
