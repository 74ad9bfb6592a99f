"""Building blocks of attention: heads, scores, causal and padding masks, rotation of features."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.expand.expansions import raise_unsupported
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, plus
from onnxtrain.graph.shapes import dims as D

SLICE_END = np.iinfo(np.int64).max
"""The end of an axis in a Slice."""


def split_heads(op: OpBuilder, x: ir.Value, heads: int) -> ir.Value:
    """Return [B, S, H*D] as [B, H, S, D]."""
    width = op.dims(x)[-1]
    size = width // heads if isinstance(width, int) else -1
    return op.Transpose(op.Reshape(x, [0, 0, heads, size]), perm=[0, 2, 1, 3])


def join_heads(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return [B, H, S, D] as [B, S, H*D]."""
    turned = op.Transpose(x, perm=[0, 2, 1, 3])
    h, d = op.dims(x)[1], op.dims(x)[3]
    width = h * d if isinstance(h, int) and isinstance(d, int) else -1
    return op.Reshape(turned, [0, 0, width])


def attention_scale(op: OpBuilder, q: ir.Value, scale: float | None) -> float | ir.Value:
    """Return the scale of the scores; a scale of 0 or ``None`` means ``1 / sqrt(head size)``."""
    if scale:
        return scale
    size = op.dims(q)[-1]
    return size**-0.5 if isinstance(size, int) else op.Reciprocal(op.Sqrt(op.count(q, [3])))


def grouped_matmul(op: OpBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Multiply [B, H, S, m] by [B, G, m, n]; ``H / G`` heads of ``a`` share one of ``b``.

    Those heads are adjacent, so their rows are merged instead of repeating ``b``.
    """
    heads, groups = op.dims(a)[1], op.dims(b)[1]
    if heads == groups:
        return op.MatMul(a, b)
    assert isinstance(heads, int)
    assert isinstance(groups, int)
    together = op.MatMul(_fold_heads_into_rows(op, a, groups), b)
    return _unfold_rows_into_heads(op, together, heads, a)


def _fold_heads_into_rows(op: OpBuilder, x: ir.Value, groups: int) -> ir.Value:
    """Return [B, H, S, m] as [B, G, H / G * S, m]."""
    inner = op.dims(x)[3]
    width = inner if isinstance(inner, int) else op.size(x, 3)
    y = op.Reshape(x, op.vector([0, groups, -1, width]))
    S.set_dims(y, [op.dims(x)[0], groups, *op.dims(y)[2:3], inner])
    return y


def _unfold_rows_into_heads(op: OpBuilder, x: ir.Value, heads: int, like: ir.Value) -> ir.Value:
    """Return [B, G, H / G * S, m] as [B, H, S, m], where ``like`` is [B, H, S, any]."""
    inner = op.dims(x)[3]
    sizes = [-1, inner] if isinstance(inner, int) else [op.size(like, 2), -1]
    y = op.Reshape(x, op.vector([0, heads, *sizes]))
    S.set_dims(y, [op.dims(x)[0], heads, op.dims(like)[2], inner])
    return y


def _repeat_mask_rows(op: OpBuilder, allowed: Sequence[ir.Value], times: int) -> list[ir.Value]:
    """Return conditions on [B, 1, S, keys] for the merged rows of several heads."""
    if not allowed:
        return []
    keep = functools.reduce(op.And, allowed)
    return [keep if op.dims(keep)[2] == 1 else op.Concat(*[keep] * times, axis=2)]


def scaled_dot_product_attention(
    op: OpBuilder,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    *,
    scale: float | None,
    softcap: float = 0.0,
    added: Sequence[ir.Value | None] = (),
    allowed: Sequence[ir.Value] = (),
    certain: bool = True,
    additive: bool = False,
    sink: ir.Value | None = None,
) -> tuple[ir.Value, ir.Value]:
    """Return ``softmax(cap(scale q k^T) + added) v`` over allowed keys, and the scores.

    Args:
        op: the builder.
        q: queries [batch, heads, length, size]; several heads may share one of ``k`` and ``v``.
        k: keys.
        v: values.
        scale: scale of the scores; see :func:`attention_scale`.
        softcap: limit scores to ``(-softcap, softcap)`` by tanh, unless 0.
        added: biases of the scores.
        allowed: boolean masks of query-key pairs.
        certain: whether every query has at least one allowed key.
        additive: whether the mask may be added as a large negative number. Requires ``certain``:
            a fully masked row would get a gradient.
        sink: one more score per head, of a key whose value is zero.
    """
    heads, groups, plain = op.dims(q)[1], op.dims(k)[1], all(x is None for x in (*added, sink))
    if plain and isinstance(heads, int) and isinstance(groups, int) and heads != groups:
        times = heads // groups
        below = _fold_heads_into_rows(op, q, groups)
        y, scores = scaled_dot_product_attention(
            op,
            below,
            k,
            v,
            scale=scale,
            softcap=softcap,
            certain=certain,
            additive=additive,
            allowed=_repeat_mask_rows(op, allowed, times),
        )
        return _unfold_rows_into_heads(op, y, heads, q), _unfold_rows_into_heads(
            op, scores, heads, q
        )
    scores = grouped_matmul(op, op.Mul(q, attention_scale(op, q, scale)), op.mT(k))
    if softcap:
        scores = op.Mul(op.Tanh(op.Div(scores, softcap)), softcap)
    for term in added:
        if term is not None:
            dims = op.dims(scores)
            scores = op.Add(scores, term)
            S.set_dims(scores, dims)
    logits, keep = scores, None
    if allowed:
        keep = functools.reduce(op.And, allowed)
        assert q.dtype is not None
        lowest = float(q.dtype.min)
        if (
            additive and plain
        ):  # the mask is computed once for all layers, and Add has no gradient cost
            logits = op.Add(scores, op.Where(keep, op.const(0.0, q.dtype), lowest))
        else:
            logits = op.Where(keep, scores, lowest)
        logits.shape = scores.shape
    p = op.Softmax(logits, axis=-1) if sink is None else _append_sink(op, logits, sink)
    if keep is not None and not certain:
        p = op.Mul(p, op.Cast(keep, to=q.dtype))
    p.shape = scores.shape
    return grouped_matmul(op, p, v), scores


def _append_sink(op: OpBuilder, logits: ir.Value, sink: ir.Value) -> ir.Value:
    column = op.Expand(
        op.Reshape(sink, [1, -1, 1, 1]),
        op.vector([op.size(logits, 0), op.size(logits, 1), op.size(logits, 2), 1]),
    )
    p = op.Softmax(op.Concat(logits, column, axis=-1), axis=-1)
    return op.Slice(p, [0], [-1], [3])


def causal_mask(op: OpBuilder, q: ir.Value, k: ir.Value, before: ir.Value | None) -> ir.Value:
    """Return the causal mask of queries that follow the keys of the cache ``before``."""
    rows = op.reshape(op.iota(op.size(q, 2)), [-1, 1])
    if before is not None:
        rows = op.Add(rows, op.vector([op.size(before, 2)]))
    return op.LessOrEqual(op.iota(op.size(k, 2)), rows)


def concat_past(op: OpBuilder, past: ir.Value | None, new: ir.Value) -> ir.Value:
    """Return the keys or values of a cache, followed by new ones."""
    if past is None or op.dims(past)[2] == 0:
        return new
    both = op.Concat(past, new, axis=2)
    length = D.add(op.dims(past)[2], op.dims(new)[2])
    S.set_dims(both, [*op.dims(new)[:2], length, op.dims(new)[3]])
    return both


def mask_bias(
    op: OpBuilder,
    mask: ir.Value | None,
    q: ir.Value,
    k: ir.Value,
    past: ir.Value | None,
    low: float,
    node: ir.Node,
) -> ir.Value | None:
    """Return the bias of the scores [batch, heads, queries, keys]: 0, or ``low`` where masked.

    Rank 2 is [batch, keys], rank 3 [batch, queries, keys], rank 4 [batch, 1, longest, longest].
    Rank 1 holds sequence lengths [batch], or ends followed by starts [2 * batch], or lengths and
    cumulative lengths [3 * batch + 2].
    """
    if mask is None:
        return None
    rank = op.rank(mask)
    if rank == 1:
        keep = _by_lengths(op, mask, q, k, node)
    elif rank == 2:
        keep = op.Unsqueeze(op.Cast(mask, to=ir.DataType.BOOL), [1, 2])
    elif rank == 3:
        keep = op.Unsqueeze(op.Cast(mask, to=ir.DataType.BOOL), [1])
    elif rank == 4:
        start = 0 if past is None else op.size(past, 2)
        end = plus(op, start, op.size(q, 2))
        rows = op.Slice(mask, op.vector([start]), op.vector([end]), [2])
        cut = op.Slice(rows, [0], op.vector([op.size(k, 2)]), [3])
        keep = op.Cast(cut, to=ir.DataType.BOOL)
    else:
        raise_unsupported(node, f"masks of rank {rank} are not supported")
    return op.Where(keep, op.const(0.0, q.dtype), op.const(low, q.dtype))


def _by_lengths(op: OpBuilder, mask: ir.Value, q: ir.Value, k: ir.Value, node: ir.Node) -> ir.Value:
    batch, count = op.dims(q)[0], op.dims(mask)[0]
    columns = op.iota(op.size(k, 2))
    lengths = op.cast(mask, ir.DataType.INT64)
    n = op.vector([op.size(q, 0)])

    def part(i: int) -> ir.Value:
        begin = op.const([0]) if i == 0 else n
        stop = n if i == 0 else op.Mul(n, 2)
        return op.reshape(op.Slice(lengths, begin, stop, [0]), [-1, 1, 1, 1])

    kind = _mask_vector_kind(count, batch)
    if kind is None:
        return _lengths_or_ends(op, lengths, columns, n)
    keep = op.Less(columns, part(0))
    return op.And(keep, op.GreaterOrEqual(columns, part(1))) if kind == "ends-starts" else keep


def _mask_vector_kind(count: D.Dim, batch: D.Dim) -> str | None:
    """Return what a rank-1 mask holds, by its size; ``None`` if the size is unknown."""
    if count == batch:
        return "lengths"
    if count == D.mul(batch, 2):
        return "ends-starts"
    return "sums" if count == D.add(D.mul(batch, 3), 2) else None


def _lengths_or_ends(op: OpBuilder, lengths: ir.Value, columns: ir.Value, n: ir.Value) -> ir.Value:
    """Return the mask where the kind of vector is known at run time only.

    Every kind begins with the ends. Starts follow if the size is exactly ``2 * batch``.
    """
    ends = op.reshape(op.Slice(lengths, [0], n, [0]), [-1, 1, 1, 1])
    both = op.Equal(op.Shape(lengths), op.Mul(n, 2))  # [1]
    padded = op.Concat(lengths, op.Mul(op.Slice(lengths, [0], n, [0]), 0), axis=0)
    starts = op.reshape(op.Slice(padded, n, op.Mul(n, 2), [0]), [-1, 1, 1, 1])
    after = op.Or(op.Not(both), op.GreaterOrEqual(columns, starts))
    return op.And(op.Less(columns, ends), after)


def rotate(
    op: OpBuilder, x: ir.Value, cos: ir.Value, sin: ir.Value, interleaved: int, rotated: int | None
) -> ir.Value:
    """Rotate pairs ``(a, b)`` of the last axis to ``(a cos - b sin, b cos + a sin)``.

    Emits ``x * (cos, cos) + (b, a) * (-sin, sin)``, the form with the fewest nodes forward and
    backward; all layers share the concatenated tables.

    Args:
        op: the builder.
        x: of rank 4.
        cos: half as wide as the rotated features; broadcasts with ``x`` in other axes.
        sin: like ``cos``.
        interleaved: whether pairs are adjacent; else ``b`` follows half the width after ``a``.
        rotated: number of rotated features, the rest passes through; ``None`` for all.
    """
    whole, rest = x, None
    if rotated is not None:
        whole, rest = op.Slice(x, [0], [rotated], [3]), op.Slice(x, [rotated], [SLICE_END], [3])
    axis = 3
    if interleaved:
        whole = op.Reshape(whole, [0, 0, 0, -1, 2])
        cos, sin, axis = op.Unsqueeze(cos, [4]), op.Unsqueeze(sin, [4]), 4
    a, b = op.Split(whole, axis=axis, num_outputs=2, _outputs=2)
    both = cos if interleaved else op.Concat(cos, cos, axis=axis)
    signed = op.Concat(op.Neg(sin), sin, axis=axis)
    swapped = op.Concat(b, a, axis=axis)
    swapped.shape = whole.shape
    y = op.Add(op.Mul(whole, both), op.Mul(swapped, signed))
    y.shape = whole.shape
    if interleaved:
        y = op.Reshape(y, [0, 0, 0, -1])
    if rest is not None:
        y = op.Concat(y, rest, axis=3)
    y.shape = x.shape
    return y


def apply_rotary(
    op: OpBuilder, heads: ir.Value, cos: ir.Value, sin: ir.Value, interleaved: int, node: ir.Node
) -> ir.Value:
    """Rotate pairs of features of [B, H, S, D] by angles of [B or 1, 1, S, half].

    Features after the first ``2 * half`` pass through.
    """
    half, size = op.dims(cos)[-1], op.dims(heads)[-1]
    if not isinstance(half, int) or not isinstance(size, int):
        raise_unsupported(node, "the number of rotated features must be static")
    return rotate(op, heads, cos, sin, interleaved, 2 * half if 2 * half < size else None)


def rotary_angles(op: OpBuilder, cache: ir.Value, positions: ir.Value) -> ir.Value:
    """Gather rows of a cosine or sine cache by positions [B or 1, S]: [B or 1, 1, S, half]."""
    return op.Unsqueeze(op.Gather(cache, positions, axis=0), [1])
