"""The gradient of a normalisation by root mean squares, with the products that its weight's takes.

With ``n`` the normalised rows and ``g`` the gradient behind the weight ``w``, that of ``w`` sums
the products ``g n`` over the rows. The mean that the gradient of the input needs is one of the same
numbers: ``mean(g w n) = (g n) (w / m)`` for rows of ``m``. So one product with a column stands for
a pass over the matrix and a mean, and

    ``r + g w / s - n mean(g w n / s) = r + (g w - n c) / s``  with  ``c = (g n) (w / m)``.

Columns of all weights are made at once, in four nodes.
"""

from __future__ import annotations

import collections
import dataclasses

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.passes.fewer_nodes.mean_in_product import (
    averaged,
    own_producer,
    shares_of_weights,
    width_of,
)

_FEWEST = 3
"""Normalisations of one width from which on their columns, four nodes, are paid for.

One of the columns stands for the two nodes that means in the forward pass would take.
"""


@dataclasses.dataclass(frozen=True)
class _Slope:
    """``root = rest + d / s - n mean(d / s n)`` where ``d = g w`` and ``products = g n``."""

    root: ir.Node
    rest: ir.Value | None
    d: ir.Value
    s: ir.Value
    n: ir.Value
    g: ir.Value
    w: ir.Value
    products: ir.Node


def norm_slope(model: ir.Model, op: OpBuilder) -> int:
    """Write gradients of normalisations with one product each; return how many."""
    by_width: dict[int, list[_Slope]] = collections.defaultdict(list)
    for node in nodes(model.graph, "Sub"):
        slope = _slope(node)
        if slope is not None:
            by_width[width_of(slope.n) or 0].append(slope)
    changed = 0
    for width, slopes in by_width.items():
        if len(slopes) < _FEWEST:
            continue
        weights = list(dict.fromkeys(s.w for s in slopes))
        columns = shares_of_weights(op, weights, width)
        order = {node: i for i, node in enumerate(model.graph)}
        for root in [s.root for s in slopes]:
            slope = _slope(root)  # what is added may itself have been written anew
            if slope is not None:
                _rewrite(op, slope, columns[weights.index(slope.w)], order)
                changed += 1
    return changed


def _rewrite(op: OpBuilder, slope: _Slope, column: ir.Value, order: dict[ir.Node, int]) -> None:
    op.position = slope.root
    products = slope.products.outputs[0]
    if order[slope.products] > order[slope.root]:
        early = op.Mul(slope.g, slope.n)
        replace_value(products, early, list(products.uses()))
        products = early
    share = op.Gemm(products, column)
    y = slope.root.outputs[0]
    new = op.Div(op.Sub(slope.d, op.Mul(slope.n, share)), slope.s)
    new = new if slope.rest is None else op.Add(slope.rest, new)
    replace_value(y, new, list(y.uses()))


def _slope(root: ir.Node) -> _Slope | None:
    start, end = root.inputs
    product = own_producer(end, "Mul")
    if start is None or product is None:
        return None
    for mean, n in _orders(product):
        spread = averaged(mean)
        factors = own_producer(spread, "Mul")
        if n is None or factors is None or not S.same_shape(n, root.outputs[0]):
            continue
        for e, other in _orders(factors):
            if other is n and e is not None and e is not n:
                return _with_weight(root, start, e, n, factors)
    return None


def _with_weight(
    root: ir.Node, start: ir.Value, e: ir.Value, n: ir.Value, factors: ir.Node
) -> _Slope | None:
    """Return the parts where ``e = g w / s`` and ``n = x / s``, and ``g n`` is there already."""
    divided, normal = e.producer(), n.producer()
    if divided is None or normal is None or not is_op(divided, "Div") or not is_op(normal, "Div"):
        return None
    d, s = divided.inputs
    if s is None or s is not normal.inputs[1] or (S.dims_of(s) or ())[1:] != (1,):
        return None
    rest = _rest(root, start, e)
    readers = {factors, root if rest is None else start.producer()}
    if (rest is None and start is not e) or e.is_graph_output():
        return None
    weighted = own_producer(d, "Mul")
    if weighted is None or d is None or {use.node for use in e.uses()} != readers:
        return None
    for g, w in _orders(weighted):
        if g is None or w is None or not _is_trained(w, width_of(n)) or not S.same_shape(g, n):
            continue
        for node, _ in g.uses():
            if is_op(node, "Mul") and set(node.inputs) == {g, n} and node.graph is root.graph:
                return _Slope(root, rest, d, s, n, g, w, node)
    return None


def _rest(root: ir.Node, start: ir.Value, e: ir.Value) -> ir.Value | None:
    """Return what is added to ``e``, where it is of the same shape."""
    added = own_producer(start, "Add")
    if added is None or e not in added.inputs:
        return None
    rest = added.inputs[1] if added.inputs[0] is e else added.inputs[0]
    same = rest is not None and rest is not e and S.same_shape(rest, root.outputs[0])
    return rest if same else None


def _is_trained(w: ir.Value, width: int | None) -> bool:
    """Return whether a vector comes into the graph: of what it knows, a runtime packs columns."""
    return w.is_graph_input() and S.constant_of(w) is None and S.dims_of(w) == (width,)


def _orders(node: ir.Node) -> tuple[tuple[ir.Value | None, ir.Value | None], ...]:
    a, b = node.inputs
    return (a, b), (b, a)


__all__ = ["norm_slope"]
