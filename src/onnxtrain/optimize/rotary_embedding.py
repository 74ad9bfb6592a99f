"""Rotation of features by the operator of that name, where the file is new enough to have it.

``x (c, c) + swap(x) (-s, s)`` is a RotaryEmbedding. Its gradient is the rotation back,
``dy (c, c) + swap(dy (-s, s))``: the same operator with ``-s``. One node stands for five, and one
pass over the heads.

The factor of attention scores inside the tables that queries are rotated by.

A rotation is linear: ``c R(x) = R(x)`` with the tables ``c cos`` and ``c sin``, which all layers
share. Packed queries and keys are cut apart in front of the rotation instead of behind it, so that
only queries are multiplied; their gradients come back the same way. One node and one pass over the
queries less in each direction.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, replace_value
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.simplify.dead_code import remove_dead_nodes

_SINCE, _IR_VERSION = 23, 11


@dataclasses.dataclass(frozen=True)
class _Rotation:
    """``x`` of rank 4, and the halves of its tables; ``back`` if it is the gradient of one."""

    x: ir.Value
    cos: ir.Value
    sin: ir.Value
    back: bool


def fuse_rotary_embedding(model: ir.Model, op: OpBuilder) -> int:
    """Replace sums that are rotations; return how many. The model gets the operator's opset."""
    rotations = [(n, r) for n in nodes(model.graph, "Add") if (r := _rotation(n)) is not None]
    if not rotations:
        return 0
    if model.opset_imports[""] < _SINCE:
        model.opset_imports[""] = _SINCE
        model.ir_version = max(model.ir_version or 0, _IR_VERSION)
    op.opset = model.opset_imports[""]
    for node, rotation in rotations:
        op.position = node
        y = node.outputs[0]
        uses = list(y.uses())
        cos, sin = (_table(op, t, rotation.x) for t in (rotation.cos, rotation.sin))
        sin = op.Neg(sin) if rotation.back else sin
        replace_value(y, op.RotaryEmbedding(rotation.x, cos, sin), uses)
    return len(rotations)


def _table(op: OpBuilder, table: ir.Value, x: ir.Value) -> ir.Value:
    """Return a table of [batch, 1, length, half] without the second axis, for the whole batch."""
    flat, batch = op.Squeeze(table, [1]), op.dims(x)[0]
    if op.dims(flat)[0] == batch:
        return flat
    rows = _chosen(op, table, x) or op.Expand(flat, op.vector([op.size(x, 0), 1, 1]))
    S.set_dims(rows, [batch, *op.dims(flat)[1:]])
    return rows


def _chosen(op: OpBuilder, table: ir.Value, x: ir.Value) -> ir.Value | None:
    """Return rows of a longer table that all sequences have in common, chosen for each of them."""
    view = _producer(table, "Unsqueeze")
    gather = None if view is None else _producer(view.inputs[0], "Gather")
    if gather is None or None in gather.inputs:
        return None
    every, places = gather.inputs
    first = _producer(places, "Unsqueeze")
    axes = None if first is None else S.constant_of(first.inputs[1])
    if every is None or first is None or axes is None or axes.tolist() != [0]:
        return None
    if len(S.dims_of(every) or ()) != 2 or gather.attributes.get_int("axis", 0) != 0:
        return None
    spread = op.Expand(first.inputs[0], op.vector([op.size(x, 0), op.size(x, 2)]))
    return op.Gather(every, spread, axis=0)


def _rotation(node: ir.Node) -> _Rotation | None:
    y = node.outputs[0]
    if y.shape is None or len(y.shape) != 4 or y.dtype != ir.DataType.FLOAT:
        return None
    for plain, swapped in (tuple(node.inputs), tuple(reversed(node.inputs))):
        product = _producer(plain, "Mul")
        if product is None or swapped is None:
            continue
        for x, table in (tuple(product.inputs), tuple(reversed(product.inputs))):
            cos = _half_of_repeated(table)
            if x is None or cos is None or not S.same_shape(x, y):
                continue
            forward, backward = _forward_sin(swapped, x), _backward_sin(swapped, x)
            sin = forward or backward
            if sin is not None and _fits(x, cos) and S.same_shape(cos, sin):
                return _Rotation(x, cos, sin, back=forward is None)
    return None


def _fits(x: ir.Value, table: ir.Value) -> bool:
    """Return whether a table has a row of half the width for each token of one or each sequence."""
    have, want = S.dims_of(table), S.dims_of(x)
    if have is None or want is None or len(have) != 4 or None in want:
        return False
    width = want[3]
    if not isinstance(width, int) or have[3] != width // 2 or width % 2:
        return False
    return have[0] in (1, want[0]) and have[1] == 1 and have[2] == want[2]


def _forward_sin(value: ir.Value, x: ir.Value) -> ir.Value | None:
    """Return ``s`` of ``swap(x) (-s, s)``."""
    product = _producer(value, "Mul")
    if product is None:
        return None
    for moved, table in (tuple(product.inputs), tuple(reversed(product.inputs))):
        if _swapped(moved) is x:
            return _signed(table)
    return None


def _backward_sin(value: ir.Value, x: ir.Value) -> ir.Value | None:
    """Return ``s`` of ``swap(x (-s, s))``."""
    product = _producer(_swapped(value), "Mul")
    if product is None or x not in product.inputs:
        return None
    return _signed(product.inputs[1] if product.inputs[0] is x else product.inputs[0])


def _swapped(value: ir.Value | None) -> ir.Value | None:
    """Return ``x`` where a value is its two halves in the other order."""
    parts = _joined(value)
    split = None if parts is None else _producer(parts[0], "Split")
    if parts is None or split is None or len(split.outputs) != 2 or _axis(split) != 3:
        return None
    a, b = split.outputs
    return split.inputs[0] if parts == (b, a) and S.same_shape(a, b) else None


def _half_of_repeated(table: ir.Value | None) -> ir.Value | None:
    parts = _joined(table)
    return parts[0] if parts is not None and parts[0] is parts[1] else None


def _signed(table: ir.Value | None) -> ir.Value | None:
    parts = _joined(table)
    minus = None if parts is None else _producer(parts[0], "Neg")
    return parts[1] if parts and minus is not None and minus.inputs[0] is parts[1] else None


def _joined(value: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """Return the two values that are put side by side along the last of four axes."""
    node = _producer(value, "Concat")
    if node is None or len(node.inputs) != 2 or _axis(node) != 3:
        return None
    a, b = node.inputs
    return None if a is None or b is None else (a, b)


def _axis(node: ir.Node) -> int:
    given = node.attributes.get("axis")
    return 0 if given is None else given.as_int() % 4


def _producer(value: ir.Value | None, kind: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and is_op(node, kind) else None


_INPUTS = 3  # what is rotated, cosines and sines
_VIEWS = ("Reshape", "Squeeze", "Unsqueeze")


def fold_scale_into_rotary(model: ir.Model, op: OpBuilder) -> int:
    """Multiply tables instead of what they rotate; return for how many rotations."""
    # With tables for every token, as `rotary_operator` writes them: no positions, nothing set.
    every = nodes(model.graph, "RotaryEmbedding")
    rotations = [n for n in every if len(n.inputs) == _INPUTS and not n.attributes]
    if rotations:
        remove_dead_nodes(model.graph)  # what rotations were made of reads the same values
    return sum(
        _fold_single(op, n) or _fold_across_split(op, n) or _fold_across_concat(op, n)
        for n in rotations
    )


@dataclasses.dataclass(frozen=True)
class _Factor:
    """A node ``c x``, where ``x`` is a view of some value that nothing else reads."""

    node: ir.Node
    x: ir.Value
    number: ir.Value


def _fold_single(op: OpBuilder, rotation: ir.Node) -> int:
    """``c R(x)`` or ``R(c x)``."""
    x, y = rotation.inputs[0], rotation.outputs[0]
    before, behind = _factor_before_view(x), _factor_of(y)
    factor = before or behind
    if x is None or factor is None:
        return 0
    op.position = rotation
    x = factor.x if x is factor.node.outputs[0] else x
    _bypass(factor)
    replace_value(y, _rotated(op, rotation, x, factor), list(y.uses()))
    return 1


def _fold_across_split(op: OpBuilder, rotation: ir.Node) -> int:
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
            _bypass(factor)
    return 1


def _fold_across_concat(op: OpBuilder, rotation: ir.Node) -> int:
    """``Concat(R(Concat(c a, b)), ...)``."""
    around = _around(rotation, "Concat")
    if around is None:
        return 0
    _, inner, outer = around
    if _axis(inner) != 1 or _axis(outer) != 1 or len(inner.inputs) != 2:
        return 0
    if None in inner.inputs or None in outer.inputs:
        return 0
    factors = [_factor_before_view(part) for part in inner.inputs]
    if not any(factors):
        return 0
    op.position = rotation
    turned = []
    for part, factor in zip(inner.inputs, factors, strict=True):
        assert part is not None
        if factor is not None:
            part = factor.x if part is factor.node.outputs[0] else part
            _bypass(factor)
        turned.append(_rotated(op, rotation, part, factor))
    at = outer.inputs.index(rotation.outputs[0])
    joined = [*outer.inputs[:at], *turned, *outer.inputs[at + 1 :]]
    op.position = outer
    whole = outer.outputs[0]
    replace_value(whole, op.Concat(*joined, axis=1), list(whole.uses()))
    return 1


def _bypass(factor: _Factor) -> None:
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


def _factor_before_view(x: ir.Value | None) -> _Factor | None:
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
    if number is None or not S.is_generated_constant(number):
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
