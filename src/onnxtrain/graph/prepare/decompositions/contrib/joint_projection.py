"""Self-attention that projects its input itself."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.prepare.decompose import decomposition
from onnxtrain.graph.prepare.decompositions.contrib.heads import (
    attend,
    causal,
    join_heads,
    refuse,
    split_heads,
    turn,
    with_past,
)
from onnxtrain.graph.prepare.decompositions.contrib.padding_masks import mask_bias


@decomposition("com.microsoft::Attention")
def attention(
    op, x, weights, bias=None, mask=None, past=None, attention_bias=None, past_length=None, *,
    num_heads, unidirectional=0, scale=None, mask_filter_value=-10000.0, qkv_hidden_sizes=None,
    do_rotary=0, past_present_share_buffer=0, rotary_embedding_dim=0, node,
):  # fmt: skip
    """Self-attention with one joint projection; keys and values of a cache may stand in front."""
    if past_present_share_buffer or past_length is not None:
        refuse(node, "a cache in a buffer of fixed length cannot be trained through")
    q, k, v = projected(op, x, weights, bias, num_heads, qkv_hidden_sizes)
    past_key, past_value = (None, None) if past is None else _halves(op, past)
    if do_rotary:
        q, k = (_rotated(op, t, past_key, rotary_embedding_dim, node) for t in (q, k))
    k, v = with_past(op, past_key, k), with_past(op, past_value, v)
    added = [attention_bias, mask_bias(op, mask, q, k, past_key, mask_filter_value, node)]
    conditions = [causal(op, q, k, past_key)] if unidirectional else []
    y, _ = attend(op, q, k, v, scale=scale, added=added, allowed=conditions)
    return join_heads(op, y), _wanted_present(op, k, v, node)


@decomposition("com.microsoft::DecoderMaskedSelfAttention")
def decoder_masked_self_attention(
    op, x, weights, bias, mask=None, past=None, attention_bias=None, past_length=None,
    beam_width=None, cache=None, *, num_heads, scale=None, mask_filter_value=-10000.0,
    do_rotary=0, past_present_share_buffer=0, node,
):  # fmt: skip
    """One new token per sequence: what Attention gives for it."""
    if past_present_share_buffer or cache is not None:
        refuse(node, "a cache in a buffer of fixed length cannot be trained through")
    return attention(
        op, x, weights, bias, mask, past, attention_bias, num_heads=num_heads, scale=scale,
        mask_filter_value=mask_filter_value, do_rotary=do_rotary, node=node,
    )  # fmt: skip


def projected(
    op: OpBuilder, x: ir.Value, weights: ir.Value, bias: ir.Value | None, heads: int,
    sizes: list[int] | None,
) -> tuple[ir.Value, ir.Value, ir.Value]:  # fmt: skip
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


def _halves(op: OpBuilder, past: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return keys and values of a cache [2, batch, heads, length, size]."""
    return op.Gather(past, op.const(0), axis=0), op.Gather(past, op.const(1), axis=0)


def _wanted_present(op: OpBuilder, k: ir.Value, v: ir.Value, node: ir.Node) -> ir.Value | None:
    present = node.outputs[1] if len(node.outputs) > 1 else None
    if present is None or not (present.uses() or present.is_graph_output()):
        return None
    return op.Concat(op.Unsqueeze(k, [0]), op.Unsqueeze(v, [0]), axis=0)


def _rotated(
    op: OpBuilder, x: ir.Value, past: ir.Value | None, dim: int, node: ir.Node
) -> ir.Value:
    """Rotate by angles ``position * 10000^(-2 i / dim)`` behind the tokens of a cache."""
    size = dim or op.dims(x)[3]
    if not isinstance(size, int):
        refuse(node, "the size of a head is not known")
    half = size // 2
    rates = op.const([10000.0 ** (-i / half) for i in range(half)], ir.DataType.FLOAT)
    rows = op.iota(op.size(x, 2))
    if past is not None:
        rows = op.Add(rows, op.vector([op.size(past, 2)]))
    angle = op.Mul(op.Unsqueeze(op.Cast(rows, to=ir.DataType.FLOAT), [1]), rates)
    cos, sin = (op.Unsqueeze(op.cast(t, x.dtype), [0, 1]) for t in (op.Cos(angle), op.Sin(angle)))
    return turn(op, x, cos, sin, 0, node)
