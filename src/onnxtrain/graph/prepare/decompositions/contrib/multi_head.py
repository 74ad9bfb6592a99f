"""Attention of queries, keys and values that are projected already."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.prepare.decompose import decomposition
from onnxtrain.graph.prepare.decompositions.contrib.heads import (
    attend,
    causal,
    join_heads,
    refuse,
    split_heads,
    with_past,
)
from onnxtrain.graph.prepare.decompositions.contrib.padding_masks import mask_bias


@decomposition("com.microsoft::MultiHeadAttention")
def multi_head_attention(
    op, query, key=None, value=None, bias=None, mask=None, attention_bias=None, past_key=None,
    past_value=None, past_length=None, cache=None, *, num_heads, scale=None, unidirectional=0,
    mask_filter_value=-10000.0, node,
):  # fmt: skip
    """Attention of projected queries, keys and values, each [batch, sequence, heads * size]."""
    if past_length is not None or cache is not None:
        refuse(node, "a cache in a buffer of fixed length cannot be trained through")
    q, k, v = _three(op, query, key, value, bias, num_heads, node)
    k, v = with_past(op, past_key, k), with_past(op, past_value, v)
    added = [attention_bias, mask_bias(op, mask, q, k, past_key, mask_filter_value, node)]
    conditions = [causal(op, q, k, past_key)] if unidirectional else []
    y, scores = attend(op, q, k, v, scale=scale, added=added, allowed=conditions)
    return join_heads(op, y), k, v, _shown(op, scores, conditions)


@decomposition("com.microsoft::DecoderMaskedMultiHeadAttention")
def decoder_masked_multi_head_attention(
    op, query, key=None, value=None, mask=None, attention_bias=None, past_key=None,
    past_value=None, past_length=None, beam_width=None, cache=None, bias=None, *, num_heads,
    scale=None, mask_filter_value=-10000.0, output_qk=0, past_present_share_buffer=0, node,
):  # fmt: skip
    """One new token per sequence: what MultiHeadAttention gives for it."""
    if past_present_share_buffer or cache is not None:
        refuse(node, "a cache in a buffer of fixed length cannot be trained through")
    q, k, v = _three(op, query, key, value, bias, num_heads, node)
    k, v = with_past(op, past_key, k), with_past(op, past_value, v)
    added = [attention_bias, mask_bias(op, mask, q, k, past_key, mask_filter_value, node)]
    y, scores = attend(op, q, k, v, scale=scale, added=added)
    return join_heads(op, y), k, v, scores


def _shown(op: OpBuilder, scores: ir.Value, conditions: list[ir.Value]) -> ir.Value | None:
    """Return the scores as the kernel shows them; it adds a causal mask to them in place."""
    return None if conditions else scores


def _three(
    op: OpBuilder, query: ir.Value, key: ir.Value | None, value: ir.Value | None,
    bias: ir.Value | None, heads: int, node: ir.Node,
) -> tuple[ir.Value, ir.Value, ir.Value]:  # fmt: skip
    """Return queries, keys and values, [B, heads, S, size], with the projections' bias."""
    if key is None and op.rank(query) == 5:  # [B, S, heads, 3, size]
        q, k, v = (_piece(op, query, i) for i in range(3))
        flat = [join_heads(op, t) for t in (q, k, v)] if bias is not None else [q, k, v]
    elif key is None:
        flat = list(op.Split(query, axis=-1, num_outputs=3, _outputs=3))
    elif value is None:  # [B, S, heads, 2, size]
        k, v = (_piece(op, key, i) for i in range(2))
        flat = [query, *((join_heads(op, t) for t in (k, v)) if bias is not None else (k, v))]
    else:
        flat = [query, key, value]
    if bias is not None:
        flat = _biased(op, flat, bias, heads, node)
    q, k, v = (t if op.rank(t) == 4 else split_heads(op, t, heads) for t in flat)
    return q, k, v


def _piece(op: OpBuilder, packed: ir.Value, i: int) -> ir.Value:
    one = op.Gather(packed, op.const(i), axis=3)  # [B, S, heads, size]
    return op.Transpose(one, perm=[0, 2, 1, 3])


def _biased(
    op: OpBuilder, flat: list[ir.Value], bias: ir.Value, heads: int, node: ir.Node
) -> list[ir.Value]:
    query, key, value = flat
    width, total = op.dims(query)[-1], op.dims(bias)[-1]
    if not isinstance(width, int) or not isinstance(total, int):
        refuse(node, "the widths of the bias are not known")
    parts = op.Split(bias, [width, width, total - 2 * width], axis=0, _outputs=3)
    out = []
    for t, b in zip((query, key, value), parts, strict=True):
        if op.rank(t) == 3:
            dims = op.dims(t)
            t = op.Add(t, b)
            S.set_dims(t, dims)
        out.append(t)
    return out
