"""Attention and rotary embedding of the ``com.microsoft`` domain."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.prepare.decompose import decomposition
from onnxtrain.graph.shapes.dims import Dim


@decomposition("com.microsoft::Attention")
def attention(
    op, x, weights, bias=None, mask=None, past=None, attention_bias=None, past_length=None, *,
    num_heads, unidirectional=0, scale=None, mask_filter_value=-10000.0, qkv_hidden_sizes=None,
    do_rotary=0, past_present_share_buffer=0, rotary_embedding_dim=0, node,
):  # fmt: skip
    """Self-attention with one joint projection."""
    if past is not None or past_length is not None or do_rotary:
        raise PrepareError(
            f"node {node.name!r}: {S.describe(node)}: a key-value cache cannot be trained through"
        )
    projected = op.MatMul(x, weights)
    if bias is not None:
        projected = op.Add(projected, bias)
    if qkv_hidden_sizes is not None:
        q, k, v = op.Split(projected, op.const(qkv_hidden_sizes), axis=-1, _outputs=3)
    else:
        q, k, v = op.Split(projected, axis=-1, num_outputs=3, _outputs=3)
    q, k, v = (_split_heads(op, t, num_heads) for t in (q, k, v))
    extra = _mask_bias(op, mask, x, mask_filter_value, node)
    y, _ = _attend(op, q, k, v, scale, extra, attention_bias, unidirectional, mask_filter_value)
    return (_join_heads(op, y),)


@decomposition("com.microsoft::MultiHeadAttention")
def multi_head_attention(
    op, query, key=None, value=None, bias=None, mask=None, attention_bias=None, past_key=None,
    past_value=None, past_length=None, cache=None, *, num_heads, scale=None, unidirectional=0,
    mask_filter_value=-10000.0, node,
):  # fmt: skip
    """Attention of projected queries, keys and values, each [batch, sequence, heads * size]."""
    if (
        any(v is not None for v in (past_key, past_value, past_length, cache))
        or key is None
        or value is None
    ):
        raise PrepareError(
            f"node {node.name!r}: {S.describe(node)}: only separate query, key and value without "
            "a cache"
        )
    if bias is not None:
        sizes = [op.dims(query)[-1], op.dims(query)[-1], op.dims(value)[-1]]
        bq, bk, bv = op.Split(bias, op.const(sizes), axis=0, _outputs=3)
        query = op.Add(query, bq)
        key = op.Add(key, bk) if op.rank(key) == 3 else key
        value = op.Add(value, bv) if op.rank(value) == 3 else value
    q = _split_heads(op, query, num_heads)
    k = key if op.rank(key) == 4 else _split_heads(op, key, num_heads)
    v = value if op.rank(value) == 4 else _split_heads(op, value, num_heads)
    extra = _mask_bias(op, mask, query, mask_filter_value, node)
    y, _ = _attend(op, q, k, v, scale, extra, attention_bias, unidirectional, mask_filter_value)
    return (_join_heads(op, y),)


@decomposition("com.microsoft::RotaryEmbedding")
def rotary_embedding(
    op, x, position_ids, cos_cache, sin_cache, *, interleaved=0, num_heads=0,
    rotary_embedding_dim=0, scale=1.0, is_packed_batching=0, node,
):  # fmt: skip
    """Rotate pairs of features by an angle that grows with the position."""
    one_offset = op.constant(position_ids) is None and op.rank(position_ids) == 1
    if is_packed_batching or one_offset or rotary_embedding_dim:
        raise PrepareError(
            f"node {node.name!r}: {S.describe(node)}: only full rotation with [batch, sequence] "
            "positions"
        )
    flat = op.rank(x) == 3
    half = op.dims(cos_cache)[-1]
    heads = _split_heads(op, x, num_heads or _number_of_heads(op, x, half, node)) if flat else x
    cos = op.Unsqueeze(op.Gather(cos_cache, position_ids, axis=0), [1])  # [B, 1, S, half]
    sin = op.Unsqueeze(op.Gather(sin_cache, position_ids, axis=0), [1])
    if interleaved:
        pairs = op.reshape(
            heads, [op.size(heads, 0), op.size(heads, 1), op.size(heads, 2), half, 2]
        )
        left, right = (
            op.Squeeze(p, [-1]) for p in op.Split(pairs, axis=-1, num_outputs=2, _outputs=2)
        )
    else:
        left, right = op.Split(heads, axis=-1, num_outputs=2, _outputs=2)
    a = op.Sub(op.Mul(left, cos), op.Mul(right, sin))
    b = op.Add(op.Mul(left, sin), op.Mul(right, cos))
    if interleaved:
        both = op.Concat(op.Unsqueeze(a, [-1]), op.Unsqueeze(b, [-1]), axis=-1)
        y = op.reshape_like(both, heads)
    else:
        y = op.Concat(a, b, axis=-1)
    return _join_heads(op, y) if flat else y


def _number_of_heads(op: OpBuilder, x: ir.Value, half: Dim, node: ir.Node) -> int:
    width = op.dims(x)[-1]
    if isinstance(width, int) and isinstance(half, int):
        return width // (2 * half)
    raise PrepareError(
        f"node {node.name!r}: {S.describe(node)}: the number of heads is not known"
        "\nhint: set the attribute num_heads"
    )


def _split_heads(op: OpBuilder, x: ir.Value, heads: int) -> ir.Value:
    """[B, S, H*D] -> [B, H, S, D]."""
    width = op.dims(x)[-1]
    size = width // heads if isinstance(width, int) else -1
    split = op.reshape(x, [op.size(x, 0), op.size(x, 1), heads, size])
    return op.Transpose(split, perm=[0, 2, 1, 3])


def _join_heads(op: OpBuilder, x: ir.Value) -> ir.Value:
    """[B, H, S, D] -> [B, S, H*D]."""
    turned = op.Transpose(x, perm=[0, 2, 1, 3])
    h, d = op.dims(x)[1], op.dims(x)[3]
    width = h * d if isinstance(h, int) and isinstance(d, int) else -1
    return op.reshape(turned, [op.size(turned, 0), op.size(turned, 1), width])


def _attend(
    op: OpBuilder, q: ir.Value, k: ir.Value, v: ir.Value, scale: float | None,
    mask: ir.Value | None, bias: ir.Value | None, causal: int, low: float,
) -> tuple[ir.Value, ir.Value]:  # fmt: skip
    factor = op.const(scale, q.dtype) if scale else op.Reciprocal(op.Sqrt(op.count(q, [3])))
    scores = op.Mul(op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2])), factor)
    if mask is not None:
        scores = op.Add(scores, mask)
    if bias is not None:
        scores = op.Add(scores, bias)
    if causal:
        s, t = op.size(q, 2), op.size(k, 2)
        assert q.dtype is not None
        ones = op.full([s, t], 1.0, q.dtype)
        later = op.Trilu(ones, op.const(1), upper=1)
        scores = op.Add(scores, op.Mul(later, low))
    weights = op.Softmax(scores, axis=-1)
    return op.MatMul(weights, v), weights


def _mask_bias(
    op: OpBuilder, mask: ir.Value | None, x: ir.Value, low: float, node: ir.Node
) -> ir.Value | None:
    """Turn a [batch, sequence] mask of ones and zeros into what is added to the scores."""
    if mask is None:
        return None
    if op.rank(mask) != 2:
        raise PrepareError(
            f"node {node.name!r}: {S.describe(node)}: only masks of shape [batch, sequence]"
        )
    keep = op.Cast(mask, to=x.dtype)
    return op.Unsqueeze(op.Mul(op.Sub(1.0, keep), low), [1, 2])
