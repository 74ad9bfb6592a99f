"""Attention over long sequences in parts of the batch, so that few scores are there at a time.

Scores of a long sequence are far larger than all that they are made of. One part after the other,
each a few rows of the batch, they take the memory of one part, forward and backward; what is left
of them for the backward pass is computed again there, by ``make_again``.
"""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.copy_nodes import copy_node
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.memory.scores import Scores, read_by, scores_of
from onnxtrain.graph.nodes import is_op, nodes


def long_attention(model: ir.Model, op: OpBuilder) -> int:
    """Cut attention with many scores into parts, in place; return how often."""
    count = 0
    for node in nodes(model.graph, "Softmax"):
        long = _long(node)
        if long is not None:
            _cut(op, long)
            count += 1
    return count


@dataclasses.dataclass(frozen=True)
class _Long:
    """Attention whose scores are many: how they are made, what reads them, and where to cut."""

    scores: Scores
    product: ir.Node
    axis: int
    """Counted from the end."""
    parts: int

    @property
    def sources(self) -> list[ir.Value]:
        """All that differs from part to part, or may."""
        values = self.product.inputs[1]
        assert values is not None
        return [*self.scores.operands, values]


def _long(softmax: ir.Node) -> _Long | None:
    p, scores = softmax.outputs[0], scores_of(softmax)
    uses = read_by(p)
    if scores is None or not scores.is_long or len(uses) != 1 or p.is_graph_output():
        return None
    product, place = uses[0]
    if not is_op(product, "MatMul") or place != 0 or product.graph is not softmax.graph:
        return None
    values = product.inputs[1]
    if product.outputs[0].is_graph_output() or values is None or p.dtype is None:
        return None
    dims = S.dims_of(p) or ()
    sizes = [d for d in dims if isinstance(d, int)]
    if len(sizes) != len(dims) or len(S.dims_of(values) or ()) != len(dims):
        return None
    # Rows of the batch; of a single one, its heads.
    axis = next((i for i, d in enumerate(sizes[:-2]) if d > 1), None)
    if axis is None:
        return None
    parts = _parts(sizes[axis], math.prod(sizes) * p.dtype.bitwidth // 8)
    back = axis - len(dims)
    main = [scores.query, scores.key, values]
    if parts == 1 or any((S.dims_of(x) or ())[axis] != sizes[axis] for x in main):
        return None
    if any(_size(x, back) not in (1, sizes[axis]) for x in scores.operands):
        return None
    return _Long(scores, product, back, parts)


def _parts(rows: int, size: int) -> int:
    """Return the fewest equal parts of some rows that are small enough.

    Gradients of queries, keys and values of all parts are joined by one node.
    """
    counts = [n for n in range(1, T.CAPTURED_CONCAT_INPUTS // 3 + 1) if rows % n == 0]
    return next((n for n in counts if size <= n * T.SCORES_BYTES), counts[-1])


def _size(x: ir.Value, axis: int) -> int | None:
    """Return the size of an axis; one that is not there counts as one."""
    dims = S.dims_of(x)
    if dims is None:
        return None
    size = dims[axis] if -axis <= len(dims) else 1
    return size if isinstance(size, int) else None


def _cut(op: OpBuilder, long: _Long) -> None:
    op.position = product = long.product
    cut: dict[ir.Value, tuple[ir.Value, ...]] = {}
    for x in dict.fromkeys(long.sources):
        size = _size(x, long.axis)
        if size is not None and size > 1:
            sizes = op.const([size // long.parts] * long.parts)
            axis = long.axis + len(S.dims_of(x) or ())
            cut[x] = op.Split(x, sizes, axis=axis, _outputs=long.parts)
    results = []
    for i in range(long.parts):
        mine = {x: parts[i] for x, parts in cut.items()}
        for node in (*long.scores.nodes, product):
            y = copy_node(op, node, [x if x is None else mine.get(x, x) for x in node.inputs])
            mine[node.outputs[0]] = y
        results.append(mine[product.outputs[0]])
    y = product.outputs[0]
    axis = long.axis + len(S.dims_of(y) or ())
    replace_value(y, op.Concat(*results, axis=axis), list(y.uses()))


__all__ = ["long_attention"]
