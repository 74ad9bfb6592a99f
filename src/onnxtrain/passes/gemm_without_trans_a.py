"""Products with a transposed left operand, where transposing it first is quicker.

A weight's gradient is ``A^T B`` with the rows summed over. onnxruntime's CPU kernel reads a left
operand that is transposed up to 25 % slower than a plain one. Where one operand is much smaller
than the other it is transposed by itself: ``A^T`` in front of the product, or ``B^T`` and then the
result of ``B^T A``. onnxruntime would fuse a plain Transpose into the product again; one of three
axes it leaves alone.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import nodes


def gemm_without_trans_a(model: ir.Model, op: OpBuilder) -> int:
    """Spell transposed products of float32 matrices without ``transA``; return how many."""
    turned = 0
    for node in nodes(op.graph, "Gemm"):
        turned += _turn(op, node)
    return turned


def _turn(op: OpBuilder, node: ir.Node) -> int:
    y = node.outputs[0]
    a, b = node.inputs[:2]
    options = S.attributes_of(node, op.opset)
    if a is None or b is None or y.dtype != ir.DataType.FLOAT:
        return 0
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        return 0
    if not options["transA"] or options["transB"] or options["alpha"] != 1.0:
        return 0
    left, right = S.dims_of(a), S.dims_of(b)
    if left is None or right is None:
        return 0
    rows, m, n = left[0], left[1], right[1]
    if not isinstance(m, int) or not isinstance(n, int) or min(m, n) < 2:
        return 0
    op.position = node
    if T.TRANSPOSED_COLUMNS_RATIO * m <= n:
        if m * n < T.TRANSPOSED_WEIGHT_ELEMENTS:
            return 0
        result = op.MatMul(transposed(op, a, m), b)
    else:
        if m < max(T.TRANSPOSED_COLUMNS_RATIO * n, T.TRANSPOSED_RESULT_ROWS):
            return 0
        if not isinstance(rows, int) or rows < T.TRANSPOSED_RESULT_OPERAND_ROWS:
            return 0
        result = op.Transpose(op.MatMul(transposed(op, b, n), a), perm=[1, 0])
    replace_value(y, result, list(y.uses()))
    return 1


def transposed(op: OpBuilder, x: ir.Value, width: int) -> ir.Value:
    """Return ``x^T`` of a matrix so that no runtime makes it part of a product."""
    turned = op.Transpose(op.Reshape(x, [1, -1, width]), perm=[0, 2, 1])
    return op.Reshape(turned, [width, -1])
