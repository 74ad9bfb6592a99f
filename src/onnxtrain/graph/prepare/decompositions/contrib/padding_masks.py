"""Masks of padding as fused attention takes them: of four ranks, and as lengths."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.size_arithmetic import plus
from onnxtrain.graph.prepare.decompositions.contrib.heads import refuse
from onnxtrain.graph.shapes import dims as D


def mask_bias(
    op: OpBuilder, mask: ir.Value | None, q: ir.Value, k: ir.Value, past: ir.Value | None,
    low: float, node: ir.Node,
) -> ir.Value | None:  # fmt: skip
    """Return what is added to scores [batch, heads, queries, keys]: 0, or ``low`` where masked.

    A mask of rank 2 is [batch, keys], of rank 3 [batch, queries, keys], of rank 4
    [batch, 1, longest, longest]. One of rank 1 has the lengths of sequences, [batch]; or their ends
    and then their beginnings, [2 * batch]; or lengths and running sums, [3 * batch + 2].
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
        refuse(node, f"a mask of rank {rank}")
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

    kind = _kind(count, batch)
    if kind is None:
        return _either(op, lengths, columns, n)
    keep = op.Less(columns, part(0))
    return op.And(keep, op.GreaterOrEqual(columns, part(1))) if kind == "ends-starts" else keep


def _kind(count: D.Dim, batch: D.Dim) -> str | None:
    """Return what a vector holds by its number of elements, ``None`` if that cannot be told."""
    if count == batch:
        return "lengths"
    if count == D.mul(batch, 2):
        return "ends-starts"
    return "sums" if count == D.add(D.mul(batch, 3), 2) else None


def _either(op: OpBuilder, lengths: ir.Value, columns: ir.Value, n: ir.Value) -> ir.Value:
    """Return the condition where only the run tells which kind of vector it is.

    Ends stand first in all of them; beginnings count if there are exactly as many.
    """
    ends = op.reshape(op.Slice(lengths, [0], n, [0]), [-1, 1, 1, 1])
    both = op.Equal(op.Shape(lengths), op.Mul(n, 2))  # [1]
    padded = op.Concat(lengths, op.Mul(op.Slice(lengths, [0], n, [0]), 0), axis=0)
    starts = op.reshape(op.Slice(padded, n, op.Mul(n, 2), [0]), [-1, 1, 1, 1])
    after = op.Or(op.Not(both), op.GreaterOrEqual(columns, starts))
    return op.And(op.Less(columns, ends), after)
