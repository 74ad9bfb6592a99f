"""Sums of columns of 16-bit numbers, as gradients of biases are: a product with a row of ones.

``ReduceSum(x, rows) = 1 x``. Units for products read 16 bits at memory speed and add in float32,
as the kernel that sums columns does, and round once, as it does; that kernel takes up to four times
as long.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import nodes
from onnxtrain.graph.shapes import dims as D

_HALF = frozenset({ir.DataType.BFLOAT16, ir.DataType.FLOAT16})
_WORD = 8
"""Columns and rows are multiples of it, or kernels for products are slow."""


def column_sums_by_product(model: ir.Model, op: OpBuilder) -> int:
    """Write sums of columns as products, in place; return how many."""
    return sum(_rewrite(op, node) for node in nodes(op.graph, "ReduceSum"))


def _rewrite(op: OpBuilder, node: ir.Node) -> int:
    x, y = node.inputs[0], node.outputs[0]
    size = None if x is None else _matrix(node, x)
    sizes = D.numbers(S.dims_of(y) or (None,))
    if x is None or x.dtype not in _HALF or size is None or sizes is None:
        return 0
    rows, width = size
    if rows * width < T.WIDE_PASS_ELEMENTS or rows % _WORD or width % _WORD:
        return 0
    uses = list(y.uses())
    op.position = node
    ones = op.Expand(op.const(1.0, x.dtype), op.const([1, rows]))
    total = op.MatMul(ones, op.Reshape(x, [rows, width]))
    replace_value(y, op.Reshape(total, sizes), uses)
    return 1


def _matrix(node: ir.Node, x: ir.Value) -> tuple[int, int] | None:
    """Return rows and columns of what is summed, if nothing but the last axis is left."""
    sizes, axes = D.numbers(S.dims_of(x) or (None,)), S.constant_of((*node.inputs, None)[1])
    if sizes is None or axes is None or len(sizes) < 2:
        return None
    if sorted(int(a) % len(sizes) for a in axes.ravel()) != list(range(len(sizes) - 1)):
        return None
    return math.prod(sizes[:-1]), sizes[-1]


__all__ = ["column_sums_by_product"]
