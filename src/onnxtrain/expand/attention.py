"""Attention and rotary embeddings.

Order: Attention of the standard (newer than the working opset); attention of projected queries,
keys and values; attention that projects its input; packed sequences without padding; position
biases; rotary embeddings.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.expand.attention_parts import (
    apply_rotary,
    causal_mask,
    concat_past,
    join_heads,
    mask_bias,
    rotary_angles,
    rotate,
    scaled_dot_product_attention,
    split_heads,
)
from onnxtrain.expand.expansions import TRAINING, expansion, raise_unsupported
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, Size, minus

_INT64 = ir.DataType.INT64
_RAW, _CAPPED, _BIASED, _PROBABILITIES = range(4)  # values of qk_matmul_output_mode


@expansion("Attention", when=TRAINING)
def attention(
    op,
    q,
    k,
    v,
    attn_mask=None,
    past_key=None,
    past_value=None,
    nonpad_kv_seqlen=None,
    *,
    is_causal=0,
    kv_num_heads,
    q_num_heads,
    qk_matmul_output_mode=0,
    scale=None,
    softcap=0.0,
    softmax_precision=None,
    left_window_size=-1,
    right_window_size=-1,
    node,
):
    """``softmax(cap(scale q k^T) + bias) v``; rows without any key give zero.

    Masked scores become the lowest finite number instead of -inf, so that no row becomes NaN. Where
    a row has at least one key, its masked probabilities are exactly zero either way.
    """
    flat = op.rank(q) == 3
    if flat:
        q = _split_heads(op, q, q_num_heads)
        k, v = _split_heads(op, k, kv_num_heads), _split_heads(op, v, kv_num_heads)
    if past_key is not None:
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    raw = capped = _grouped_matmul(op, op.Mul(q, _scale_factor(op, q, scale)), op.mT(k), k)
    if softcap:
        capped = op.Mul(op.Tanh(op.Div(raw, softcap)), softcap)

    scores, allowed, certain = _apply_mask(op, capped, attn_mask, k)
    windows = [w for w in (left_window_size, right_window_size) if w >= 0]
    if is_causal or windows:
        allowed += _window_mask(
            op, q, k, past_key, nonpad_kv_seqlen, is_causal, left_window_size, right_window_size
        )
        certain = certain and not windows
    if nonpad_kv_seqlen is not None:
        lengths = op.reshape(nonpad_kv_seqlen, [-1, 1, 1, 1])
        allowed.append(op.Less(op.iota(op.size(k, 2)), lengths))
        certain = False
    keep = functools.reduce(op.And, allowed) if allowed else None
    logits = scores
    if keep is not None:
        lowest = float(ir.DataType(q.dtype).min)
        logits = op.Where(keep, scores, lowest)
        logits.shape = scores.shape
    wide = op.cast(logits, None if softmax_precision is None else ir.DataType(softmax_precision))
    p = op.cast(op.Softmax(wide, axis=-1), q.dtype)
    if keep is not None and not certain:
        p = op.Mul(p, op.Cast(keep, to=q.dtype))
        p.shape = scores.shape
    y = _grouped_matmul(op, p, v, v)

    qk_output = None
    if len(node.outputs) > 3 and node.outputs[3].name:
        qk_output = [raw, capped, scores, p][qk_matmul_output_mode]
        if qk_matmul_output_mode == _BIASED and keep is not None:
            qk_output = op.Where(keep, scores, -np.inf)
    return _join_heads(op, y) if flat else y, k, v, qk_output


def _split_heads(op: OpBuilder, x: ir.Value, heads: int) -> ir.Value:
    """[B, S, H*D] -> [B, H, S, D]."""
    return op.Transpose(op.Reshape(x, [0, 0, heads, -1]), perm=[0, 2, 1, 3])


def _join_heads(op: OpBuilder, x: ir.Value) -> ir.Value:
    """[B, H, S, D] -> [B, S, H*D]."""
    return op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), [0, 0, -1])


def _scale_factor(op: OpBuilder, q: ir.Value, scale: float | None) -> float | ir.Value:
    if scale is not None:
        return scale
    size = op.dims(q)[-1]
    return size**-0.5 if isinstance(size, int) else op.Reciprocal(op.Sqrt(op.count(q, [3])))


def _grouped_matmul(op: OpBuilder, a: ir.Value, b: ir.Value, kv: ir.Value) -> ir.Value:
    """Multiply [B, Hq, S, m] by [B, Hkv, m, n]; ``Hq / Hkv`` heads of ``a`` share one of ``b``.

    Those heads are adjacent, so their rows are merged instead of repeating ``b``. Unlike
    ``attention_parts.grouped_matmul``, the numbers of heads may be symbolic.
    """
    if op.dims(a)[1] == op.dims(kv)[1]:
        return op.MatMul(a, b)
    grouped = op.Reshape(a, op.vector([0, op.size(kv, 1), -1, op.size(a, 3)]))
    S.set_dims(grouped, [op.dims(a)[0], *op.dims(grouped)[1:]])
    product = op.MatMul(grouped, b)
    y = op.Reshape(product, op.vector([0, op.size(a, 1), op.size(a, 2), -1]))
    S.set_dims(y, [*op.dims(a)[:3], op.dims(b)[3]])
    return y


def _apply_mask(
    op: OpBuilder, scores: ir.Value, mask: ir.Value | None, k: ir.Value
) -> tuple[ir.Value, list[ir.Value], bool]:
    """Return the scores with a mask added, conditions on keys, and whether every row has a key."""
    if mask is None:
        return scores, [], True
    if mask.dtype != ir.DataType.BOOL:
        mask = op.cast(mask, scores.dtype)  # integer masks are added, too
    mask = _pad_mask(op, mask, k)
    if mask.dtype == ir.DataType.BOOL:
        return scores, [mask], False
    biased = op.Add(scores, mask)
    if not _may_be_infinite(op, mask):
        return biased, [], True
    return biased, [op.Greater(mask, -np.inf)], False


def _pad_mask(op: OpBuilder, mask: ir.Value, k: ir.Value) -> ir.Value:
    """Pad the last axis of a mask to the number of keys; keys beyond the mask are masked."""
    if op.dims(mask)[-1] == op.dims(k)[2]:
        return mask
    missing = minus(op, op.size(k, 2), op.size(mask, -1))
    filler = False if mask.dtype == ir.DataType.BOOL else -np.inf
    zeros: list[Size] = [0] * (2 * op.rank(mask) - 1)
    padded = op.Pad(mask, op.vector([*zeros, missing]), op.const(filler, mask.dtype))
    S.set_dims(padded, [*op.dims(mask)[:-1], op.dims(k)[2]])
    return padded


def _may_be_infinite(op: OpBuilder, mask: ir.Value) -> bool:
    array = op.constant(mask)
    return array is None or bool(np.isneginf(array.astype(np.float64)).any())


def _window_mask(
    op: OpBuilder,
    q: ir.Value,
    k: ir.Value,
    past: ir.Value | None,
    lengths: ir.Value | None,
    causal: int,
    left: int,
    right: int,
) -> list[ir.Value]:
    """Return conditions ``p - left <= j <= p + right`` on key j and the position p of a query."""
    rows = op.reshape(op.iota(op.size(q, 2)), [-1, 1])
    if past is not None:
        rows = op.Add(rows, op.vector([op.size(past, 2)]))
    elif lengths is not None:
        offset = op.Sub(lengths, op.vector([op.size(q, 2)]))
        rows = op.Add(rows, op.reshape(offset, [-1, 1, 1, 1]))
    columns = op.iota(op.size(k, 2))
    conditions = []
    if causal:
        conditions.append(op.LessOrEqual(columns, rows))
    if left >= 0:
        conditions.append(op.GreaterOrEqual(columns, op.Sub(rows, left)))
    if right >= 0:
        conditions.append(op.LessOrEqual(columns, op.Add(rows, right)))
    return conditions


@expansion("com.microsoft::MultiHeadAttention", when=TRAINING)
def multi_head_attention(
    op,
    query,
    key=None,
    value=None,
    bias=None,
    mask=None,
    attention_bias=None,
    past_key=None,
    past_value=None,
    past_length=None,
    cache=None,
    *,
    num_heads,
    scale=None,
    unidirectional=0,
    mask_filter_value=-10000.0,
    node,
):
    """Attention of projected queries, keys and values, each [batch, sequence, heads * size]."""
    if past_length is not None or cache is not None:
        raise_unsupported(node, "training through a fixed-length cache buffer is not supported")
    q, k, v = _split_qkv(op, query, key, value, bias, num_heads, node)
    k, v = concat_past(op, past_key, k), concat_past(op, past_value, v)
    added = [attention_bias, mask_bias(op, mask, q, k, past_key, mask_filter_value, node)]
    conditions = [causal_mask(op, q, k, past_key)] if unidirectional else []
    y, scores = scaled_dot_product_attention(
        op, q, k, v, scale=scale, added=added, allowed=conditions
    )
    return join_heads(op, y), k, v, _scores_output(op, scores, conditions)


@expansion("com.microsoft::DecoderMaskedMultiHeadAttention", when=TRAINING)
def decoder_masked_multi_head_attention(
    op,
    query,
    key=None,
    value=None,
    mask=None,
    attention_bias=None,
    past_key=None,
    past_value=None,
    past_length=None,
    beam_width=None,
    cache=None,
    bias=None,
    *,
    num_heads,
    scale=None,
    mask_filter_value=-10000.0,
    output_qk=0,
    past_present_share_buffer=0,
    node,
):
    """MultiHeadAttention of one new token per sequence."""
    if past_present_share_buffer or cache is not None:
        raise_unsupported(node, "training through a fixed-length cache buffer is not supported")
    q, k, v = _split_qkv(op, query, key, value, bias, num_heads, node)
    k, v = concat_past(op, past_key, k), concat_past(op, past_value, v)
    added = [attention_bias, mask_bias(op, mask, q, k, past_key, mask_filter_value, node)]
    y, scores = scaled_dot_product_attention(op, q, k, v, scale=scale, added=added)
    return join_heads(op, y), k, v, scores


def _scores_output(op: OpBuilder, scores: ir.Value, conditions: list[ir.Value]) -> ir.Value | None:
    """Return the scores if the kernel does: with a causal mask it overwrites them."""
    return None if conditions else scores


def _split_qkv(
    op: OpBuilder,
    query: ir.Value,
    key: ir.Value | None,
    value: ir.Value | None,
    bias: ir.Value | None,
    heads: int,
    node: ir.Node,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return queries, keys and values, [B, heads, S, size], with the projections' bias."""
    if key is None and op.rank(query) == 5:  # [B, S, heads, 3, size]
        q, k, v = (_unpack_qkv(op, query, i) for i in range(3))
        flat = [join_heads(op, t) for t in (q, k, v)] if bias is not None else [q, k, v]
    elif key is None:
        flat = list(op.Split(query, axis=-1, num_outputs=3, _outputs=3))
    elif value is None:  # [B, S, heads, 2, size]
        k, v = (_unpack_qkv(op, key, i) for i in range(2))
        flat = [query, *((join_heads(op, t) for t in (k, v)) if bias is not None else (k, v))]
    else:
        flat = [query, key, value]
    if bias is not None:
        flat = _add_qkv_bias(op, flat, bias, heads, node)
    q, k, v = (t if op.rank(t) == 4 else split_heads(op, t, heads) for t in flat)
    return q, k, v


def _unpack_qkv(op: OpBuilder, packed: ir.Value, i: int) -> ir.Value:
    one = op.Gather(packed, op.const(i), axis=3)  # [B, S, heads, size]
    return op.Transpose(one, perm=[0, 2, 1, 3])


def _add_qkv_bias(
    op: OpBuilder, flat: list[ir.Value], bias: ir.Value, heads: int, node: ir.Node
) -> list[ir.Value]:
    query, key, value = flat
    width, total = op.dims(query)[-1], op.dims(bias)[-1]
    if not isinstance(width, int) or not isinstance(total, int):
        raise_unsupported(node, "the width of the bias must be static")
    parts = op.Split(bias, [width, width, total - 2 * width], axis=0, _outputs=3)
    out = []
    for t, b in zip((query, key, value), parts, strict=True):
        if op.rank(t) == 3:
            dims = op.dims(t)
            t = op.Add(t, b)
            S.set_dims(t, dims)
        out.append(t)
    return out


@expansion("com.microsoft::Attention", when=TRAINING)
def contrib_attention(
    op,
    x,
    weights,
    bias=None,
    mask=None,
    past=None,
    attention_bias=None,
    past_length=None,
    *,
    num_heads,
    unidirectional=0,
    scale=None,
    mask_filter_value=-10000.0,
    qkv_hidden_sizes=None,
    do_rotary=0,
    past_present_share_buffer=0,
    rotary_embedding_dim=0,
    node,
):
    """Self-attention with a joint QKV projection and an optional cache of keys and values."""
    if past_present_share_buffer or past_length is not None:
        raise_unsupported(node, "training through a fixed-length cache buffer is not supported")
    q, k, v = project_qkv(op, x, weights, bias, num_heads, qkv_hidden_sizes)
    past_key, past_value = (None, None) if past is None else _split_past(op, past)
    if do_rotary:
        q, k = (
            _apply_rotary_by_position(op, t, past_key, rotary_embedding_dim, node) for t in (q, k)
        )
    k, v = concat_past(op, past_key, k), concat_past(op, past_value, v)
    added = [attention_bias, mask_bias(op, mask, q, k, past_key, mask_filter_value, node)]
    conditions = [causal_mask(op, q, k, past_key)] if unidirectional else []
    y, _ = scaled_dot_product_attention(op, q, k, v, scale=scale, added=added, allowed=conditions)
    return join_heads(op, y), _requested_present(op, k, v, node)


@expansion("com.microsoft::DecoderMaskedSelfAttention", when=TRAINING)
def decoder_masked_self_attention(
    op,
    x,
    weights,
    bias,
    mask=None,
    past=None,
    attention_bias=None,
    past_length=None,
    beam_width=None,
    cache=None,
    *,
    num_heads,
    scale=None,
    mask_filter_value=-10000.0,
    do_rotary=0,
    past_present_share_buffer=0,
    node,
):
    """Attention of one new token per sequence."""
    if past_present_share_buffer or cache is not None:
        raise_unsupported(node, "training through a fixed-length cache buffer is not supported")
    return contrib_attention(
        op,
        x,
        weights,
        bias,
        mask,
        past,
        attention_bias,
        num_heads=num_heads,
        scale=scale,
        mask_filter_value=mask_filter_value,
        do_rotary=do_rotary,
        node=node,
    )


def project_qkv(
    op: OpBuilder,
    x: ir.Value,
    weights: ir.Value,
    bias: ir.Value | None,
    heads: int,
    sizes: list[int] | None,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return queries, keys and values of ``x @ weights + bias``, each [B, heads, S, size]."""
    y = op.MatMul(x, weights)
    if bias is not None:
        dims = y.shape
        y = op.Add(y, bias)
        y.shape = dims
    if sizes:
        parts = op.Split(y, sizes, axis=-1, _outputs=3)
    else:
        parts = op.Split(y, axis=-1, num_outputs=3, _outputs=3)
    q, k, v = (split_heads(op, t, heads) for t in parts)
    return q, k, v


def _split_past(op: OpBuilder, past: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return keys and values of a cache [2, batch, heads, length, size]."""
    return op.Gather(past, op.const(0), axis=0), op.Gather(past, op.const(1), axis=0)


def _requested_present(op: OpBuilder, k: ir.Value, v: ir.Value, node: ir.Node) -> ir.Value | None:
    present = node.outputs[1] if len(node.outputs) > 1 else None
    if present is None or not (present.uses() or present.is_graph_output()):
        return None
    return op.Concat(op.Unsqueeze(k, [0]), op.Unsqueeze(v, [0]), axis=0)


def _apply_rotary_by_position(
    op: OpBuilder, x: ir.Value, past: ir.Value | None, dim: int, node: ir.Node
) -> ir.Value:
    """Rotate by ``position * 10000^(-2 i / dim)``; positions continue those of the cache."""
    size = dim or op.dims(x)[3]
    if not isinstance(size, int):
        raise_unsupported(node, "the head size must be static")
    half = size // 2
    rates = op.const([10000.0 ** (-i / half) for i in range(half)], ir.DataType.FLOAT)
    rows = op.iota(op.size(x, 2))
    if past is not None:
        rows = op.Add(rows, op.vector([op.size(past, 2)]))
    angle = op.Mul(op.Unsqueeze(op.Cast(rows, to=ir.DataType.FLOAT), [1]), rates)
    cos, sin = (op.Unsqueeze(op.cast(t, x.dtype), [0, 1]) for t in (op.Cos(angle), op.Sin(angle)))
    return apply_rotary(op, x, cos, sin, 0, node)


@expansion("com.microsoft::PackedAttention", when=TRAINING)
def packed_attention(
    op,
    x,
    weights,
    bias,
    token_offset,
    sums,
    attention_bias=None,
    *,
    num_heads,
    scale=None,
    qkv_hidden_sizes=None,
):
    """Attention within each sequence of packed [tokens, width], with a joint QKV projection."""
    y = op.Add(op.MatMul(x, weights), bias)
    if qkv_hidden_sizes:
        q, k, v = op.Split(y, qkv_hidden_sizes, axis=-1, _outputs=3)
    else:
        q, k, v = op.Split(y, axis=-1, num_outputs=3, _outputs=3)
    return _attend_packed(op, q, k, v, sums, token_offset, attention_bias, num_heads, scale)


@expansion("com.microsoft::PackedMultiHeadAttention", when=TRAINING)
def packed_multi_head_attention(
    op,
    query,
    key=None,
    value=None,
    bias=None,
    token_offset: Any = None,
    sums: Any = None,
    attention_bias=None,
    *,
    num_heads,
    scale=None,
    mask_filter_value=-10000.0,
    node,
):
    """Attention within each sequence of packed, projected [tokens, width]."""
    if key is None:  # [tokens, heads, 3, size]
        query, key, value = (
            op.Reshape(op.Gather(query, op.const(i), axis=2), [0, -1]) for i in range(3)
        )
    if bias is not None:
        width, total = op.dims(query)[-1], op.dims(bias)[-1]
        if not isinstance(width, int) or not isinstance(total, int):
            raise_unsupported(node, "the width of the bias must be static")
        parts = op.Split(bias, [width, width, total - 2 * width], axis=0, _outputs=3)
        query, key, value = (op.Add(t, b) for t, b in zip((query, key, value), parts, strict=True))
    assert value is not None
    return _attend_packed(
        op, query, key, value, sums, token_offset, attention_bias, num_heads, scale
    )


def _attend_packed(
    op: OpBuilder,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    sums: ir.Value,
    offsets: ir.Value,
    bias: ir.Value | None,
    heads: int,
    scale: float | None,
) -> ir.Value:
    """Compute one score matrix over all tokens and mask it to its diagonal blocks."""
    at = op.iota(op.size(q, 0))
    starts = op.cast(op.Slice(sums, [1], [-1], [0]), _INT64)
    # The sequence of a token: the number of sequences that start at or before it.
    later = op.GreaterOrEqual(op.Unsqueeze(at, [1]), op.Unsqueeze(starts, [0]))
    own = op.ReduceSum(op.Cast(later, to=_INT64), [1], keepdims=0)
    same = op.Equal(op.Unsqueeze(own, [1]), op.Unsqueeze(own, [0]))
    added = None
    if bias is not None:  # [batch or 1, heads or 1, length, length]
        added = _pairwise_bias(op, bias, own, offsets, q)
    q, k, v = (split_heads(op, op.Unsqueeze(t, [0]), heads) for t in (q, k, v))
    y, _ = scaled_dot_product_attention(op, q, k, v, scale=scale, added=[added], allowed=[same])
    return op.Squeeze(join_heads(op, y), [0])


def _pairwise_bias(
    op: OpBuilder, bias: ir.Value, own: ir.Value, offsets: ir.Value, q: ir.Value
) -> ir.Value:
    """Return [1, heads or 1, tokens, tokens]; pairs across sequences are masked later."""
    count = op.vector([op.size(q, 0)])
    flat = op.Slice(op.cast(op.Reshape(offsets, [-1]), _INT64), [0], count, [0])
    length = op.vector([op.size(offsets, 1)])
    place = op.Mod(flat, length)
    whole = op.Transpose(bias, perm=[0, 2, 3, 1])  # [B, S, S, heads]
    batch = op.Min(own, op.Sub(op.Shape(bias, start=0, end=1), 1))
    rows = op.Unsqueeze(batch, [1])
    column = op.Unsqueeze(place, [1])
    index = op.Concat(
        op.Unsqueeze(op.Add(rows, op.Mul(op.Unsqueeze(place, [0]), 0)), [2]),
        op.Unsqueeze(op.Add(column, op.Mul(op.Unsqueeze(place, [0]), 0)), [2]),
        op.Unsqueeze(op.Add(op.Mul(column, 0), op.Unsqueeze(place, [0])), [2]),
        axis=2,
    )
    return op.Unsqueeze(op.Transpose(op.GatherND(whole, index), perm=[2, 0, 1]), [0])


@expansion("com.microsoft::RestorePadding", when=TRAINING)
def restore_padding(op, x, token_offset):
    """Scatter tokens to their padded positions; padding becomes zero."""
    places = op.cast(op.Reshape(token_offset, [-1]), _INT64)
    count = op.vector([op.size(x, 0)])
    real = op.Slice(places, [0], count, [0])
    total = op.Mul(op.vector([op.size(token_offset, 0)]), op.vector([op.size(token_offset, 1)]))
    zeros = op.full(op.Concat(total, op.vector([op.size(x, 1)]), axis=0), 0.0, x.dtype)
    filled = op.ScatterND(zeros, op.Unsqueeze(real, [1]), x)
    y = op.Reshape(filled, op.Concat(op.shape_of(token_offset), op.const([-1]), axis=0))
    S.set_dims(y, [*op.dims(token_offset), op.dims(x)[1]])
    return y


@expansion("com.microsoft::RemovePadding", when=TRAINING)
def remove_padding(op, x, counts):
    """Return packed tokens, their positions, cumulative lengths and the longest length."""
    batch, length = op.vector([op.size(x, 0)]), op.vector([op.size(x, 1)])
    lengths = op.cast(counts, _INT64)
    column = op.iota(op.size(x, 1))
    real = op.Less(column, op.Unsqueeze(lengths, [1]))  # [B, S]
    flat = op.Reshape(real, [-1])
    first = op.Reshape(op.NonZero(flat), [-1])
    rest = op.Reshape(op.NonZero(op.Not(flat)), [-1])
    rows = op.Reshape(x, op.Concat(op.Mul(batch, length), op.vector([op.size(x, 2)]), axis=0))
    packed = op.Gather(rows, first, axis=0)
    places = op.Reshape(op.Concat(first, rest, axis=0), op.Concat(batch, length, axis=0))
    sums = op.Concat(op.const([0]), op.CumSum(lengths, op.const(0)), axis=0)
    longest = op.Reshape(op.ReduceMax(lengths, keepdims=0), [1])
    return packed, *(op.Cast(t, to=counts.dtype) for t in (places, sums, longest))


@expansion("com.microsoft::RelativePositionBias", when=TRAINING)
def relative_position_bias(
    op, table, query_length, key_length, *, max_distance, is_bidirectional=0, node
):
    """T5's bias: one value per head and distance bucket."""
    rows, columns = (
        op.iota(op.cast(op.Reshape(n, [1]), _INT64)) for n in (query_length, key_length)
    )
    buckets = op.dims(table)[0]
    if not isinstance(buckets, int):
        raise_unsupported(node, "the number of buckets must be static")
    far = op.Sub(op.Unsqueeze(rows, [1]), op.Unsqueeze(columns, [0]))  # distance to earlier tokens
    base: Any = None
    if is_bidirectional:
        buckets //= 2
        base = op.Mul(op.Cast(op.Less(far, 0), to=_INT64), buckets)
        far = op.Abs(far)
    else:
        far = op.Max(far, 0)
    exact = buckets // 2
    wide = op.Cast(op.Max(far, 1), to=ir.DataType.FLOAT)
    steps = (buckets - exact) / math.log(max_distance / exact)
    large = op.Add(op.Cast(op.Mul(op.Log(op.Div(wide, float(exact))), steps), to=_INT64), exact)
    bins = op.Where(op.Less(far, exact), far, op.Min(large, buckets - 1))
    bins = bins if base is None else op.Add(bins, base)
    return op.Unsqueeze(op.Transpose(op.Gather(table, bins, axis=0), perm=[2, 0, 1]), [0])


@expansion("com.microsoft::GatedRelativePositionBias", when=TRAINING)
def gated_relative_position_bias(
    op, query, query_bias, rel_pos, weight, bias, eco_a, token_offset=None, *, num_heads, node
):
    """``(u (r a - 1) + 2) * rel_pos``, with gates u and r computed from the queries."""
    if token_offset is not None:
        raise_unsupported(node, "packed sequences are not supported")
    heads = split_heads(op, op.Add(query, query_bias), num_heads)  # [B, H, S, D]
    gates = op.Add(op.MatMul(heads, weight), bias)
    half = op.dims(weight)[-1]
    if not isinstance(half, int):
        raise_unsupported(node, "the width of the gates must be static")
    sums = op.ReduceSum(op.Reshape(gates, [0, 0, 0, 2, half // 2]), [-1], keepdims=0)
    u, r = op.Split(op.Sigmoid(sums), axis=-1, num_outputs=2, _outputs=2)  # [B, H, S, 1]
    return op.Mul(op.Add(op.Mul(u, op.Sub(op.Mul(r, eco_a), 1.0)), 2.0), rel_pos)


@expansion("RotaryEmbedding", when=TRAINING)
def rotary_embedding(
    op,
    x,
    cos_cache,
    sin_cache,
    position_ids=None,
    *,
    interleaved=0,
    num_heads=0,
    rotary_embedding_dim=0,
):
    """Rotate pairs of features ``(a, b)`` to ``(a cos - b sin, a sin + b cos)``."""
    flat = op.rank(x) == 3
    # [B, S, H, D] if x is flat, else [B, H, S, D]: only the unsqueezed axis differs.
    heads = op.Reshape(x, [0, 0, num_heads, -1]) if flat else x
    if position_ids is not None:
        cos_cache = op.Gather(cos_cache, position_ids, axis=0)
        sin_cache = op.Gather(sin_cache, position_ids, axis=0)
    spread = [2 if flat else 1]
    cos, sin = op.Unsqueeze(cos_cache, spread), op.Unsqueeze(sin_cache, spread)
    part = rotary_embedding_dim if op.dims(heads)[-1] != rotary_embedding_dim else 0
    y = rotate(op, heads, cos, sin, interleaved, part or None)
    return op.reshape_like(y, x) if flat else y


@expansion("com.microsoft::RotaryEmbedding", when=TRAINING)
def contrib_rotary_embedding(
    op,
    x,
    position_ids,
    cos_cache,
    sin_cache,
    *,
    interleaved=0,
    num_heads=0,
    rotary_embedding_dim=0,
    scale=1.0,
    is_packed_batching=0,
    node,
):
    """Rotate pairs of features by an angle that grows with the position.

    A single position is that of the first token. onnxruntime ignores ``scale``.
    """
    heads = _heads(op, x, cos_cache, num_heads, rotary_embedding_dim, node)
    where = position_ids
    if op.rank(position_ids) == 1:
        first = op.Reshape(position_ids, [1, 1])
        where = op.Add(first, op.Unsqueeze(op.iota(op.size(heads, 2)), [0]))
    cos, sin = rotary_angles(op, cos_cache, where), rotary_angles(op, sin_cache, where)
    y = apply_rotary(op, heads, cos, sin, interleaved, node)
    return join_heads(op, y) if op.rank(x) == 3 else y


@expansion("com.microsoft::MRotaryEmbedding", when=TRAINING)
def multimodal_rotary_embedding(
    op,
    x,
    position_ids,
    cos_cache,
    sin_cache,
    *,
    mrope_section,
    interleaved=0,
    num_heads=0,
    rotary_embedding_dim=0,
    scale=1.0,
    is_packed_batching=0,
    mrope_layout=0,
    node,
):
    """Rotate by three positions per token, each for its own section of the features."""
    if is_packed_batching:
        raise_unsupported(node, "packed sequences are not supported: they have no batch axis")
    heads = _heads(op, x, cos_cache, num_heads, rotary_embedding_dim, node)
    half = op.dims(cos_cache)[-1]
    if not isinstance(half, int):
        raise_unsupported(node, "the width of cos_cache must be static")
    stream = op.const(_streams(mrope_section, half, mrope_layout))  # [half]
    tables = []
    for cache in (cos_cache, sin_cache):
        rows = op.Gather(cache, position_ids, axis=0)  # [3, B, S, half]
        chosen = [
            op.Mul(
                op.Gather(rows, op.const(i), axis=0),
                op.cast(op.Equal(stream, op.const(i)), cache.dtype),
            )
            for i in range(3)
        ]
        tables.append(op.Unsqueeze(op.Add(op.Add(chosen[0], chosen[1]), chosen[2]), [1]))
    y = apply_rotary(op, heads, tables[0], tables[1], interleaved, node)
    return join_heads(op, y) if op.rank(x) == 3 else y


def _streams(section: list[int], half: int, layout: int) -> list[int]:
    """Return which of the three positions rotates each pair of features."""
    if not layout:
        return [i for i, n in enumerate(section) for _ in range(n)][:half]
    streams = [0] * half
    for i in (1, 2):
        for j in range(i, 3 * section[i], 3):
            streams[j] = i
    return streams


@expansion("com.microsoft::GemmaRotaryEmbedding", when=TRAINING)
def gemma_rotary_embedding(op, angle, q, q_rotated, k, k_rotated):
    """``q cos + q_rotated sin`` and the same for ``k``; the angles are [batch, sequence, size]."""
    cos = op.Unsqueeze(op.cast(op.Cos(angle), q.dtype), [1])
    sin = op.Unsqueeze(op.cast(op.Sin(angle), q.dtype), [1])
    left = op.Add(op.Mul(q, cos), op.Mul(q_rotated, sin))
    right = op.Add(op.Mul(k, cos), op.Mul(k_rotated, sin))
    left.shape, right.shape = q.shape, k.shape
    return left, right


def _heads(
    op: OpBuilder, x: ir.Value, cache: ir.Value, number: int, dim: int, node: ir.Node
) -> ir.Value:
    """Return [B, heads, S, size]; by default the head size follows from the cache width."""
    if op.rank(x) == 4:
        return x
    width, half = op.dims(x)[-1], op.dims(cache)[-1]
    if not number and not dim and isinstance(width, int) and isinstance(half, int):
        number = width // (2 * half)
    if not number:
        raise_unsupported(node, "the number of heads is unknown\nhint: set the attribute num_heads")
    return split_heads(op, x, number)
