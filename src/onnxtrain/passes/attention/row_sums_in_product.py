"""Numbers that are subtracted from the rows of a product, inside the product.

``A B - r = [A, r] [B; -1]``: the gradient of attention's softmax takes a row's sum from products
of short vectors, ``dY V^T - r``. With one column more there is no pass over all scores for that.
Eight columns keep rows whole words; those of ``B`` that are not needed are zero.

In float32 a GPU may round operands to 10 bits. So ``r`` is given in two parts: what is left of 8
bits, and the rest. In 16 bits ``r`` is a number of that type already, and the difference is rounded
once, not twice.
"""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.simplify.redundant import remove_dead_nodes

_WORD = 8


def row_sums_in_product(model: ir.Model, op: OpBuilder) -> int:
    """Subtract from rows of products inside them; return how often."""
    remove_dead_nodes(op.graph)  # what earlier passes left counts as no reader
    changed = 0
    for node in nodes(op.graph, "Sub"):
        difference = _difference(node)
        if difference is not None:
            op.position = node
            y = node.outputs[0]
            replace_value(y, _product(op, difference), list(y.uses()))
            changed += 1
    return changed


@dataclasses.dataclass(frozen=True)
class _Difference:
    """``a @ b - rows``; ``lead`` are the axes that a product is made for each of."""

    a: ir.Value
    b: ir.Value
    rows: ir.Value
    lead: list[int]


def _difference(node: ir.Node) -> _Difference | None:
    whole, rows = node.inputs
    product = None if whole is None else whole.producer()
    if whole is None or rows is None or product is None or not is_op(product, "MatMul"):
        return None
    if len(whole.uses()) != 1 or whole.is_graph_output() or product.graph is not node.graph:
        return None
    if whole.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        return None
    a, b = product.inputs
    sizes = [D.numbers(S.dims_of(x)) for x in (a, b, rows) if x is not None]
    if a is None or b is None or len(sizes) != 3 or node.outputs[0].is_graph_output():
        return None
    left, right, each = sizes
    if left is None or right is None or each is None or len(left) < 3:
        return None
    *lead, height, inner = left
    if each != [*lead, height, 1] or right[:-1] != [*lead, inner]:
        return None
    columns = right[-1]
    if math.prod([*lead, height, columns]) < T.FLAT_ELEMENTS:
        return None
    return _Difference(a, b, rows, lead) if columns >= T.SUMMED_COLUMNS * inner else None


def _product(op: OpBuilder, it: _Difference) -> ir.Value:
    parts = [it.rows]
    if it.rows.dtype == ir.DataType.FLOAT:
        coarse = op.Cast(op.Cast(it.rows, to=ir.DataType.BFLOAT16), to=ir.DataType.FLOAT)
        parts = [coarse, op.Sub(it.rows, coarse)]
    signs = [-1.0] * len(parts) + [0.0] * (_WORD - len(parts))
    fill = [parts[-1]] * (_WORD - len(parts))  # meets zeros
    a = op.Concat(it.a, *parts, *fill, axis=-1)
    return op.MatMul(a, _with_rows(op, it, signs))


def _with_rows(op: OpBuilder, it: _Difference, signs: list[float]) -> ir.Value:
    """Return ``b`` with rows of equal numbers below it; what turns it stays next to the product."""
    turn = it.b.producer()
    columns = op.dims(it.b)[-1]
    rank = len(it.lead) + 2
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    perm = None if turn is None or not is_op(turn, "Transpose") else turn.attributes.get("perm")
    if turn is not None and perm is not None and list(perm.as_ints()) == swapped:
        extra = op.Expand(op.const(signs, it.b.dtype), [*it.lead, columns, _WORD])
        return op.Transpose(op.Concat(turn.inputs[0], extra, axis=-1), perm=swapped)
    extra = op.Expand(op.const([[s] for s in signs], it.b.dtype), [*it.lead, _WORD, columns])
    return op.Concat(it.b, extra, axis=-2)


__all__ = ["row_sums_in_product"]
