"""Rotary embeddings."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.prepare.decompose import decomposition
from onnxtrain.graph.prepare.decompositions.contrib.heads import (
    angles,
    join_heads,
    refuse,
    split_heads,
    turn,
)


@decomposition("com.microsoft::RotaryEmbedding")
def rotary_embedding(
    op, x, position_ids, cos_cache, sin_cache, *, interleaved=0, num_heads=0,
    rotary_embedding_dim=0, scale=1.0, is_packed_batching=0, node,
):  # fmt: skip
    """Rotate pairs of features by an angle that grows with the position.

    One position stands for that of the first token. The runtime does not look at ``scale``.
    """
    heads = _heads(op, x, cos_cache, num_heads, rotary_embedding_dim, node)
    where = position_ids
    if op.rank(position_ids) == 1:
        first = op.Reshape(position_ids, [1, 1])
        where = op.Add(first, op.Unsqueeze(op.iota(op.size(heads, 2)), [0]))
    cos, sin = angles(op, cos_cache, where), angles(op, sin_cache, where)
    y = turn(op, heads, cos, sin, interleaved, node)
    return join_heads(op, y) if op.rank(x) == 3 else y


@decomposition("com.microsoft::MRotaryEmbedding")
def multimodal_rotary_embedding(
    op, x, position_ids, cos_cache, sin_cache, *, mrope_section, interleaved=0, num_heads=0,
    rotary_embedding_dim=0, scale=1.0, is_packed_batching=0, mrope_layout=0, node,
):  # fmt: skip
    """Rotation by three positions per token, each for its own share of the features."""
    if is_packed_batching:
        refuse(node, "packed sequences have no batch axis to rotate along")
    heads = _heads(op, x, cos_cache, num_heads, rotary_embedding_dim, node)
    half = op.dims(cos_cache)[-1]
    if not isinstance(half, int):
        refuse(node, "the width of the tables is not known")
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
    y = turn(op, heads, tables[0], tables[1], interleaved, node)
    return join_heads(op, y) if op.rank(x) == 3 else y


def _streams(section: list[int], half: int, layout: int) -> list[int]:
    """Return for each pair of features which of the three positions turns it."""
    if not layout:
        return [i for i, n in enumerate(section) for _ in range(n)][:half]
    streams = [0] * half
    for i in (1, 2):
        for j in range(i, 3 * section[i], 3):
            streams[j] = i
    return streams


@decomposition("com.microsoft::GemmaRotaryEmbedding")
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
    """Return [B, heads, S, size]; the tables tell the size where no number of heads is given."""
    if op.rank(x) == 4:
        return x
    width, half = op.dims(x)[-1], op.dims(cache)[-1]
    if not number and not dim and isinstance(width, int) and isinstance(half, int):
        number = width // (2 * half)
    if not number:
        refuse(node, "the number of heads is not known\nhint: set the attribute num_heads")
    return split_heads(op, x, number)
