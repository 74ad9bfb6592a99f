"""A sum with a product of matrices inside the product.

``c + a b`` is one Gemm that starts from ``c``: a residual that is added behind a layer, or the
gradients of two layers that read one value. Nothing is written and read again in between.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import is_op, nodes

_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE})


def sum_in_product(model: ir.Model, op: OpBuilder) -> int:
    """Let products of matrices start from what is added to them; return how many do."""
    order = {node: i for i, node in enumerate(model.graph)}
    changed = 0
    for node in nodes(model.graph, "Add"):
        products = [i for i, x in enumerate(node.inputs) if _product(x, node) is not None]
        if not products or node.outputs[0].dtype not in _TYPES:
            continue
        last = max(products, key=lambda i: _place(order, node.inputs[i]))
        start = node.inputs[1 - last]
        product = _product(node.inputs[last], node)
        if start is None or product is None or not S.same_shape(start, node.outputs[0]):
            continue
        op.position = node
        y = node.outputs[0]
        settings = {n: a.value for n, a in product.attributes.items() if n != "beta"}
        new = op.Gemm(*product.inputs[:2], start, **settings)
        replace_value(y, new, list(y.uses()))
        changed += 1
    return changed


def _product(x: ir.Value | None, reader: ir.Node) -> ir.Node | None:
    """Return the product of two matrices that a value is, if only ``reader`` reads it."""
    node = None if x is None else x.producer()
    if x is None or node is None or len(x.uses()) != 1 or x.is_graph_output():
        return None
    if node.graph is not reader.graph or not S.same_shape(x, reader.outputs[0]):
        return None
    if is_op(node, "Gemm"):
        return node if len(node.inputs) == 2 or node.inputs[2] is None else None
    ranks = [None if v is None or v.shape is None else len(v.shape) for v in node.inputs]
    return node if is_op(node, "MatMul") and ranks == [2, 2] else None


def _place(order: dict[ir.Node, int], x: ir.Value | None) -> int:
    producer = None if x is None else x.producer()
    return -1 if producer is None else order.get(producer, -1)


__all__ = ["sum_in_product"]
