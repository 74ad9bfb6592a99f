"""Rows that are scattered element by element.

``y[i[n]] += u[n]`` for rows of C elements is ``y'[i[n] C + c] += u'[n C + c]`` for all elements of
the same tensors as vectors. CUDA's kernel gives an index to a thread, which goes through the row by
itself: few threads of many, none of which reads next to its neighbour. With an index for each
element, or for a few of them where there are very many, all threads have work.

Indices below zero count from the end, and others beyond the table are those of its ends, as the
kernel has it.

Gradients of small tables as products.

``y[r] = sum over n of [i[n] = r] u[n]`` is a product of a matrix of zeros and ones with the rows
that would be scattered. Where many rows go to few places, as kinds of tokens and buckets of
distances do, a GPU adds them one after the other, and the product takes a tenth of the time.

Indices below zero count from the end. One beyond the table belongs to no row: a GPU reads zeros
for it.

Rows scattered into a sum instead of into zeros that are added to it.

A table that is both looked up and multiplied by, such as tied embeddings, has two gradients: a
whole one, and a few rows added up in a table of zeros. The rows can be added to the whole one.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, replace_value
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes import dims as D


@dataclasses.dataclass(frozen=True)
class _ScatterSizes:
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


def scatter_nd_per_element(model: ir.Model, op: OpBuilder) -> int:
    """Give elements of scattered rows indices of their own, in place; return how many did so."""
    return sum(_scatter_elements(op, node) for node in nodes(model.graph, "ScatterND"))


def _scatter_elements(op: OpBuilder, node: ir.Node) -> int:
    data, indices, updates = node.inputs
    if data is None or indices is None or not S.is_float(updates):
        return 0  # integers are mostly known before a run, and folded by the runtime
    rows = _scatter_sizes(node)
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


def _scatter_sizes(node: ir.Node) -> _ScatterSizes | None:
    """Return the sizes of a scatter of long rows, ``None`` of others or if they are not known."""
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
    """Return where each row begins, counted in pieces: one column."""
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


def scatter_add_as_matmul(model: ir.Model, op: OpBuilder) -> int:
    """Add rows to small tables of zeros by products, in place; return how many there were."""
    return sum(_scatter_to_matmul(op, node) for node in nodes(model.graph, "ScatterND"))


def _scatter_to_matmul(op: OpBuilder, node: ir.Node) -> int:
    data, indices, updates = node.inputs
    y, reduction = node.outputs[0], node.attributes.get("reduction")
    if data is None or indices is None or updates is None or reduction is None:
        return 0
    if (
        reduction.as_string() != "add"
        or updates.dtype != ir.DataType.FLOAT
        or not _is_constant_of_zeros(data)
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
    listed = op.Reshape(indices, [-1])
    inside = op.Where(op.Less(listed, 0), op.Add(listed, rows), listed)
    places = op.Equal(op.const(np.arange(rows)[:, None]), inside)
    ones = op.Cast(places, to=updates.dtype)
    total = op.MatMul(ones, op.Reshape(updates, [count, math.prod(table[1:])]))
    replace_value(y, op.Reshape(total, list(table)), list(y.uses()))
    return 1


def _is_constant_of_zeros(x: ir.Value) -> bool:
    node = x.producer()
    if node is None or not is_op(node, "ConstantOfShape"):
        return False
    value = node.attributes.get("value")
    return value is None or not value.as_tensor().numpy().any()


def fuse_scatter_add(model: ir.Model, op: OpBuilder) -> int:
    """Let a ScatterND start from what would be added to it; return how many do."""
    changed = 0
    for node in nodes(model.graph, "Add"):
        for rows, whole in (tuple(node.inputs), tuple(reversed(node.inputs))):
            scatter = _scattered(rows, node)
            if scatter is None or whole is None or not S.same_shape(whole, node.outputs[0]):
                continue
            op.position = node
            y = node.outputs[0]
            new = op.ScatterND(whole, *scatter.inputs[1:], reduction="add")
            replace_value(y, new, list(y.uses()))
            changed += 1
            break
    return changed


def _scattered(x: ir.Value | None, reader: ir.Node) -> ir.Node | None:
    """Return the node that adds rows to zeros, if only ``reader`` reads the result."""
    node = None if x is None else x.producer()
    if x is None or node is None or len(x.uses()) != 1 or x.is_graph_output():
        return None
    kind = node.attributes.get("reduction")
    if not is_op(node, "ScatterND") or kind is None or kind.as_string() != "add":
        return None
    same = node.graph is reader.graph and S.same_shape(x, reader.outputs[0])
    return node if same and _is_all_zero(node.inputs[0]) else None


def _is_all_zero(x: ir.Value | None) -> bool:
    node = None if x is None else x.producer()
    if node is not None and is_op(node, "ConstantOfShape"):
        value = node.attributes.get("value")
        return value is None or not value.as_tensor().numpy().any()
    array = None if x is None else S.constant_of(x)
    return array is not None and not array.any()
