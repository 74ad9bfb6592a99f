"""Scales of rows, moved behind the matrix products that read the scaled matrix.

The gradient of a loss at the scores ``[rows, classes]`` is a matrix times one number for each row:
1 / count, or the weight of the label. Products commute with that: ``(e A) W = e (A W)`` and
``(e A)^T X = A^T (e X)``. With many classes ``A W`` and ``X`` are much smaller than ``A``, and a
pass over ``A`` is saved; a sum over the rows becomes the product ``e^T A``.

Products in bfloat16 read ``A`` rounded. It may be rounded before it is scaled, since that type has
the range of float32; the scales themselves are not rounded.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import is_op, nodes


def scale_after_matmul(model: ir.Model, op: OpBuilder) -> int:
    """Move scales of the rows of wide matrices behind products; return how many moved."""
    order = list(op.graph)
    following = dict(zip(order, [*order[1:], None], strict=True))
    moved = 0
    for node in nodes(op.graph, "Mul"):
        scaled = _scaled(node)
        readers = None if scaled is None else _readers(scaled, node.outputs[0], op.graph)
        if scaled is None or not readers:
            continue
        node.outputs[0].replace_all_uses_with(scaled.x)
        for reader, index in readers:
            _compensate(op, scaled, reader, index, following[reader])
        moved += 1
    return moved


@dataclasses.dataclass(frozen=True)
class _Scaled:
    """A matrix ``x`` of this width and one number for each of its rows, ``[rows, 1]``."""

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
        dims, each = S.dims_of(x), S.dims_of(e)
        if dims is None or each is None or len(dims) != 2 or len(each) != 2 or each[1] != 1:
            continue
        rows, width = dims
        if not isinstance(width, int) or width < T.SCALED_COLUMNS:
            continue
        if rows is not None and each[0] == rows:
            return _Scaled(x, e, width)
    return None


def _readers(scaled: _Scaled, y: ir.Value, graph: ir.Graph) -> list[tuple[ir.Node, int]] | None:
    """Return the products and sums that read ``y`` or a view of it; ``None`` if others do."""
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
            inner = _readers(scaled, node.outputs[0], graph)
            if inner is None:
                return None
            readers += inner
        elif _fits(scaled, node, index):
            readers.append((node, index))
        else:
            return None
    return readers


def _is_view(node: ir.Node, y: ir.Value) -> bool:
    """Return whether a node gives the same numbers, if rounded: in another shape or type."""
    to = node.outputs[0].dtype
    rounded = y.dtype == ir.DataType.FLOAT and to == ir.DataType.BFLOAT16
    return is_op(node, "Reshape") or (is_op(node, "Cast") and rounded)


def _fits(scaled: _Scaled, node: ir.Node, index: int) -> bool:
    if is_op(node, "ReduceSum"):
        return index == 0 and _over_rows(node)
    if not is_op(node, "MatMul", "Gemm") or index > 1:
        return False
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        return False
    other = node.inputs[1 - index]
    dims = None if other is None else S.dims_of(other)
    if dims is None or len(dims) != 2:
        return False
    turned = _turned(node)
    if _sums_rows(node, index):  # [rows, k]
        return turned[0] and not turned[1] and _less(dims[1], scaled)
    return index == 0 and not turned[0] and _less(dims[0 if turned[1] else 1], scaled)


def _less(size: object, scaled: _Scaled) -> bool:
    return isinstance(size, int) and T.SCALED_COLUMNS_PER_RESULT * size <= scaled.width


def _turned(node: ir.Node) -> list[bool]:
    flags = [node.attributes.get(f) for f in ("transA", "transB")]
    return [f is not None and f.as_int() == 1 for f in flags]


def _sums_rows(node: ir.Node, index: int) -> bool:
    """Return whether the product's inner axis is that of the rows of input ``index``."""
    turned = _turned(node)
    return turned[0] if index == 0 else not turned[1]


def _over_rows(node: ir.Node) -> bool:
    """Return whether a sum leaves nothing but the columns."""
    x, axes = node.inputs[0], S.constant_of((*node.inputs, None)[1])
    dims, keep = None if x is None else S.dims_of(x), node.attributes.get("keepdims")
    if dims is None or axes is None or keep is None or keep.as_int():
        return False
    return sorted(int(a) % len(dims) for a in axes) == list(range(len(dims) - 1))


def _compensate(
    op: OpBuilder, scaled: _Scaled, node: ir.Node, index: int, following: ir.Node | None
) -> None:
    """Scale elsewhere what a reader of the plain matrix computes."""
    y = node.outputs[0]
    uses = list(y.uses())
    op.position = node
    if is_op(node, "ReduceSum"):
        total = op.MatMul(op.Reshape(scaled.rows, [1, -1]), scaled.x)
        replace_value(y, op.Reshape(total, [scaled.width]), uses)
    elif _sums_rows(node, index):
        other = node.inputs[1 - index]
        assert other is not None
        node.replace_input_with(1 - index, _times(op, other, scaled.rows))
    else:
        op.position = following
        sizes = [op.size(y, axis) for axis in range(op.rank(y) - 1)]
        rows = scaled.rows if len(sizes) == 1 else op.reshape(scaled.rows, [*sizes, 1])
        replace_value(y, _times(op, y, rows), uses)


def _times(op: OpBuilder, x: ir.Value, rows: ir.Value) -> ir.Value:
    """Return scaled rows of ``x`` in its type, multiplied in that of the scales."""
    if x.dtype == rows.dtype:
        return op.Mul(x, rows)
    return op.Cast(op.Mul(op.Cast(x, to=rows.dtype), rows), to=x.dtype)
