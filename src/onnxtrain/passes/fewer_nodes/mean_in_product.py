"""A mean of rows and the number that is added to it as one product with a column.

With ``e`` a column of ``1 / n``: ``mean(q) + c = q e + c`` is one Gemm. That is the mean square of
a normalisation with its epsilon.

The runtime would pack a column that it knows for products with many columns, and multiply zeros.
So the column is spread to a size that only a run tells: 1, as the zeroth power of another.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import is_op, nodes

_AVERAGES = "column of means"
_FEWEST = 3
"""Means from which on a column, two or three nodes, is paid for."""


def mean_in_product(model: ir.Model, op: OpBuilder) -> int:
    """Let products take means of the rows of matrices and what is added; return how many."""
    means = [(node, way) for node in nodes(model.graph, "Add") if (way := _shifted(node))]
    columns = _Columns(op)
    if len(means) < _FEWEST:
        return 0
    means = [m for m in means if columns.possible(m[1][0])]
    for node, (q, number) in means:
        y, column = node.outputs[0], columns.of(q)
        op.position = node
        replace_value(y, op.Gemm(q, column, number), list(y.uses()))
    return len(means)


class _Columns:
    """Columns of one number each, made in front of all that reads them."""

    def __init__(self, op: OpBuilder) -> None:
        self._op = op
        self._known: dict[int, ir.Value] = {}
        self._told = next(
            (
                (x, axis)
                for x in op.graph.inputs
                for axis, d in enumerate(S.dims_of(x) or ())
                if isinstance(d, str)
            ),
            None,
        )

    def possible(self, q: ir.Value) -> bool:
        """Return whether there is a column, or a size that only a run tells."""
        width = width_of(q)
        if width is not None and width not in self._known:
            made = _column_of_means(self._op.graph, width)
            if made is not None:
                self._known[width] = made
        return width in self._known or self._told is not None

    def of(self, q: ir.Value) -> ir.Value:
        """Return ``1 / n`` as ``[n, 1]`` for a matrix of width ``n``."""
        op, width = self._op, width_of(q)
        assert width is not None
        if width not in self._known:
            assert self._told is not None
            op.position = next(iter(op.graph))
            x, axis = self._told
            one = op.Pow(op.Shape(x, start=axis, end=axis + 1), op.const([0]))
            # Of a size that nobody is told, so that nothing finds it to be the constant.
            self._known[width] = op.Expand(op.const([[1.0 / width]] * width, q.dtype), one)
        return self._known[width]


def _shifted(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Return ``q`` and the number of ``mean(q) + number``."""
    for x, number in (tuple(node.inputs), tuple(reversed(node.inputs))):
        q = averaged(x)
        if q is None or number is None or not S.is_own_constant(number):
            continue
        array = S.constant_of(number)
        if array is not None and array.size == 1 and array.ndim <= 1:
            return q, number
    return None


def averaged(x: ir.Value | None) -> ir.Value | None:
    """Return the matrix that ``x`` has the means of rows of, if only one node reads them."""
    node = own_producer(x, "ReduceMean")
    if x is None or node is None or x.dtype != ir.DataType.FLOAT:
        return None
    q, axes = (*node.inputs, None)[:2]
    sizes, keep = S.constant_of(axes), node.attributes.get("keepdims")
    if width_of(q) is None or sizes is None or sizes.size != 1 or int(sizes.item()) not in (-1, 1):
        return None
    return q if keep is None or keep.as_int() == 1 else None


def width_of(q: ir.Value | None) -> int | None:
    """Return the width of a matrix, if it is known and not nothing."""
    dims = () if q is None else S.dims_of(q) or ()
    return dims[1] if len(dims) == 2 and isinstance(dims[1], int) and dims[1] > 0 else None


def own_producer(x: ir.Value | None, kind: str) -> ir.Node | None:
    """Return the node of a kind that makes a value which only one other reads."""
    node = None if x is None else x.producer()
    if x is None or node is None or not is_op(node, kind):
        return None
    return node if len(x.uses()) == 1 and not x.is_graph_output() else None


def shares_of_weights(op: OpBuilder, weights: list[ir.Value], width: int) -> list[ir.Value]:
    """Return ``w / n`` as ``[n, 1]`` for vectors of one width ``n`` that inputs of the graph are.

    They are made together in front of everything, and ``1 / n`` as a further column with them.
    """
    op.position = next(iter(op.graph))
    ones = op.const([1.0] * width, weights[0].dtype)
    shares = op.Mul(op.Concat(*weights, ones, axis=0), 1.0 / width)
    sizes = [width] * (len(weights) + 1)
    *columns, last = op.Split(op.Reshape(shares, [-1, 1]), sizes, axis=0, _outputs=len(sizes))
    last.meta[_AVERAGES] = True
    return columns


def _column_of_means(graph: ir.Graph, width: int) -> ir.Value | None:
    """Return the column of ``1 / n`` that :func:`shares_of_weights` has made."""
    for node in graph:
        y = node.outputs[-1] if node.outputs else None
        if y is not None and y.meta.get(_AVERAGES) and S.dims_of(y) == (width, 1):
            return y
    return None


__all__ = ["averaged", "mean_in_product", "own_producer", "shares_of_weights", "width_of"]
