"""The slope of ``x sigmoid(x)`` in four nodes instead of six, of a gate ``x sigmoid(x) u`` too.

With ``s = sigmoid(x)`` and ``a = x s``: ``g s + (g x) (s (1 - s)) = g (s + a (1 - s))``. Neither
form overflows where the result does not: ``s (1 - s)`` and ``a (1 - s)`` vanish where ``x`` is far
from zero.

A gated layer has ``h = a u``, and ``g = d u``. Then ``g (s + a (1 - s)) = d (h + s (u - h))``, and
``d u`` is not needed. Its rounding grows with ``h / u = a``, as that of ``h`` itself.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import is_op, nodes

_WIDE = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE})


def swish_slope(model: ir.Model, op: OpBuilder) -> int:
    """Join the two ways through a product with its own sigmoid; return how often."""
    changed, position = 0, op.position
    order = {node: i for i, node in enumerate(model.graph)}
    for node in nodes(model.graph, "Sigmoid"):
        changed += sum(_join(op, node, use.node, order) for use in list(node.outputs[0].uses()))
    op.position = position
    return changed


def _join(op: OpBuilder, sigmoid: ir.Node, reader: ir.Node, order: dict[ir.Node, int]) -> int:
    """Replace the sum that ``reader`` is a term of, if it is the gradient of ``x sigmoid(x)``."""
    x, s = sigmoid.inputs[0], sigmoid.outputs[0]
    g = _other(reader, s)
    if x is None or g is None or _plain(g) is _plain(x) or g is s:
        return 0
    a = next((n.outputs[0] for n, _ in s.uses() if _plain(_other(n, s)) is _plain(x)), None)
    total = _only_reader(reader.outputs[0])
    if a is None or total is None or not is_op(total, "Add"):
        return 0
    term = next((v for v in total.inputs if v is not reader.outputs[0]), None)
    product = None if term is None or _only_reader(term) is not total else term.producer()
    if product is None or not _is_way_through_sigmoid(product, g, x, s):
        return 0
    y = total.outputs[0]
    uses = list(y.uses())
    op.position = total
    gate = _gate(g, a, total, order)
    if gate is None:
        slope = op.Add(s, op.Mul(a, op.Sub(op.const(1.0, x.dtype), s)))
    else:
        g, u, h = gate
        slope = op.Add(h, op.Mul(s, op.Sub(u, h)))
    replace_value(y, op.Mul(g, slope), uses)
    return 1


def _gate(
    g: ir.Value, a: ir.Value, total: ir.Node, order: dict[ir.Node, int]
) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """Return ``d``, ``u`` and ``h`` where ``g = d u`` is read by nothing else, and ``h = a u``."""
    product = g.producer()
    if product not in order or not is_op(product, "Mul"):
        return None
    if g.dtype not in _WIDE or len(g.uses()) != 2 or g.is_graph_output():
        return None
    for d, u in (tuple(product.inputs), tuple(reversed(product.inputs))):
        if d is None or u is None or not (S.same_shape(d, g) and S.same_shape(u, g)):
            continue
        for node, _ in a.uses():
            if _other(node, a) is u and order.get(node, len(order)) < order[product]:
                return (d, u, node.outputs[0]) if total.graph is node.graph else None
    return None


def _is_way_through_sigmoid(node: ir.Node, g: ir.Value, x: ir.Value, s: ir.Value) -> bool:
    """Return whether a node gives ``(g x) (s (1 - s))``."""
    if not is_op(node, "Mul"):
        return False
    for first, second in (tuple(node.inputs), tuple(reversed(node.inputs))):
        upper, slope = (None if v is None else v.producer() for v in (first, second))
        if upper is None or slope is None or _plain(_other(upper, g)) is not _plain(x):
            continue
        rest = _other(slope, s)
        lower = None if rest is None else rest.producer()
        if lower is not None and is_op(lower, "Sub") and lower.inputs[1] is s:
            one = S.constant_of(lower.inputs[0])
            if one is not None and one.size == 1 and float(one.item()) == 1.0:
                return True
    return False


def _other(node: ir.Node, x: ir.Value) -> ir.Value | None:
    """Return what a product of two multiplies ``x`` by."""
    if not is_op(node, "Mul") or x not in node.inputs:
        return None
    return node.inputs[1] if node.inputs[0] is x else node.inputs[0]


def _plain(x: ir.Value | None) -> ir.Value | None:
    """Return ``x`` of ``Where(c, x, x)``, which holds back what is computed again."""
    node = None if x is None else x.producer()
    if node is None or not is_op(node, "Where") or node.inputs[1] is not node.inputs[2]:
        return x
    return _plain(node.inputs[1])


def _only_reader(x: ir.Value) -> ir.Node | None:
    uses = list(x.uses())
    return uses[0].node if len(uses) == 1 and not x.is_graph_output() else None


__all__ = ["swish_slope"]
