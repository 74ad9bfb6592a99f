"""Sequences packed one behind the other, without padding; and biases by relative position."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.prepare.decompose import decomposition
from onnxtrain.graph.prepare.decompositions.contrib.heads import (
    attend,
    join_heads,
    refuse,
    split_heads,
)

_INT64 = ir.DataType.INT64


@decomposition("com.microsoft::PackedAttention")
def packed_attention(
    op, x, weights, bias, token_offset, sums, attention_bias=None, *, num_heads, scale=None,
    qkv_hidden_sizes=None,
):  # fmt: skip
    """Attention of [tokens, width] with a joint projection, each sequence by itself."""
    y = op.Add(op.MatMul(x, weights), bias)
    if qkv_hidden_sizes:
        q, k, v = op.Split(y, qkv_hidden_sizes, axis=-1, _outputs=3)
    else:
        q, k, v = op.Split(y, axis=-1, num_outputs=3, _outputs=3)
    return _attend_packed(op, q, k, v, sums, token_offset, attention_bias, num_heads, scale)


@decomposition("com.microsoft::PackedMultiHeadAttention")
def packed_multi_head_attention(
    op, query, key=None, value=None, bias=None, token_offset: Any = None, sums: Any = None,
    attention_bias=None, *, num_heads, scale=None, mask_filter_value=-10000.0, node,
):  # fmt: skip
    """Attention of projected [tokens, width], each sequence by itself."""
    if key is None:  # [tokens, heads, 3, size]
        query, key, value = (
            op.Reshape(op.Gather(query, op.const(i), axis=2), [0, -1]) for i in range(3)
        )
    if bias is not None:
        width, total = op.dims(query)[-1], op.dims(bias)[-1]
        if not isinstance(width, int) or not isinstance(total, int):
            refuse(node, "the widths of the bias are not known")
        parts = op.Split(bias, [width, width, total - 2 * width], axis=0, _outputs=3)
        query, key, value = (op.Add(t, b) for t, b in zip((query, key, value), parts, strict=True))
    assert value is not None
    return _attend_packed(
        op, query, key, value, sums, token_offset, attention_bias, num_heads, scale
    )


def _attend_packed(
    op: OpBuilder, q: ir.Value, k: ir.Value, v: ir.Value, sums: ir.Value, offsets: ir.Value,
    bias: ir.Value | None, heads: int, scale: float | None,
) -> ir.Value:  # fmt: skip
    """All tokens attend in one matrix, of which only blocks on the diagonal count."""
    at = op.iota(op.size(q, 0))
    starts = op.cast(op.Slice(sums, [1], [-1], [0]), _INT64)
    # Of how many sequences each token lies behind the start: the number of its own.
    later = op.GreaterOrEqual(op.Unsqueeze(at, [1]), op.Unsqueeze(starts, [0]))
    own = op.ReduceSum(op.Cast(later, to=_INT64), [1], keepdims=0)
    same = op.Equal(op.Unsqueeze(own, [1]), op.Unsqueeze(own, [0]))
    added = None
    if bias is not None:  # [batch or 1, heads or 1, length, length]
        added = _bias_of_pairs(op, bias, own, offsets, q)
    q, k, v = (split_heads(op, op.Unsqueeze(t, [0]), heads) for t in (q, k, v))
    y, _ = attend(op, q, k, v, scale=scale, added=[added], allowed=[same])
    return op.Squeeze(join_heads(op, y), [0])


def _bias_of_pairs(
    op: OpBuilder, bias: ir.Value, own: ir.Value, offsets: ir.Value, q: ir.Value
) -> ir.Value:
    """Return [1, heads or 1, tokens, tokens]; pairs of other sequences get anything."""
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


@decomposition("com.microsoft::RestorePadding")
def restore_padding(op, x, token_offset):
    """Put each token back to its place; padding becomes zero."""
    places = op.cast(op.Reshape(token_offset, [-1]), _INT64)
    count = op.vector([op.size(x, 0)])
    real = op.Slice(places, [0], count, [0])
    total = op.Mul(op.vector([op.size(token_offset, 0)]), op.vector([op.size(token_offset, 1)]))
    zeros = op.full(op.Concat(total, op.vector([op.size(x, 1)]), axis=0), 0.0, x.dtype)
    filled = op.ScatterND(zeros, op.Unsqueeze(real, [1]), x)
    y = op.Reshape(filled, op.Concat(op.shape_of(token_offset), op.const([-1]), axis=0))
    S.set_dims(y, [*op.dims(token_offset), op.dims(x)[1]])
    return y


@decomposition("com.microsoft::RemovePadding")
def remove_padding(op, x, counts):
    """Drop padding: tokens one behind the other, their places, running sums, longest length."""
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


@decomposition("com.microsoft::RelativePositionBias")
def relative_position_bias(
    op, table, query_length, key_length, *, max_distance, is_bidirectional=0, node
):
    """T5's bias: distances fall into bins, each with a number per head."""
    rows, columns = (
        op.iota(op.cast(op.Reshape(n, [1]), _INT64)) for n in (query_length, key_length)
    )
    buckets = op.dims(table)[0]
    if not isinstance(buckets, int):
        refuse(node, "the number of bins is not known")
    far = op.Sub(op.Unsqueeze(rows, [1]), op.Unsqueeze(columns, [0]))  # how far back
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


@decomposition("com.microsoft::GatedRelativePositionBias")
def gated_relative_position_bias(
    op, query, query_bias, rel_pos, weight, bias, eco_a, token_offset=None, *, num_heads, node
):
    """``u (r a - 1) + 2`` times a bias by position; gates u and r come from the queries."""
    if token_offset is not None:
        refuse(node, "packed sequences")
    heads = split_heads(op, op.Add(query, query_bias), num_heads)  # [B, H, S, D]
    gates = op.Add(op.MatMul(heads, weight), bias)
    half = op.dims(weight)[-1]
    if not isinstance(half, int):
        refuse(node, "the width of the gates is not known")
    sums = op.ReduceSum(op.Reshape(gates, [0, 0, 0, 2, half // 2]), [-1], keepdims=0)
    u, r = op.Split(op.Sigmoid(sums), axis=-1, num_outputs=2, _outputs=2)  # [B, H, S, 1]
    return op.Mul(op.Add(op.Mul(u, op.Sub(op.Mul(r, eco_a), 1.0)), 2.0), rel_pos)
