"""The factor of attention scores inside the tables that queries are rotated by.

A rotation is linear: ``c R(x) = R(x)`` with the tables ``c cos`` and ``c sin``, which all layers
share. Packed queries and keys are cut apart in front of the rotation instead of behind it, so that
only queries are multiplied; their gradients come back the same way. One node and one pass over the
queries less in each direction.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.simplify.redundant import remove_dead_nodes

_INPUTS = 3  # what is rotated, cosines and sines
_VIEWS = ("Reshape", "Squeeze", "Unsqueeze")


def scale_in_rotation(model: ir.Model, op: OpBuilder) -> int:
    """Multiply tables instead of what they rotate; return for how many rotations."""
    # With tables for every token, as `rotary_operator` writes them: no positions, nothing set.
    every = nodes(model.graph, "RotaryEmbedding")
    rotations = [n for n in every if len(n.inputs) == _INPUTS and not n.attributes]
    if rotations:
        remove_dead_nodes(model.graph)  # what rotations were made of reads the same values
    return sum(_alone(op, n) or _cut_before(op, n) or _join_behind(op, n) for n in rotations)


@dataclasses.dataclass(frozen=True)
class _Factor:
    """A node ``c x``, where ``x`` is a view of some value that nothing else reads."""

    node: ir.Node
    x: ir.Value
    number: ir.Value


def _alone(op: OpBuilder, rotation: ir.Node) -> int:
    """``c R(x)`` or ``R(c x)``."""
    x, y = rotation.inputs[0], rotation.outputs[0]
    before, behind = _factor_behind(x), _factor_of(y)
    factor = before or behind
    if x is None or factor is None:
        return 0
    op.position = rotation
    x = factor.x if x is factor.node.outputs[0] else x
    _leave_out(factor)
    replace_value(y, _rotated(op, rotation, x, factor), list(y.uses()))
    return 1


def _cut_before(op: OpBuilder, rotation: ir.Node) -> int:
    """``a, b = Split(R(x))`` and ``c a``, where ``x`` is itself a part of something."""
    around = _around(rotation, "Split")
    if around is None:
        return 0
    x, outer, inner = around
    sizes, parts = _sizes(outer), _sizes(inner)
    if sizes is None or parts is None or len(parts) != 2:
        return 0
    factors = [_factor_of(part) for part in inner.outputs]
    if not any(factors):
        return 0
    at = outer.outputs.index(x)
    op.position = outer
    every = [*sizes[:at], *parts, *sizes[at + 1 :]]
    cut = op.Split(outer.inputs[0], every, axis=1, _outputs=len(every))
    for old, new in zip(
        [*outer.outputs[:at], *outer.outputs[at + 1 :]], [*cut[:at], *cut[at + 2 :]], strict=True
    ):
        replace_value(old, new, list(old.uses()))
    op.position = rotation
    for part, new, factor in zip(inner.outputs, cut[at : at + 2], factors, strict=True):
        new.shape = part.shape
        replace_value(part, _rotated(op, rotation, new, factor), list(part.uses()))
        if factor is not None:
            _leave_out(factor)
    return 1


def _join_behind(op: OpBuilder, rotation: ir.Node) -> int:
    """``Concat(R(Concat(c a, b)), ...)``."""
    around = _around(rotation, "Concat")
    if around is None:
        return 0
    _, inner, outer = around
    if _axis(inner) != 1 or _axis(outer) != 1 or len(inner.inputs) != 2:
        return 0
    if None in inner.inputs or None in outer.inputs:
        return 0
    factors = [_factor_behind(part) for part in inner.inputs]
    if not any(factors):
        return 0
    op.position = rotation
    turned = []
    for part, factor in zip(inner.inputs, factors, strict=True):
        assert part is not None
        if factor is not None:
            part = factor.x if part is factor.node.outputs[0] else part
            _leave_out(factor)
        turned.append(_rotated(op, rotation, part, factor))
    at = outer.inputs.index(rotation.outputs[0])
    joined = [*outer.inputs[:at], *turned, *outer.inputs[at + 1 :]]
    op.position = outer
    whole = outer.outputs[0]
    replace_value(whole, op.Concat(*joined, axis=1), list(whole.uses()))
    return 1


def _leave_out(factor: _Factor) -> None:
    result = factor.node.outputs[0]
    replace_value(result, factor.x, list(result.uses()))


def _rotated(op: OpBuilder, rotation: ir.Node, x: ir.Value, factor: _Factor | None) -> ir.Value:
    tables = rotation.inputs[1:3]
    if factor is not None:
        tables = [op.Mul(t, factor.number) for t in tables]
    y = op.RotaryEmbedding(x, *tables)
    y.shape = x.shape
    return y


def _factor_of(x: ir.Value) -> _Factor | None:
    """Return the node that multiplies a view of ``x`` by a number, if nothing else reads it."""
    node = _only_reader(x)
    while node is not None and is_op(node, *_VIEWS) and node.inputs[0] is x:
        x = node.outputs[0]
        node = _only_reader(x)
    return None if node is None else _factor(node, x)


def _factor_behind(x: ir.Value | None) -> _Factor | None:
    """Return the node whose product with a number ``x`` is a view of."""
    while x is not None and _only_reader(x) is not None:
        node = x.producer()
        if node is None:
            return None
        if not is_op(node, *_VIEWS):
            return next((f for v in node.inputs if (f := _factor(node, v)) is not None), None)
        x = node.inputs[0]
    return None


def _factor(node: ir.Node, x: ir.Value | None) -> _Factor | None:
    if not is_op(node, "Mul") or x is None or x not in node.inputs:
        return None
    number = node.inputs[1] if node.inputs[0] is x else node.inputs[0]
    if number is None or not S.is_own_constant(number):
        return None
    array = S.constant_of(number)
    if array is None or array.size != 1:
        return None
    y = node.outputs[0]
    return _Factor(node, x, number) if S.same_shape(x, y) and not y.is_graph_output() else None


def _around(rotation: ir.Node, kind: str) -> tuple[ir.Value, ir.Node, ir.Node] | None:
    """Return what is rotated, and the nodes of a kind that make it and read the result alone."""
    x = rotation.inputs[0]
    before = None if x is None else x.producer()
    behind = _only_reader(rotation.outputs[0], kind)
    if x is None or before is None or behind is None or not is_op(before, kind):
        return None
    return (x, before, behind) if _only_reader(x) is rotation else None


def _only_reader(x: ir.Value, kind: str | None = None) -> ir.Node | None:
    uses = list(x.uses())
    if len(uses) != 1 or x.is_graph_output() or uses[0].node.graph is not x.graph:
        return None
    return uses[0].node if kind is None or is_op(uses[0].node, kind) else None


def _sizes(split: ir.Node) -> list[int] | None:
    """Return the sizes of the heads that a Split cuts into."""
    if _axis(split) != 1:
        return None
    sizes = [(S.dims_of(y) or (None, None))[1] for y in split.outputs]
    numbers = [s for s in sizes if isinstance(s, int)]
    return numbers if len(numbers) == len(sizes) else None


def _axis(node: ir.Node) -> int:
    given = node.attributes.get("axis")
    return 0 if given is None else given.as_int() % 4


__all__ = ["scale_in_rotation"]
