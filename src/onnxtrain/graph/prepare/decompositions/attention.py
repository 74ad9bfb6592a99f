"""Attention and RotaryEmbedding of the standard, newer than the working opset."""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.size_arithmetic import Size, minus
from onnxtrain.graph.prepare.decompose import decomposition
from onnxtrain.graph.prepare.decompositions.rotation import rotate

_RAW, _CAPPED, _BIASED, _PROBABILITIES = range(4)  # values of qk_matmul_output_mode


@decomposition("Attention")
def attention(
    op, q, k, v, attn_mask=None, past_key=None, past_value=None, nonpad_kv_seqlen=None, *,
    is_causal=0, kv_num_heads, q_num_heads, qk_matmul_output_mode=0, scale=None,
    softcap=0.0, softmax_precision=None, left_window_size=-1, right_window_size=-1, node,
):  # fmt: skip
    """``softmax(cap(scale q k^T) + bias) v``; rows without any key give zero.

    Masked scores become the lowest finite number and not -inf, so that no row is NaN: where a row
    has at least one key, its masked probabilities are exactly zero all the same.
    """
    flat = op.rank(q) == 3
    if flat:
        q = _split_heads(op, q, q_num_heads)
        k, v = _split_heads(op, k, kv_num_heads), _split_heads(op, v, kv_num_heads)
    if past_key is not None:
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    raw = capped = _per_head(op, op.Mul(q, _factor(op, q, scale)), op.mT(k), k)
    if softcap:
        capped = op.Mul(op.Tanh(op.Div(raw, softcap)), softcap)

    scores, allowed, certain = _with_mask(op, capped, attn_mask, k)
    windows = [w for w in (left_window_size, right_window_size) if w >= 0]
    if is_causal or windows:
        allowed += _near(
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
    y = _per_head(op, p, v, v)

    shown = None
    if len(node.outputs) > 3 and node.outputs[3].name:
        shown = [raw, capped, scores, p][qk_matmul_output_mode]
        if qk_matmul_output_mode == _BIASED and keep is not None:
            shown = op.Where(keep, scores, -np.inf)
    return _join_heads(op, y) if flat else y, k, v, shown


@decomposition("RotaryEmbedding")
def rotary_embedding(
    op, x, cos_cache, sin_cache, position_ids=None, *, interleaved=0, num_heads=0,
    rotary_embedding_dim=0,
):  # fmt: skip
    """Rotate pairs of features ``(a, b)`` to ``(a cos - b sin, a sin + b cos)``."""
    flat = op.rank(x) == 3
    # [B, S, H, D] if it came flat, [B, H, S, D] if not: only the position of the 1 differs.
    heads = op.Reshape(x, [0, 0, num_heads, -1]) if flat else x
    if position_ids is not None:
        cos_cache = op.Gather(cos_cache, position_ids, axis=0)
        sin_cache = op.Gather(sin_cache, position_ids, axis=0)
    spread = [2 if flat else 1]
    cos, sin = op.Unsqueeze(cos_cache, spread), op.Unsqueeze(sin_cache, spread)
    part = rotary_embedding_dim if op.dims(heads)[-1] != rotary_embedding_dim else 0
    y = rotate(op, heads, cos, sin, interleaved, part or None)
    return op.reshape_like(y, x) if flat else y


def _split_heads(op: OpBuilder, x: ir.Value, heads: int) -> ir.Value:
    """[B, S, H*D] -> [B, H, S, D]."""
    return op.Transpose(op.Reshape(x, [0, 0, heads, -1]), perm=[0, 2, 1, 3])


def _join_heads(op: OpBuilder, x: ir.Value) -> ir.Value:
    """[B, H, S, D] -> [B, S, H*D]."""
    return op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), [0, 0, -1])


def _factor(op: OpBuilder, q: ir.Value, scale: float | None) -> float | ir.Value:
    if scale is not None:
        return scale
    size = op.dims(q)[-1]
    return size**-0.5 if isinstance(size, int) else op.Reciprocal(op.Sqrt(op.count(q, [3])))


def _per_head(op: OpBuilder, a: ir.Value, b: ir.Value, kv: ir.Value) -> ir.Value:
    """Multiply [B, Hq, S, m] by [B, Hkv, m, n]; ``Hq / Hkv`` heads of ``a`` share one of ``b``.

    Those heads lie side by side, so their rows are put below each other and nothing is repeated.
    """
    if op.dims(a)[1] == op.dims(kv)[1]:
        return op.MatMul(a, b)
    grouped = op.Reshape(a, op.vector([0, op.size(kv, 1), -1, op.size(a, 3)]))
    S.set_dims(grouped, [op.dims(a)[0], *op.dims(grouped)[1:]])
    together = op.MatMul(grouped, b)
    y = op.Reshape(together, op.vector([0, op.size(a, 1), op.size(a, 2), -1]))
    S.set_dims(y, [*op.dims(a)[:3], op.dims(b)[3]])
    return y


def _with_mask(
    op: OpBuilder, scores: ir.Value, mask: ir.Value | None, k: ir.Value
) -> tuple[ir.Value, list[ir.Value], bool]:
    """Return the scores with a mask added, conditions on keys, and whether every row has a key."""
    if mask is None:
        return scores, [], True
    if mask.dtype != ir.DataType.BOOL:
        mask = op.cast(mask, scores.dtype)  # whole numbers are added like any others
    mask = _full_length(op, mask, k)
    if mask.dtype == ir.DataType.BOOL:
        return scores, [mask], False
    biased = op.Add(scores, mask)
    if not _may_be_infinite(op, mask):
        return biased, [], True
    return biased, [op.Greater(mask, -np.inf)], False


def _full_length(op: OpBuilder, mask: ir.Value, k: ir.Value) -> ir.Value:
    """Pad the last axis of a mask to the number of keys: those beyond it are masked."""
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


def _near(
    op: OpBuilder, q: ir.Value, k: ir.Value, past: ir.Value | None, lengths: ir.Value | None,
    causal: int, left: int, right: int,
) -> list[ir.Value]:  # fmt: skip
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
