"""Gradients of small tables as products.

``y[r] = sum over n of [i[n] = r] u[n]`` is a product of a matrix of zeros and ones with the rows
that would be scattered. Where many rows go to few places, as kinds of tokens and buckets of
distances do, a GPU adds them one after the other, and the product takes a tenth of the time.

Indices below zero count from the end. One beyond the table belongs to no row: a GPU reads zeros
for it.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes import dims as D


def tables_by_product(model: ir.Model, op: OpBuilder) -> int:
    """Add rows to small tables of zeros by products, in place; return how many there were."""
    return sum(_rewrite(op, node) for node in nodes(model.graph, "ScatterND"))


def _rewrite(op: OpBuilder, node: ir.Node) -> int:
    data, indices, updates = node.inputs
    y, reduction = node.outputs[0], node.attributes.get("reduction")
    if data is None or indices is None or updates is None or reduction is None:
        return 0
    if reduction.as_string() != "add" or updates.dtype != ir.DataType.FLOAT or not _is_zero(data):
        return 0
    table, sizes = D.numbers(S.dims_of(data)), D.numbers(S.dims_of(indices))
    if table is None or sizes is None or D.numbers(S.dims_of(updates)) is None:
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


def _is_zero(x: ir.Value) -> bool:
    node = x.producer()
    if node is None or not is_op(node, "ConstantOfShape"):
        return False
    value = node.attributes.get("value")
    return value is None or not value.as_tensor().numpy().any()


__all__ = ["tables_by_product"]
