"""Rows that are scattered element by element.

``y[i[n]] += u[n]`` for rows of C elements is ``y'[i[n] C + c] += u'[n C + c]`` for all elements of
the same tensors as vectors. CUDA's kernel gives an index to a thread, which goes through the row by
itself: few threads of many, none of which reads next to its neighbour. With an index for each
element, or for a few of them where there are very many, all threads have work.

Indices below zero count from the end, and others beyond the table are those of its ends, as the
kernel has it.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes import dims as D


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Sizes of a scatter.

    Attributes:
        table: of the axes that indices name.
        count: how many indices there are.
        pieces: that each row is cut into.
        width: elements of a piece.
    """

    table: tuple[int, ...]
    count: int
    pieces: int
    width: int


def scatter_by_elements(model: ir.Model, op: OpBuilder) -> int:
    """Give elements of scattered rows indices of their own, in place; return how many did so."""
    return sum(_rewrite(op, node) for node in nodes(model.graph, "ScatterND"))


def _rewrite(op: OpBuilder, node: ir.Node) -> int:
    data, indices, updates = node.inputs
    if data is None or indices is None or not S.is_float(updates):
        return 0  # integers are mostly known before a run, and folded by the runtime
    rows = _rows(node)
    if rows is None:
        return 0
    op.position = node
    y = node.outputs[0]
    shape = [-1] if rows.width == 1 else [-1, rows.width]
    first = _first_pieces(op, indices, rows)
    where = op.Add(first, op.iota(rows.pieces))
    reduction = node.attributes.get("reduction")
    flat = op.ScatterND(
        _pieces(op, data, shape),
        op.Reshape(where, [-1, 1]),
        op.Reshape(updates, shape),
        reduction=None if reduction is None else reduction.as_string(),
    )
    sizes = op.static(y)
    assert sizes is not None
    replace_value(y, op.Reshape(flat, list(sizes)), list(y.uses()))
    return 1


def _rows(node: ir.Node) -> _Rows | None:
    """Return the sizes of a scatter of long rows, ``None`` of others or if they are not known."""
    known = [None if x is None else D.numbers(S.dims_of(x)) for x in (*node.inputs, *node.outputs)]
    data, indices = known[:2]
    if data is None or indices is None or None in known or not indices:
        return None
    axes = indices[-1]
    count, length = math.prod(indices[:-1]), math.prod(data[axes:])
    if not axes or not count or 0 in data or length < T.SCATTERED_ROW:
        return None
    widths = (w for w in range(1, length) if length % w == 0)
    width = next((w for w in widths if count * length // w <= T.SCATTERED_PIECES), None)
    if width is None:
        return None
    return _Rows(tuple(data[:axes]), count, length // width, width)


def _first_pieces(op: OpBuilder, indices: ir.Value, rows: _Rows) -> ir.Value:
    """Return where each row begins, counted in pieces: one column."""
    axes = len(rows.table)
    steps = np.cumprod([rows.pieces, *rows.table[:0:-1]])[::-1].astype(np.int64)
    last = np.asarray(rows.table, np.int64) - 1
    known = S.constant_of(indices)
    if known is not None and known.size <= T.STORED_POSITIONS:
        inside = np.clip(known.reshape(-1, axes), -last - 1, last)
        inside = np.where(inside < 0, inside + last + 1, inside)
        return op.const((inside * steps).sum(-1, keepdims=True))
    inside = op.Reshape(indices, [rows.count, axes])
    if known is None:
        inside = op.Max(op.Min(inside, op.const(last)), op.const(-last - 1))
    if axes > 1:
        inside = op.Where(op.Less(inside, 0), op.Add(inside, op.const(last + 1)), inside)
    moved = op.Mul(inside, op.const(steps))
    return op.ReduceSum(moved, [1], keepdims=1) if axes > 1 else moved


def _pieces(op: OpBuilder, data: ir.Value, shape: list[int]) -> ir.Value:
    """Return the table in pieces; one of a single number is made so."""
    maker = data.producer()
    if maker is None or not is_op(maker, "ConstantOfShape") or len(data.uses()) != 1:
        return op.Reshape(data, shape)
    sizes = op.static(data)
    assert sizes is not None
    total = math.prod(sizes) // math.prod(shape[1:])
    value = maker.attributes.get("value")
    tensor = None if value is None else value.as_tensor()
    return op.ConstantOfShape([total, *shape[1:]], value=tensor)


__all__ = ["scatter_by_elements"]
