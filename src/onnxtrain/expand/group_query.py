"""GroupQueryAttention (shared keys and values, rotation, a cache) and SparseAttention.

Sequences are padded on the right: sequence ``b`` has ``seqlens_k[b] + 1`` tokens, those in the
cache included. In a prompt (as many new tokens as tokens in all) the cache is empty, or a buffer
whose contents are ignored. Otherwise new tokens follow the first ``seqlens_k[b] + 1 - S`` of the
cache.

SparseAttention is causal attention in which a table lists the key blocks that a query block
attends to.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.expand.attention_parts import (
    apply_rotary,
    concat_past,
    join_heads,
    rotary_angles,
    scaled_dot_product_attention,
    split_heads,
)
from onnxtrain.expand.expansions import TRAINING, expansion, raise_unsupported
from onnxtrain.expand.norms import rms_norm
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, plus
from onnxtrain.graph.nodes import is_op

_INT64 = ir.DataType.INT64
_MASKED_POSITION = 2**31 - 1
"""The position of padding: later than every query."""


@expansion("com.microsoft::GroupQueryAttention", when=TRAINING)
def group_query_attention(
    op,
    query,
    key: Any = None,
    value: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    seqlens_k: Any = None,
    total: Any = None,
    cos_cache: Any = None,
    sin_cache: Any = None,
    position_ids=None,
    attention_bias=None,
    head_sink=None,
    k_scale=None,
    v_scale=None,
    q_norm_weight=None,
    k_norm_weight=None,
    *,
    num_heads,
    kv_num_heads,
    scale=None,
    softcap=0.0,
    do_rotary=0,
    rotary_interleaved=0,
    local_window_size=-1,
    smooth_softmax=-1,
    causal=1,
    qk_output=0,
    qk_norm_epsilon=1e-6,
    k_quant_type="NONE",
    v_quant_type="NONE",
    kv_cache_bit_width=0,
    sliding_window_cache=0,
    node,
):
    """Causal attention; ``num_heads / kv_num_heads`` heads share one of keys and values."""
    _check(node, k_quant_type, v_quant_type, k_scale, v_scale)
    counts = [num_heads, kv_num_heads, kv_num_heads]
    parts, v = _heads(op, query, key, value, counts, q_norm_weight is None, node)
    if q_norm_weight is not None:
        weights = (q_norm_weight, k_norm_weight)
        parts = [rms_norm(op, x, w, qk_norm_epsilon) for x, w in zip(parts, weights, strict=True)]
    empty = past_key is None or op.dims(past_key)[2] == 0
    window = local_window_size if sliding_window_cache else None
    at = _positions(op, v, seqlens_k, total, None if empty else past_key, window)
    if do_rotary:
        where = _rotary_rows(op, at, position_ids, empty)
        cos, sin = rotary_angles(op, cos_cache, where), rotary_angles(op, sin_cache, where)
        parts = [apply_rotary(op, x, cos, sin, rotary_interleaved, node) for x in parts]
    q, k = parts if len(parts) == 2 else op.Split(parts[0], counts[:2], axis=1, _outputs=2)
    past: Any = (past_key, past_value)
    present = (k, v) if empty else _requested_present(op, at, past, k, v, node)
    if not empty and attention_bias is not None:  # its last axis is the order of the cache
        if sliding_window_cache:
            raise_unsupported(
                node, "attention_bias together with a sliding-window cache is not supported"
            )
        present = present or _present(op, at, past, k, v)
        k, v = present
        columns = op.Unsqueeze(op.iota(op.size(k, 2)), [0])
        keys = _mask_padding(op, columns, op.Unsqueeze(at.lengths, [1]))
    else:
        k, v = (
            concat_past(op, None if empty else p, n) for p, n in ((past_key, k), (past_value, v))
        )
        keys = at.keys
    conditions, certain = _attention_mask(op, at, keys, causal, local_window_size)
    sink = head_sink
    if sink is None and smooth_softmax == 1:
        sink = op.const([0.0] * num_heads, q.dtype)
    y, _ = scaled_dot_product_attention(
        op,
        q,
        k,
        v,
        scale=scale,
        softcap=softcap,
        added=[attention_bias],
        allowed=conditions,
        certain=certain,
        additive=certain,
        sink=sink,
    )
    return join_heads(op, y), *(present or (None, None))


def _heads(
    op: OpBuilder,
    query: ir.Value,
    key: ir.Value | None,
    value: ir.Value | None,
    counts: list[int],
    alike: bool,
    node: ir.Node,
) -> tuple[list[ir.Value], ir.Value]:
    """Return queries and keys, and values, of [B, heads, S, size].

    Packed queries and keys stay in one tensor if they are treated ``alike``.
    """
    if key is not None and value is not None:
        return [split_heads(op, query, counts[0]), split_heads(op, key, counts[1])], split_heads(
            op, value, counts[2]
        )
    if not isinstance(op.dims(query)[-1], int):
        raise_unsupported(node, "the width of the packed query, key and value must be static")
    sizes = [counts[0] + counts[1], counts[2]] if alike else counts
    *parts, v = op.Split(split_heads(op, query, sum(counts)), sizes, axis=1, _outputs=len(sizes))
    return parts, v


def _check(node: ir.Node, k_type, v_type, k_scale, v_scale) -> None:
    kinds = {t.decode() if isinstance(t, bytes) else t for t in (k_type, v_type)}
    if kinds != {"NONE"} or k_scale is not None or v_scale is not None:
        raise_unsupported(node, "training through a quantized cache is not supported")


@dataclasses.dataclass(frozen=True)
class _Evicted:
    """How many leading positions a cache has evicted, [B, 1]: before and after this step."""

    before: ir.Value
    after: ir.Value


@dataclasses.dataclass(frozen=True)
class _Positions:
    """Positions of queries, and of keys: those of the cache, then the new ones."""

    lengths: ir.Value  # [B]: tokens of each sequence, those in the cache included
    before: ir.Value | None  # [B, 1]: tokens in the cache; None: it is empty
    prompt: ir.Value | None  # whether the cache is ignored; None: it is empty
    queries: ir.Value  # [B or 1, S]
    keys: ir.Value  # [B or 1, P + S]; padding is at _MASKED_POSITION, unless `real` masks it
    rows: ir.Value  # the queries as [B, 1, S, 1] or [S, 1]
    real: ir.Value | None = None  # [B, 1, 1, S]: whether a key is not padding
    forgotten: _Evicted | None = None  # of a sliding-window cache


def _positions(
    op: OpBuilder,
    q: ir.Value,
    seqlens_k: ir.Value,
    total: ir.Value,
    past: ir.Value | None,
    window: int | None,
) -> _Positions:
    lengths = op.Reshape(_lengths_from_last(op, seqlens_k), [-1])
    S.set_dims(lengths, [op.dims(q)[0]])
    count = op.iota(op.size(q, 2))
    new = op.Unsqueeze(count, [0])
    if past is None:
        real = op.Less(count, op.Unsqueeze(lengths, [1, 2, 3]))
        return _Positions(lengths, None, None, new, new, op.Unsqueeze(count, [1]), real)
    ends = op.Unsqueeze(lengths, [1])
    count = op.vector([op.size(q, 2)])
    prompt = op.Equal(op.Reshape(_as_int64(op, total), [-1]), count)
    before = op.Where(prompt, 0, op.Sub(ends, count))  # [B, 1]
    S.set_dims(before, [op.dims(q)[0], 1])
    queries = op.Add(before, new)
    old = op.Unsqueeze(op.iota(op.size(past, 2)), [0])
    forgotten = None
    if window is not None:
        capacity = op.vector([op.size(past, 2)])
        forgotten = _Evicted(*(_evicted_count(op, n, capacity, window) for n in (before, ends)))
        old = op.Add(old, forgotten.before)
    parts = ((old, before), (queries, ends))
    keys = op.Concat(*(_mask_padding(op, at, end) for at, end in parts), axis=1)
    rows = op.Unsqueeze(queries, [1, 3])
    return _Positions(lengths, before, prompt, queries, keys, rows, forgotten=forgotten)


def _lengths_from_last(op: OpBuilder, lasts: ir.Value) -> ir.Value:
    """Return lengths from last positions; undoes a ``Sub(lengths, 1)`` in the file."""
    lasts = _as_int64(op, lasts)
    minus = lasts.producer()
    if minus is not None and is_op(minus, "Sub") and minus.inputs[0] is not None:
        one = S.constant_of(minus.inputs[1])
        if one is not None and one.size == 1 and int(one.item()) == 1:
            return minus.inputs[0]
    return op.Add(lasts, 1)


def _as_int64(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return token counts as int64; skips a Cast from int64 in the file."""
    cast = x.producer()
    source = None if cast is None or not is_op(cast, "Cast") else cast.inputs[0]
    return source if source is not None and source.dtype == _INT64 else op.cast(x, _INT64)


def _mask_padding(op: OpBuilder, positions: ir.Value, ends: ir.Value) -> ir.Value:
    """Return positions [B, keys] with those at or after the end set to _MASKED_POSITION."""
    return op.Where(op.Less(positions, ends), positions, _MASKED_POSITION)


def _evicted_count(op: OpBuilder, count: ir.Value, capacity: ir.Value, window: int) -> ir.Value:
    """Return how many of ``count`` tokens a cache has evicted; it evicts several at a time."""
    at_once = op.Add(op.Sub(capacity, window), 1)
    over = op.Max(op.Sub(count, capacity), 0)
    times = op.Div(op.Sub(op.Add(over, at_once), 1), at_once)
    return op.Mul(times, at_once)


def _rotary_rows(
    op: OpBuilder, at: _Positions, position_ids: ir.Value | None, empty: bool
) -> ir.Value:
    """Return the row of the cos/sin cache for each new token.

    In a prompt only the first of ``position_ids`` counts, behind a cache all of them.
    """
    if position_ids is None:
        return at.queries
    first = op.Reshape(op.Slice(op.Reshape(position_ids, [-1]), [0], [1]), [1, 1])
    counted = op.Add(first, op.Unsqueeze(op.iota(op.size(at.queries, 1)), [0]))
    if empty or at.prompt is None:
        return counted
    return op.Where(at.prompt, counted, position_ids)


def _attention_mask(
    op: OpBuilder, at: _Positions, columns: ir.Value, causal: int, window: int
) -> tuple[list[ir.Value], bool]:
    """Return the masks on [B, 1, S, keys], and whether every query has a key."""
    keys = op.Unsqueeze(columns, [1, 2]) if at.real is None else columns
    real = [] if at.real is None else [at.real]
    if not causal:
        return real or [op.Less(keys, _MASKED_POSITION)], True
    conditions = [op.LessOrEqual(keys, at.rows), *real]
    if window >= 0:
        ends = op.Unsqueeze(op.Unsqueeze(at.lengths, [1]), [2, 3])
        seen = op.Min(op.Add(at.rows, 1), ends)
        conditions.append(op.GreaterOrEqual(keys, op.Sub(seen, window)))
    return conditions, window != 0


def _requested_present(
    op: OpBuilder,
    at: _Positions,
    past: tuple[ir.Value, ir.Value],
    k: ir.Value,
    v: ir.Value,
    node: ir.Node,
) -> tuple[ir.Value, ir.Value] | None:
    wanted = any(y.name and (y.uses() or y.is_graph_output()) for y in node.outputs[1:3])
    return _present(op, at, past, k, v) if wanted else None


def _present(
    op: OpBuilder, at: _Positions, past: tuple[ir.Value, ir.Value], k: ir.Value, v: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Return the caches with each sequence's new tokens behind its old ones."""
    assert at.before is not None
    old, new = op.size(past[0], 2), op.size(k, 2)
    if at.forgotten is not None:
        slot = op.Add(op.Unsqueeze(op.iota(old), [0]), at.forgotten.after)
        kept = op.Sub(slot, at.forgotten.before)
    else:
        # A cache is as long as the longest sequence, or as its input buffer.
        longest = op.ReduceMax(op.Add(at.before, op.vector([new])), keepdims=0)
        length = op.Max(op.Reshape(longest, [1]), op.vector([old]))
        slot = kept = op.Unsqueeze(op.iota(length), [0])
    behind = op.Min(
        op.Add(op.Sub(slot, at.before), op.vector([old])),
        op.Sub(op.vector([plus(op, old, new)]), 1),
    )
    source = op.Unsqueeze(op.Where(op.Less(slot, at.before), kept, behind), [1, 3])
    source = op.Expand(source, [1, op.dims(k)[1], 1, 1])
    real = op.Unsqueeze(op.Less(slot, op.Unsqueeze(at.lengths, [1])), [1, 3])

    def joined(cache: ir.Value, fresh: ir.Value) -> ir.Value:
        moved = op.GatherND(concat_past(op, cache, fresh), source, batch_dims=2)
        dims = op.dims(moved)
        moved = op.Where(real, moved, 0.0)  # slots after the end of a sequence are zero
        S.set_dims(moved, [*op.dims(fresh)[:2], dims[2], op.dims(fresh)[3]])
        return moved

    return joined(past[0], k), joined(past[1], v)


@expansion("com.microsoft::SparseAttention", when=TRAINING)
def sparse_attention(
    op,
    query,
    key: Any = None,
    value: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    block_row_indices: Any = None,
    block_col_indices: Any = None,
    total: Any = None,
    key_lengths: Any = None,
    cos_cache: Any = None,
    sin_cache: Any = None,
    *,
    num_heads,
    kv_num_heads,
    sparse_block_size,
    scale=None,
    do_rotary=0,
    rotary_interleaved=0,
    node,
):
    """GroupQueryAttention with a bias that masks blocks; head ``h`` has layout ``h % layouts``."""
    layouts = _block_layouts(op, block_row_indices, block_col_indices, node)
    lengths = op.Reshape(op.cast(key_lengths, ir.DataType.INT64), [-1])
    queries, keys = _token_positions(op, query, past_key, total, lengths)
    bias = _block_bias(op, layouts, sparse_block_size, queries, keys, num_heads, query.dtype)
    return group_query_attention(
        op,
        query,
        key,
        value,
        past_key,
        past_value,
        op.Sub(lengths, 1),
        total,
        cos_cache,
        sin_cache,
        attention_bias=bias,
        num_heads=num_heads,
        kv_num_heads=kv_num_heads,
        scale=scale,
        do_rotary=do_rotary,
        rotary_interleaved=rotary_interleaved,
        node=node,
    )


def _block_layouts(
    op: OpBuilder, firsts: ir.Value | None, columns: ir.Value | None, node: ir.Node
) -> np.ndarray:
    """Return which key blocks each query block attends to, [layouts, blocks, blocks]."""
    starts, places = op.constant(firsts), op.constant(columns)
    if starts is None or places is None:
        raise_unsupported(node, "block_row_indices and block_col_indices must be constant")
    count = starts.shape[1] - 1
    seen = np.zeros((len(starts), count, count), bool)
    for layout, (ends, row) in enumerate(zip(starts, places, strict=True)):
        for i in range(count):
            blocks = row[ends[i] : ends[i + 1]]
            if i not in blocks or blocks.min() < 0 or blocks.max() > i:
                raise_unsupported(
                    node, f"query block {i} does not attend to itself, or attends to later blocks"
                )
            seen[layout, i, blocks] = True
    return seen


def _token_positions(
    op: OpBuilder, query: ir.Value, past: ir.Value | None, total: ir.Value, lengths: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Return positions of new tokens, [S] or [B, S], and of keys in the order of the cache."""
    new = op.iota(op.size(query, 1))
    if past is None or op.dims(past)[2] == 0:
        return new, new
    count = op.vector([op.size(query, 1)])
    prompt = op.Equal(op.Reshape(op.cast(total, ir.DataType.INT64), [-1]), count)
    before = op.Where(prompt, 0, op.Sub(op.Unsqueeze(lengths, [1]), count))
    return op.Add(before, new), op.iota(op.size(past, 2))


def _block_bias(
    op: OpBuilder,
    layouts: np.ndarray,
    size: int,
    queries: ir.Value,
    keys: ir.Value,
    heads: int,
    dtype: ir.DataType,
) -> ir.Value:
    """Return a number for each pair of a query and a key, [B or 1, heads, S, keys]."""
    kinds, count, _ = layouts.shape
    hidden = float(dtype.min) / 2  # a score that is added does not make it infinite
    table = np.where(layouts, 0.0, hidden).reshape(kinds, count * count).T
    row, column = (op.Min(op.Max(op.Div(x, size), 0), count - 1) for x in (queries, keys))
    last = op.rank(row)
    pairs = op.Add(op.Unsqueeze(op.Mul(row, count), [last]), column)
    bias = op.Gather(op.const(np.ascontiguousarray(table), dtype), pairs, axis=0)
    bias = op.move_axis(bias, -1, last - 1)
    bias = bias if last == 2 else op.Unsqueeze(bias, [0])
    return bias if kinds == 1 else op.Concat(*[bias] * (heads // kinds), axis=1)
