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

_FEWEST = 3
"""Means from which on a column, two or three nodes, is paid for."""


def mean_in_product(model: ir.Model, op: OpBuilder) -> int:
    """Let products take means of the rows of matrices and what is added; return how many."""
    means = [(node, way) for node in nodes(model.graph, "Add") if (way := _shifted(node))]
    columns = _Columns(op)
    if not columns.possible or len(means) < _FEWEST:
        return 0
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

    @property
    def possible(self) -> bool:
        """Whether there is a size that only a run tells."""
        return self._told is not None

    def of(self, q: ir.Value) -> ir.Value:
        """Return ``1 / n`` as ``[n, 1]`` for a matrix of width ``n``."""
        op, width = self._op, _width(q)
        assert width is not None
        assert self._told is not None
        if width not in self._known:
            op.position = next(iter(op.graph))
            x, axis = self._told
            one = op.Pow(op.Shape(x, start=axis, end=axis + 1), op.const([0]))
            column = op.Expand(op.const([[1.0 / width]] * width, q.dtype), one)
            S.set_dims(column, [width, 1])
            self._known[width] = column
        return self._known[width]


def _shifted(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Return ``q`` and the number of ``mean(q) + number``."""
    for x, number in (tuple(node.inputs), tuple(reversed(node.inputs))):
        q = _averaged(x)
        if q is None or number is None or not S.is_own_constant(number):
            continue
        array = S.constant_of(number)
        if array is not None and array.size == 1 and array.ndim <= 1:
            return q, number
    return None


def _averaged(x: ir.Value | None) -> ir.Value | None:
    """Return the matrix that ``x`` has the means of rows of, if only one node reads them."""
    node = None if x is None else x.producer()
    if x is None or node is None or not is_op(node, "ReduceMean") or x.dtype != ir.DataType.FLOAT:
        return None
    if len(x.uses()) != 1 or x.is_graph_output():
        return None
    q, axes = (*node.inputs, None)[:2]
    sizes, keep = S.constant_of(axes), node.attributes.get("keepdims")
    if _width(q) is None or sizes is None or sizes.size != 1 or int(sizes.item()) not in (-1, 1):
        return None
    return q if keep is None or keep.as_int() == 1 else None


def _width(q: ir.Value | None) -> int | None:
    """Return the width of a matrix, if it is known and not nothing."""
    dims = () if q is None else S.dims_of(q) or ()
    return dims[1] if len(dims) == 2 and isinstance(dims[1], int) and dims[1] > 0 else None


__all__ = ["mean_in_product"]
