"""Rewrites of matmuls: transposes, scales of rows and biases.

- `gemm_without_trans_a` (CPU): small operands are transposed before a matmul instead of in it.
- `scale_after_matmul`: a scale of the rows of a wide matrix moves to the narrow results.
- `unfuse_gemm_bias` (CUDA): `Gemm(a, b, c) -> Gemm(a, b) + c` for large results.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, replace_value
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes import dims as D

# Weight gradients on the CPU.


def gemm_without_trans_a(model: ir.Model, op: OpBuilder) -> int:
    """Transpose the smaller operand of a weight gradient before the matmul; return how many.

        before:  Gemm(A, B, transA=1)
        after:   MatMul(Transpose(A), B)               A is much narrower than B
                 Transpose(MatMul(Transpose(B), A))    B is much narrower than A

    onnxruntime's CPU kernel reads a transposed left operand up to 25 % slower. It would fuse a
    plain Transpose into the matmul again, but not one of three axes.
    """
    return sum(_without_trans_a(op, node) for node in nodes(op.graph, "Gemm"))


def _without_trans_a(op: OpBuilder, node: ir.Node) -> int:
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
        result = op.MatMul(_unfusable_transpose(op, a, m), b)
    else:
        if m < max(T.TRANSPOSED_COLUMNS_RATIO * n, T.TRANSPOSED_RESULT_ROWS):
            return 0
        if not isinstance(rows, int) or rows < T.TRANSPOSED_RESULT_OPERAND_ROWS:
            return 0
        result = op.Transpose(op.MatMul(_unfusable_transpose(op, b, n), a), perm=[1, 0])
    replace_value(y, result, list(y.uses()))
    return 1


def _unfusable_transpose(op: OpBuilder, x: ir.Value, width: int) -> ir.Value:
    """Return the transpose of a matrix that onnxruntime does not fuse into a matmul."""
    transposed = op.Transpose(op.Reshape(x, [1, -1, width]), perm=[0, 2, 1])
    return op.Reshape(transposed, [width, -1])


# Scales of rows.


def scale_after_matmul(model: ir.Model, op: OpBuilder) -> int:
    """Move scales of the rows of wide matrices to the results of matmuls; return how many moved.

        before:  (e A) W         (e A)^T X        ReduceSum(e A, rows)
        after:   e (A W)         A^T (e X)        e^T A

    The gradient of a loss at logits [rows, classes] is a matrix times one factor per row: 1 /
    count, or the weight of the label. With many classes, `A W` and `X` are much smaller than `A`,
    so this saves a pass over `A`.

    In bfloat16, matmuls read `A` rounded before it is scaled instead of after: the type has the
    range of float32. The factors are not rounded.
    """
    order = list(op.graph)
    following = dict(itertools.zip_longest(order, order[1:]))
    moved = 0
    for node in nodes(op.graph, "Mul"):
        scaled = _scaled(node)
        readers = None if scaled is None else _scaled_readers(scaled, node.outputs[0], op.graph)
        if scaled is None or not readers:
            continue
        node.outputs[0].replace_all_uses_with(scaled.x)
        for reader, index in readers:
            _compensate(op, scaled, reader, index, following[reader])
        moved += 1
    return moved


@dataclasses.dataclass(frozen=True)
class _Scaled:
    """A matrix `x` of some width, and the factors `rows` of its rows, [rows, 1]."""

    x: ir.Value
    rows: ir.Value
    width: int


def _scaled(node: ir.Node) -> _Scaled | None:
    if node.outputs[0].dtype not in S.FLOATS:
        return None
    a, b = node.inputs
    for x, e in ((a, b), (b, a)):
        if x is None or e is None:
            return None
        dims, scale_dims = S.dims_of(x), S.dims_of(e)
        if dims is None or scale_dims is None or len(dims) != 2 or len(scale_dims) != 2:
            continue
        if scale_dims[1] != 1:
            continue
        rows, width = dims
        if not isinstance(width, int) or width < T.SCALED_COLUMNS:
            continue
        if rows is not None and scale_dims[0] == rows:
            return _Scaled(x, e, width)
    return None


def _scaled_readers(
    scaled: _Scaled, y: ir.Value, graph: ir.Graph
) -> list[tuple[ir.Node, int]] | None:
    """Return the matmuls and sums that read `y` or a view of it; None if other nodes do."""
    if y.is_graph_output():
        return None
    readers: list[tuple[ir.Node, int]] = []
    for node, index in y.uses():
        if node.graph is not graph:
            return None
        if _is_view(node, y) and index == 0:
            dims = S.dims_of(node.outputs[0])
            if dims is None or len(dims) < 2 or dims[-1] != scaled.width:
                return None
            inner = _scaled_readers(scaled, node.outputs[0], graph)
            if inner is None:
                return None
            readers += inner
        elif _can_scale_elsewhere(scaled, node, index):
            readers.append((node, index))
        else:
            return None
    return readers


def _is_view(node: ir.Node, y: ir.Value) -> bool:
    """Return whether a node reshapes a value, or casts it to bfloat16."""
    to = node.outputs[0].dtype
    to_bfloat16 = y.dtype == ir.DataType.FLOAT and to == ir.DataType.BFLOAT16
    return is_op(node, "Reshape") or (is_op(node, "Cast") and to_bfloat16)


def _can_scale_elsewhere(scaled: _Scaled, node: ir.Node, index: int) -> bool:
    if is_op(node, "ReduceSum"):
        return index == 0 and _reduces_rows(node)
    if not is_op(node, "MatMul", "Gemm") or index > 1:
        return False
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        return False
    other = node.inputs[1 - index]
    dims = None if other is None else S.dims_of(other)
    if dims is None or len(dims) != 2:
        return False
    trans_a, trans_b = _transposes(node)
    if _contracts_rows(node, index):  # [rows, k]
        return trans_a and not trans_b and _is_narrow(dims[1], scaled)
    return index == 0 and not trans_a and _is_narrow(dims[0 if trans_b else 1], scaled)


def _is_narrow(size: object, scaled: _Scaled) -> bool:
    return isinstance(size, int) and T.SCALED_COLUMNS_PER_RESULT * size <= scaled.width


def _transposes(node: ir.Node) -> tuple[bool, bool]:
    return node.attributes.get_int("transA", 0) == 1, node.attributes.get_int("transB", 0) == 1


def _contracts_rows(node: ir.Node, index: int) -> bool:
    """Return whether a matmul contracts the axis of the rows of input `index`."""
    trans_a, trans_b = _transposes(node)
    return trans_a if index == 0 else not trans_b


def _reduces_rows(node: ir.Node) -> bool:
    """Return whether only columns remain of a sum."""
    x, axes = node.inputs[0], S.constant_of((*node.inputs, None)[1])
    dims, keepdims = None if x is None else S.dims_of(x), node.attributes.get_int("keepdims", 1)
    if dims is None or axes is None or keepdims:
        return False
    return sorted(int(a) % len(dims) for a in axes) == list(range(len(dims) - 1))


def _compensate(
    op: OpBuilder, scaled: _Scaled, node: ir.Node, index: int, following: ir.Node | None
) -> None:
    """Scale the result or the other operand of a reader that now reads the plain matrix."""
    y = node.outputs[0]
    uses = list(y.uses())
    op.position = node
    if is_op(node, "ReduceSum"):
        total = op.MatMul(op.Reshape(scaled.rows, [1, -1]), scaled.x)
        replace_value(y, op.Reshape(total, [scaled.width]), uses)
    elif _contracts_rows(node, index):
        other = node.inputs[1 - index]
        assert other is not None
        node.replace_input_with(1 - index, _scale_rows(op, other, scaled.rows))
    else:
        op.position = following
        sizes = [op.size(y, axis) for axis in range(op.rank(y) - 1)]
        rows = scaled.rows if len(sizes) == 1 else op.reshape(scaled.rows, [*sizes, 1])
        replace_value(y, _scale_rows(op, y, rows), uses)


def _scale_rows(op: OpBuilder, x: ir.Value, rows: ir.Value) -> ir.Value:
    """Return scaled rows of `x` in its type, multiplied in the type of the factors."""
    if x.dtype == rows.dtype:
        return op.Mul(x, rows)
    return op.Cast(op.Mul(op.Cast(x, to=rows.dtype), rows), to=x.dtype)


# Biases on CUDA.


def unfuse_gemm_bias(model: ir.Model, op: OpBuilder) -> int:
    """Add biases after large matmuls instead of inside them; return how many.

        before:  Gemm(a, b, bias)        MatMul(a, b) + bias
        after:   Gemm(a, b) + bias       Reshape(Reshape(MatMul(a, b)) + bias)

    CUDA's Gemm first broadcasts the bias over the whole result, in a kernel that takes half as long
    as the matmul. The addition alone is one fast pass. onnxruntime fuses a MatMul and the Add after
    it to a Gemm again, unless a reshape lies in between.
    """
    count = sum(_unfuse_bias(op, node) for node in nodes(op.graph, "Gemm"))
    return count + sum(_prevent_fusion(op, node) for node in nodes(op.graph, "Add"))


def _unfuse_bias(op: OpBuilder, node: ir.Node) -> int:
    a, b, bias = (*node.inputs, None)[:3]
    y = node.outputs[0]
    attributes = S.attributes_of(node, op.opset)
    if a is None or b is None or bias is None or attributes["beta"] != 1.0:
        return 0
    if _sizes_if_large(y) is None or not _has_element_per_column(bias, y):
        return 0
    uses = list(y.uses())
    op.position = node
    others = {key: attributes[key] for key in ("alpha", "transA", "transB")}
    replace_value(y, op.Add(op.Gemm(a, b, **others), bias), uses)
    return 1


def _prevent_fusion(op: OpBuilder, node: ir.Node) -> int:
    y = node.outputs[0]
    sizes = _sizes_if_large(y)
    for product, bias in (tuple(node.inputs), tuple(reversed(node.inputs))):
        matmul = None if product is None else product.producer()
        if product is None or bias is None or matmul is None or not is_op(matmul, "MatMul"):
            continue
        if sizes is None or not S.same_shape(product, y) or not _has_element_per_column(bias, y):
            continue
        uses = list(y.uses())
        op.position = node
        view = [1, *sizes] if len(sizes) == 2 else [-1, sizes[-1]]
        total = op.Add(op.Reshape(product, view), bias)
        replace_value(y, op.Reshape(total, sizes), uses)
        return 1
    return 0


def _sizes_if_large(y: ir.Value) -> list[int] | None:
    sizes = D.static_sizes(S.dims_of(y) or (None,))
    if sizes is None or len(sizes) < 2 or math.prod(sizes) < T.MEMORY_BOUND_ELEMENTS:
        return None
    return sizes


def _has_element_per_column(bias: ir.Value, y: ir.Value) -> bool:
    dims = S.dims_of(bias)
    return dims is not None and dims == (S.dims_of(y) or ())[-1:]
