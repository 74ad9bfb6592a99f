"""Rotation of features by the operator of that name, where the file is new enough to have it.

``x (c, c) + swap(x) (-s, s)`` is a RotaryEmbedding. Its gradient is the rotation back,
``dy (c, c) + swap(dy (-s, s))``: the same operator with ``-s``. One node stands for five, and one
pass over the heads.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.io.imports import file_opset
from onnxtrain.graph.nodes import is_op, nodes

_SINCE, _IR_VERSION = 23, 11


@dataclasses.dataclass(frozen=True)
class _Rotation:
    """``x`` of rank 4, and the halves of its tables; ``back`` if it is the gradient of one."""

    x: ir.Value
    cos: ir.Value
    sin: ir.Value
    back: bool


def rotary_operator(model: ir.Model, op: OpBuilder) -> int:
    """Replace sums that are rotations; return how many. The model gets the operator's opset."""
    if file_opset(model) < _SINCE:
        return 0
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
            cos = _twice(table)
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


def _twice(table: ir.Value | None) -> ir.Value | None:
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


__all__ = ["rotary_operator"]
