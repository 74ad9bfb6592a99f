"""Three or more tensors added by one operator: ``(a + b) + c = Sum(a, b, c)``.

Gradients of what several layers read, as queries, keys, values and the way around them do, are
added as they come. Each addition reads two tensors and writes one. ``Sum`` reads each tensor once
and writes once, in one kernel, and adds in the same order. What is added early waits for the last
one, so additions that lie far apart stay as they are: shared weights would wait for all layers.
In 16 bits the kernel takes longer than the additions.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import is_op, nodes

_FEWEST, _MOST = 3, 8
"""Tensors of one ``Sum``: fewer are an addition, more are a further kernel."""
_SPAN = 200
"""Nodes between the first addition and the last, about a block of a transformer."""


def sums_at_once(model: ir.Model, op: OpBuilder) -> int:
    """Write chains of additions of tensors of one shape as sums, in place; return how many."""
    places = {node: i for i, node in enumerate(op.graph)}
    taken: set[ir.Node] = set()
    count = 0
    for node in reversed(nodes(op.graph, "Add")):
        terms, inner = _chain(node, places)
        if node in taken or len(terms) < _FEWEST:
            continue
        op.position, y = node, node.outputs[0]
        replace_value(y, op.Sum(*terms), list(y.uses()))
        taken |= inner
        count += 1
    return count


def _chain(node: ir.Node, places: dict[ir.Node, int]) -> tuple[list[ir.Value], set[ir.Node]]:
    """Return what a chain of additions adds, in its order, and the additions in front of it."""
    terms, inner = _same(node), set[ir.Node]()
    first, i = places[node] - _SPAN, 0
    while i < len(terms):
        made = _inner(terms[i], node)
        if made is None or places[made] < first or len(terms) == _MOST:
            i += 1
        else:
            terms[i : i + 1] = _same(made)
            inner.add(made)
    return terms, inner


def _inner(x: ir.Value, node: ir.Node) -> ir.Node | None:
    """Return the addition that makes a term which nothing else reads."""
    made = x.producer()
    if made is None or not is_op(made, "Add") or made.graph is not node.graph:
        return None
    return made if len(x.uses()) == 1 and not x.is_graph_output() and _same(made) else None


def _same(node: ir.Node) -> list[ir.Value]:
    """Return the two terms of an addition in float32, if neither is broadcast."""
    y, terms = node.outputs[0], [x for x in node.inputs if x is not None]
    fits = y.dtype == ir.DataType.FLOAT and all(S.same_shape(x, y) for x in terms)
    return terms if fits and S.rank_of(y) > 0 else []


__all__ = ["sums_at_once"]
