"""SparseAttention: causal attention in which a table tells the blocks of keys that a block sees."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.prepare.decompose import decomposition
from onnxtrain.graph.prepare.decompositions.contrib.group_query import group_query_attention
from onnxtrain.graph.prepare.decompositions.contrib.heads import refuse


@decomposition("com.microsoft::SparseAttention")
def sparse_attention(
    op, query, key: Any = None, value: Any = None, past_key: Any = None, past_value: Any = None,
    block_row_indices: Any = None, block_col_indices: Any = None, total: Any = None,
    key_lengths: Any = None, cos_cache: Any = None, sin_cache: Any = None, *, num_heads,
    kv_num_heads, sparse_block_size, scale=None, do_rotary=0, rotary_interleaved=0, node,
):  # fmt: skip
    """GroupQueryAttention with a bias that hides blocks; head ``h`` has layout ``h % layouts``."""
    layouts = _layouts(op, block_row_indices, block_col_indices, node)
    lengths = op.Reshape(op.cast(key_lengths, ir.DataType.INT64), [-1])
    queries, keys = _places(op, query, past_key, total, lengths)
    bias = _bias(op, layouts, sparse_block_size, queries, keys, num_heads, query.dtype)
    return group_query_attention(
        op, query, key, value, past_key, past_value, op.Sub(lengths, 1), total, cos_cache,
        sin_cache, attention_bias=bias, num_heads=num_heads, kv_num_heads=kv_num_heads,
        scale=scale, do_rotary=do_rotary, rotary_interleaved=rotary_interleaved, node=node,
    )  # fmt: skip


def _layouts(
    op: OpBuilder, firsts: ir.Value | None, columns: ir.Value | None, node: ir.Node
) -> np.ndarray:
    """Return which block of keys a block of queries sees, [layouts, blocks, blocks]."""
    starts, places = op.constant(firsts), op.constant(columns)
    if starts is None or places is None:
        refuse(node, "its blocks are told by tables that are no constants of the file")
    count = starts.shape[1] - 1
    seen = np.zeros((len(starts), count, count), bool)
    for layout, (ends, row) in enumerate(zip(starts, places, strict=True)):
        for i in range(count):
            blocks = row[ends[i] : ends[i + 1]]
            if i not in blocks or blocks.min() < 0 or blocks.max() > i:
                refuse(node, f"block {i} of queries does not see itself, or sees what comes later")
            seen[layout, i, blocks] = True
    return seen


def _places(
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


def _bias(
    op: OpBuilder, layouts: np.ndarray, size: int, queries: ir.Value, keys: ir.Value, heads: int,
    dtype: ir.DataType,
) -> ir.Value:  # fmt: skip
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
