"""A bias added behind its product, not inside it: ``Gemm(a, b, c) = Gemm(a, b) + c``.

CUDA's product with a bias first spreads the bias over the whole result, by a kernel that takes as
long as half the product, and then reads it back. The addition alone is one quick pass. onnxruntime
joins a MatMul and the Add behind it to such a product by itself, unless a view lies between them.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes import dims as D


def bias_apart(model: ir.Model, op: OpBuilder) -> int:
    """Take biases out of large products, in place; return how many."""
    count = sum(_out_of_gemm(op, node) for node in nodes(op.graph, "Gemm"))
    return count + sum(_behind_view(op, node) for node in nodes(op.graph, "Add"))


def _out_of_gemm(op: OpBuilder, node: ir.Node) -> int:
    a, b, bias = (*node.inputs, None)[:3]
    y = node.outputs[0]
    attributes = S.attributes_of(node, op.opset)
    if a is None or b is None or bias is None or attributes["beta"] != 1.0:
        return 0
    if _large(y) is None or not _is_row(bias, y):
        return 0
    uses = list(y.uses())
    op.position = node
    turns = {key: attributes[key] for key in ("alpha", "transA", "transB")}
    replace_value(y, op.Add(op.Gemm(a, b, **turns), bias), uses)
    return 1


def _behind_view(op: OpBuilder, node: ir.Node) -> int:
    y = node.outputs[0]
    sizes = _large(y)
    for product, bias in (tuple(node.inputs), tuple(reversed(node.inputs))):
        made = None if product is None else product.producer()
        if product is None or bias is None or made is None or not is_op(made, "MatMul"):
            continue
        if sizes is None or not S.same_shape(product, y) or not _is_row(bias, y):
            continue
        uses = list(y.uses())
        op.position = node
        view = [1, *sizes] if len(sizes) == 2 else [-1, sizes[-1]]
        total = op.Add(op.Reshape(product, view), bias)
        replace_value(y, op.Reshape(total, sizes), uses)
        return 1
    return 0


def _large(y: ir.Value) -> list[int] | None:
    """Return the sizes of a large result, if they are known."""
    sizes = D.numbers(S.dims_of(y) or (None,))
    many = sizes is not None and len(sizes) > 1 and math.prod(sizes) >= T.WIDE_PASS_ELEMENTS
    return sizes if many else None


def _is_row(bias: ir.Value, y: ir.Value) -> bool:
    """Return whether a bias has one number for each column."""
    dims = S.dims_of(bias)
    return dims is not None and dims == (S.dims_of(y) or ())[-1:]


__all__ = ["bias_apart"]
