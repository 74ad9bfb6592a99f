"""Pieces of attention: heads split and joined, scores, masks, rotation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.prepare.decompositions.rotation import rotate
from onnxtrain.graph.shapes import dims as D


def refuse(node: ir.Node, why: str) -> NoReturn:
    """Raise an error that says which node cannot be expressed, and why."""
    raise PrepareError(f"node {node.name!r}: {S.describe(node)}: {why}")


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


def per_group(op: OpBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Multiply [B, H, S, m] by [B, G, m, n]; ``H / G`` heads of ``a`` share one of ``b``.

    Those heads lie side by side, so their rows are put below each other and nothing is repeated.
    """
    heads, groups = op.dims(a)[1], op.dims(b)[1]
    if heads == groups:
        return op.MatMul(a, b)
    assert isinstance(heads, int)
    assert isinstance(groups, int)
    together = op.MatMul(_rows_below(op, a, groups), b)
    return _rows_apart(op, together, heads, a)


def _rows_below(op: OpBuilder, x: ir.Value, groups: int) -> ir.Value:
    """Return [B, H, S, m] as [B, G, H / G * S, m]."""
    inner = op.dims(x)[3]
    width = inner if isinstance(inner, int) else op.size(x, 3)
    y = op.Reshape(x, op.vector([0, groups, -1, width]))
    S.set_dims(y, [op.dims(x)[0], groups, *op.dims(y)[2:3], inner])
    return y


def _rows_apart(op: OpBuilder, x: ir.Value, heads: int, like: ir.Value) -> ir.Value:
    """Return [B, G, H / G * S, m] as [B, H, S, m], where ``like`` is [B, H, S, any]."""
    inner = op.dims(x)[3]
    sizes = [-1, inner] if isinstance(inner, int) else [op.size(like, 2), -1]
    y = op.Reshape(x, op.vector([0, heads, *sizes]))
    S.set_dims(y, [op.dims(x)[0], heads, op.dims(like)[2], inner])
    return y


def _repeat_rows(op: OpBuilder, allowed: Sequence[ir.Value], times: int) -> list[ir.Value]:
    """Return conditions on [B, 1, S, keys] for rows that are put below each other."""
    if not allowed:
        return []
    keep = functools.reduce(op.And, allowed)
    return [keep if op.dims(keep)[2] == 1 else op.Concat(*[keep] * times, axis=2)]


def factor_of(op: OpBuilder, q: ir.Value, scale: float | None) -> float | ir.Value:
    """Return what scores are multiplied by: the given number, else ``1 / sqrt(head size)``."""
    if scale:
        return scale
    size = op.dims(q)[-1]
    return size**-0.5 if isinstance(size, int) else op.Reciprocal(op.Sqrt(op.count(q, [3])))


def attend(
    op: OpBuilder, q: ir.Value, k: ir.Value, v: ir.Value, *, scale: float | None,
    softcap: float = 0.0, added: Sequence[ir.Value | None] = (),
    allowed: Sequence[ir.Value] = (), certain: bool = True, additive: bool = False,
    sink: ir.Value | None = None,
) -> tuple[ir.Value, ir.Value]:  # fmt: skip
    """Return ``softmax(cap(scale q k^T) + added) v`` over allowed keys, and the scores.

    Args:
        op: the builder.
        q: [batch, heads, length, size]; its heads may share those of ``k`` and ``v``.
        k: keys.
        v: values.
        scale: what products are multiplied by.
        softcap: scores are bent into ``(-softcap, softcap)`` if it is not zero.
        added: what is added to the scores.
        allowed: conditions on pairs of a query and a key.
        certain: whether every query has a key that is allowed.
        additive: whether a very negative number may be added for what is not allowed; only where
            ``certain`` is proven, as a query without keys would get a gradient.
        sink: one more score per head, of a key whose value is zero.
    """
    heads, groups, plain = op.dims(q)[1], op.dims(k)[1], all(x is None for x in (*added, sink))
    if plain and isinstance(heads, int) and isinstance(groups, int) and heads != groups:
        times = heads // groups
        below = _rows_below(op, q, groups)
        y, scores = attend(
            op, below, k, v, scale=scale, softcap=softcap, certain=certain, additive=additive,
            allowed=_repeat_rows(op, allowed, times),
        )  # fmt: skip
        return _rows_apart(op, y, heads, q), _rows_apart(op, scores, heads, q)
    scores = per_group(op, op.Mul(q, factor_of(op, q, scale)), op.mT(k))
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
        if additive and plain:  # one sum for all layers, and its gradient is free
            logits = op.Add(scores, op.Where(keep, op.const(0.0, q.dtype), lowest))
        else:
            logits = op.Where(keep, scores, lowest)
        logits.shape = scores.shape
    p = op.Softmax(logits, axis=-1) if sink is None else _with_sink(op, logits, sink)
    if keep is not None and not certain:
        p = op.Mul(p, op.Cast(keep, to=q.dtype))
    p.shape = scores.shape
    return per_group(op, p, v), scores


def _with_sink(op: OpBuilder, logits: ir.Value, sink: ir.Value) -> ir.Value:
    column = op.Expand(
        op.Reshape(sink, [1, -1, 1, 1]),
        op.vector([op.size(logits, 0), op.size(logits, 1), op.size(logits, 2), 1]),
    )
    p = op.Softmax(op.Concat(logits, column, axis=-1), axis=-1)
    return op.Slice(p, [0], [-1], [3])


def causal(op: OpBuilder, q: ir.Value, k: ir.Value, before: ir.Value | None) -> ir.Value:
    """Return the condition that a key is not later than a query, behind ``before`` past keys."""
    rows = op.reshape(op.iota(op.size(q, 2)), [-1, 1])
    if before is not None:
        rows = op.Add(rows, op.vector([op.size(before, 2)]))
    return op.LessOrEqual(op.iota(op.size(k, 2)), rows)


def with_past(op: OpBuilder, past: ir.Value | None, new: ir.Value) -> ir.Value:
    """Return keys or values with those of a cache in front, along the axis of the sequence."""
    if past is None or op.dims(past)[2] == 0:
        return new
    both = op.Concat(past, new, axis=2)
    length = D.add(op.dims(past)[2], op.dims(new)[2])
    S.set_dims(both, [*op.dims(new)[:2], length, op.dims(new)[3]])
    return both


def turn(
    op: OpBuilder, heads: ir.Value, cos: ir.Value, sin: ir.Value, interleaved: int, node: ir.Node
) -> ir.Value:
    """Rotate pairs of features of [B, H, S, D] by angles of [B or 1, 1, S, half].

    Features behind the first ``2 * half`` stay as they are.
    """
    half, size = op.dims(cos)[-1], op.dims(heads)[-1]
    if not isinstance(half, int) or not isinstance(size, int):
        refuse(node, "the number of rotated features is not known")
    return rotate(op, heads, cos, sin, interleaved, 2 * half if 2 * half < size else None)


def angles(op: OpBuilder, cache: ir.Value, positions: ir.Value) -> ir.Value:
    """Return rows of a table of cosines or sines, [B or 1, 1, S, half], by [B or 1, S]."""
    return op.Unsqueeze(op.Gather(cache, positions, axis=0), [1])


def rms(op: OpBuilder, x: ir.Value, weight: ir.Value | None, epsilon: float) -> ir.Value:
    """Return ``x / sqrt(mean(x^2) + epsilon) * weight`` along the last axis."""
    wide = op.cast(x, ir.DataType.FLOAT) if x.dtype != ir.DataType.DOUBLE else x
    mean = op.ReduceMean(op.Mul(wide, wide), [-1], keepdims=1)
    normal = op.cast(op.Div(wide, op.Sqrt(op.Add(mean, epsilon))), x.dtype)
    return normal if weight is None else op.Mul(normal, weight)


LAST = np.iinfo(np.int64).max
"""Stands for the end of an axis in a Slice."""
