"""Rewrites of ScatterND, which gradients of embeddings and indexing use.

- `scatter_nd_per_element` (CUDA): an index per element instead of one per row.
- `scatter_add_as_matmul` (CUDA): adding rows to a small table becomes a matmul with one-hot rows.
- `fuse_scatter_add`: rows are scattered into a sum instead of into zeros.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, replace_value
from onnxtrain.graph.match import Match, checked
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes import dims as D


@dataclasses.dataclass(frozen=True)
class _ScatterSizes:
    """Sizes of a scatter.

    Attributes:
        table: sizes of the axes that indices address.
        count: number of indices.
        pieces: pieces of a row, each with its own index.
        width: elements of a piece.
    """

    table: tuple[int, ...]
    count: int
    pieces: int
    width: int


def scatter_nd_per_element(model: ir.Model, op: OpBuilder) -> int:
    """Give the elements of scattered rows their own indices; return how many nodes changed.

        before:  y[i[n]] += u[n]                    rows of C elements
        after:   y'[i[n] C + c] += u'[n C + c]      y', u': the same tensors as vectors

    CUDA's kernel runs one thread per index, which walks its row alone: few threads, and none reads
    next to its neighbor. Very large rows get an index per piece of several elements.

    Negative indices count from the end, and indices out of range are clipped, as in the kernel.
    """
    return sum(_scatter_elements(op, node) for node in nodes(model.graph, "ScatterND"))


def _scatter_elements(op: OpBuilder, node: ir.Node) -> int:
    data, indices, updates = node.inputs
    if data is None or indices is None or not S.is_float(updates):
        return 0  # integers are mostly constant, and onnxruntime folds them
    rows = _scatter_sizes(node)
    if rows is None:
        return 0
    op.position = node
    y = node.outputs[0]
    shape = [-1] if rows.width == 1 else [-1, rows.width]
    first = _first_pieces(op, indices, rows)
    positions = op.Add(first, op.iota(rows.pieces))
    reduction = node.attributes.get("reduction")
    flat = op.ScatterND(
        _as_pieces(op, data, shape),
        op.Reshape(positions, [-1, 1]),
        op.Reshape(updates, shape),
        reduction=None if reduction is None else reduction.as_string(),
    )
    sizes = op.static(y)
    assert sizes is not None
    replace_value(y, op.Reshape(flat, list(sizes)), list(y.uses()))
    return 1


def _scatter_sizes(node: ir.Node) -> _ScatterSizes | None:
    """Return the sizes of a scatter of long rows; None if rows are short or sizes are unknown."""
    known = [
        None if x is None else D.static_sizes(S.dims_of(x)) for x in (*node.inputs, *node.outputs)
    ]
    data, indices = known[:2]
    if data is None or indices is None or None in known or not indices:
        return None
    axes = indices[-1]
    count, length = math.prod(indices[:-1]), math.prod(data[axes:])
    if not axes or not count or 0 in data or length < T.SCATTER_ROW_ELEMENTS:
        return None
    widths = (w for w in range(1, length) if length % w == 0)
    width = next((w for w in widths if count * length // w <= T.SCATTER_INDEX_ELEMENTS), None)
    if width is None:
        return None
    return _ScatterSizes(tuple(data[:axes]), count, length // width, width)


def _first_pieces(op: OpBuilder, indices: ir.Value, rows: _ScatterSizes) -> ir.Value:
    """Return the index of the first piece of each row, as a column."""
    axes = len(rows.table)
    steps = np.cumprod([rows.pieces, *rows.table[:0:-1]])[::-1].astype(np.int64)
    last = np.asarray(rows.table, np.int64) - 1
    known = S.constant_of(indices)
    if known is not None and known.size <= T.STORED_INDEX_ELEMENTS:
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


def _as_pieces(op: OpBuilder, data: ir.Value, shape: list[int]) -> ir.Value:
    """Return the table in pieces; a ConstantOfShape gets that shape without a copy."""
    node = data.producer()
    if node is None or not is_op(node, "ConstantOfShape") or len(data.uses()) != 1:
        return op.Reshape(data, shape)
    sizes = op.static(data)
    assert sizes is not None
    total = math.prod(sizes) // math.prod(shape[1:])
    value = node.attributes.get("value")
    tensor = None if value is None else value.as_tensor()
    return op.ConstantOfShape([total, *shape[1:]], value=tensor)


def scatter_add_as_matmul(model: ir.Model, op: OpBuilder) -> int:
    """Add rows to small tables of zeros by matmuls; return how many.

        before:  ScatterND(0, i, u, reduction="add")
        after:   MatMul(one_hot(i)^T, u)

    Where many rows go to few indices, as with token types and relative position buckets, CUDA adds
    them one by one; the matmul takes a tenth of the time. Negative indices count from the end. An
    index out of range matches no row; CUDA's Gather reads zeros for it.
    """
    return sum(_scatter_to_matmul(op, node) for node in nodes(model.graph, "ScatterND"))


def _scatter_to_matmul(op: OpBuilder, node: ir.Node) -> int:
    data, indices, updates = node.inputs
    y, reduction = node.outputs[0], node.attributes.get("reduction")
    if data is None or indices is None or updates is None or reduction is None:
        return 0
    if (
        reduction.as_string() != "add"
        or updates.dtype != ir.DataType.FLOAT
        or not _is_zeros(data, initializers=False)
    ):
        return 0
    table, sizes = D.static_sizes(S.dims_of(data)), D.static_sizes(S.dims_of(indices))
    if table is None or sizes is None or D.static_sizes(S.dims_of(updates)) is None:
        return 0
    rows, count = table[0], math.prod(sizes[:-1])
    if sizes[-1] != 1 or len(table) < 2 or 0 in (count, *table):
        return 0
    if rows > T.ONE_HOT_ROWS or rows * count > T.ONE_HOT_ELEMENTS or count < rows:
        return 0
    op.position = node
    flat = op.Reshape(indices, [-1])
    positive = op.Where(op.Less(flat, 0), op.Add(flat, rows), flat)
    is_row = op.Equal(op.const(np.arange(rows)[:, None]), positive)
    one_hot = op.Cast(is_row, to=updates.dtype)
    total = op.MatMul(one_hot, op.Reshape(updates, [count, math.prod(table[1:])]))
    replace_value(y, op.Reshape(total, list(table)), list(y.uses()))
    return 1


def fuse_scatter_add(model: ir.Model, op: OpBuilder) -> int:
    """Scatter rows into what would be added to them; return how many nodes changed.

        before:  c + ScatterND(0, i, u, reduction="add")
        after:   ScatterND(c, i, u, reduction="add")

    Tied embeddings have such gradients: one of the whole table from the last layer, and one of some
    rows from the lookup.
    """
    changed = 0
    for node in nodes(model.graph, "Add"):
        match = _sum_with_scatter.match(node)
        if match is not None:
            op.position = node
            y = node.outputs[0]
            scatter = match.node("scattered")
            fused = op.ScatterND(match["whole"], *scatter.inputs[1:], reduction="add")
            replace_value(y, fused, list(y.uses()))
            changed += 1
    return changed


def _check_scatter(match: Match) -> bool | str:
    y = match.root.outputs[0]
    if not S.same_shape(match["whole"], y) or not S.same_shape(match["scattered"], y):
        return "an operand is broadcast"
    return _is_zeros(match["zeros"], initializers=True) or "rows are not added to zeros"


@checked(_check_scatter)
def _sum_with_scatter(op, zeros, whole):
    scattered = op.ScatterND(zeros, ..., reduction="add").once().named("scattered")
    return op.Add(scattered, whole)


def _is_zeros(x: ir.Value, *, initializers: bool) -> bool:
    node = x.producer()
    if node is not None and is_op(node, "ConstantOfShape"):
        value = node.attributes.get("value")
        return value is None or not value.as_tensor().numpy().any()
    array = S.constant_of(x) if initializers else None
    return array is not None and not array.any()
