"""``1 / (1 + exp(u))`` written as such: the operator of that name does not overflow.

Where ``exp(u)`` is infinite the quotient is 0 and so is its slope, but the gradients of the parts
are ``0 * inf``.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_op, nodes


def name_sigmoids(model: ir.Model) -> list[str]:
    """Replace quotients that are a logistic function by Sigmoid, in place; say how many."""
    count = 0
    for node in nodes(model.graph, "Reciprocal", "Div"):
        u = _exponent(node)
        if u is None:
            continue
        _replace(model.graph, node, u)
        count += 1
    return [f"{count} logistic function(s) that were written out became Sigmoid"] if count else []


def _exponent(node: ir.Node) -> ir.Value | None:
    """Return ``u`` where a node gives ``1 / (1 + exp(u))``."""
    if is_op(node, "Div") and not _is_number(node.inputs[0], 1.0):
        return None
    below = _producer(node.inputs[-1], "Add")
    if below is None:
        return None
    for one, other in (below.inputs, reversed(below.inputs)):
        power = _producer(other, "Exp")
        if power is not None and _is_number(one, 1.0):
            return power.inputs[0]
    return None


def _replace(graph: ir.Graph, node: ir.Node, u: ir.Value) -> None:
    old = node.outputs[0]
    negation = u.producer()
    x = None if negation is None else _negated(negation)
    if x is None:
        minus = ir.node("Neg", [u])
        x = minus.outputs[0]
        x.name, x.type, x.shape = f"{old.name}.negated", u.type, u.shape
        graph.insert_before(node, minus)
    sigmoid = ir.node("Sigmoid", [x], name=node.name)
    graph.insert_before(node, sigmoid)
    new = sigmoid.outputs[0]
    new.name, new.type, new.shape = old.name, old.type, old.shape
    old.name = f"{old.name}.replaced"
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _negated(node: ir.Node) -> ir.Value | None:
    """Return ``x`` where a node gives ``-x``."""
    if is_op(node, "Neg"):
        return node.inputs[0]
    if is_op(node, "Mul"):
        for number, x in (node.inputs, reversed(node.inputs)):
            if _is_number(number, -1.0):
                return x
    return None


def _producer(x: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if x is None else x.producer()
    return node if node is not None and is_op(node, op_type) else None


def _is_number(x: ir.Value | None, number: float) -> bool:
    """Return whether a value is a constant of no axes, which broadcasts to nothing else."""
    if x is None or x.const_value is None or x.const_value.size != 1 or x.is_graph_input():
        return False
    array = S.constant_of(x)
    return array is not None and array.ndim == 0 and float(array) == number
