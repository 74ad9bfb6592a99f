"""Rotary embedding: fuse it into the operator, and fold the scale of attention into its tables.

`fuse_rotary_embedding` (files of opset 23 and later): one node in place of five, and one pass over
the heads. The gradient of a rotation is the rotation back, the same operator with `-sin`:

    before:  x * concat(cos, cos) + swap(x) * concat(-sin, sin)      forward
             x * concat(cos, cos) + swap(x * concat(-sin, sin))      backward
    after:   RotaryEmbedding(x, cos, sin)

Here `swap` exchanges the two halves of the last axis.

`fold_scale_into_rotary`: a rotation is linear, so `c R(x)` is `R(x)` with the tables `c cos` and
`c sin`, which all layers share. Where queries and keys are rotated together, they are split before
the rotation instead of after it, so that only queries are scaled. This saves a node and a pass over
the queries in each direction.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, replace_value
from onnxtrain.graph.match import Match, checked, pattern
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.simplify.dead_code import remove_dead_nodes

_ROTARY_OPSET = 23
_ROTARY_IR_VERSION = 11


def fuse_rotary_embedding(model: ir.Model, op: OpBuilder) -> int:
    """Replace rotations with RotaryEmbedding; return how many.

    The model gets the operator's opset.
    """
    rotations: list[tuple[ir.Node, Match, bool]] = []
    for node in nodes(model.graph, "Add"):
        forward = _rotation.match(node)
        match = forward or _rotation_gradient.match(node)
        if match is not None:
            rotations.append((node, match, forward is None))
    if not rotations:
        return 0
    if model.opset_imports[""] < _ROTARY_OPSET:
        model.opset_imports[""] = _ROTARY_OPSET
        model.ir_version = max(model.ir_version or 0, _ROTARY_IR_VERSION)
    op.opset = model.opset_imports[""]
    for node, match, is_gradient in rotations:
        op.position = node
        y, x = node.outputs[0], match["x"]
        uses = list(y.uses())
        cos, sin = (_batch_table(op, match[name], x) for name in ("cos", "sin"))
        sin = op.Neg(sin) if is_gradient else sin
        replace_value(y, op.RotaryEmbedding(x, cos, sin), uses)
    return len(rotations)


def _is_last_of_4(axis: int) -> bool:
    return axis % 4 == 3


def _check_rotation(match: Match) -> bool | str:
    y, x, cos = match.root.outputs[0], match["x"], match["cos"]
    if len(S.dims_of(y) or ()) != 4 or y.dtype != ir.DataType.FLOAT or not S.same_shape(x, y):
        return "not a rotation of a float32 tensor of rank 4"
    if not S.same_shape(match["first"], match["second"]):
        return "the two parts are not halves"
    if not S.same_shape(cos, match["sin"]) or not _is_table_for(x, cos):
        return "the tables do not have a row of half the width per token"
    return True


@checked(_check_rotation)
def _rotation(op, x, cos, sin):
    first, second = op.Split(x, ..., axis=_is_last_of_4, _outputs=2)
    swapped = op.Concat(second.named("second"), first.named("first"), axis=_is_last_of_4)
    signed = op.Concat(op.Neg(sin), sin, axis=_is_last_of_4)
    return op.Add(
        op.Mul(x, op.Concat(cos, cos, axis=_is_last_of_4)),
        op.Mul(swapped, signed),
    )


@checked(_check_rotation)
def _rotation_gradient(op, x, cos, sin):
    signed = op.Concat(op.Neg(sin), sin, axis=_is_last_of_4)
    first, second = op.Split(op.Mul(x, signed), ..., axis=_is_last_of_4, _outputs=2)
    return op.Add(
        op.Mul(x, op.Concat(cos, cos, axis=_is_last_of_4)),
        op.Concat(second.named("second"), first.named("first"), axis=_is_last_of_4),
    )


def _is_table_for(x: ir.Value, table: ir.Value) -> bool:
    """Return whether a table for [batch, heads, length, width] is [1 or batch, 1, length, half]."""
    actual, dims = S.dims_of(table), S.dims_of(x)
    if actual is None or dims is None or len(actual) != 4 or None in dims:
        return False
    width = dims[3]
    if not isinstance(width, int) or actual[3] != width // 2 or width % 2:
        return False
    return actual[0] in (1, dims[0]) and actual[1] == 1 and actual[2] == dims[2]


def _batch_table(op: OpBuilder, table: ir.Value, x: ir.Value) -> ir.Value:
    """Return a table [1 or batch, 1, length, half] as [batch, length, half]."""
    flat, batch = op.Squeeze(table, [1]), op.dims(x)[0]
    if op.dims(flat)[0] == batch:
        return flat
    rows = _gather_per_sequence(op, table, x)
    if rows is None:
        rows = op.Expand(flat, op.vector([op.size(x, 0), 1, 1]))
    S.set_dims(rows, [batch, *op.dims(flat)[1:]])
    return rows


@pattern
def _shared_rows(op, every, positions):
    return op.Unsqueeze(op.Gather(every, op.Unsqueeze(positions, [0]), axis=0), ...)


def _gather_per_sequence(op: OpBuilder, table: ir.Value, x: ir.Value) -> ir.Value | None:
    """Gather the rows of a table again, for each sequence, if all sequences share the positions."""
    unsqueeze = table.producer()
    match = None if unsqueeze is None else _shared_rows.match(unsqueeze)
    if match is None or len(S.dims_of(match["every"]) or ()) != 2:
        return None
    spread = op.Expand(match["positions"], op.vector([op.size(x, 0), op.size(x, 2)]))
    return op.Gather(match["every"], spread, axis=0)


_TABLES_FOR_EVERY_TOKEN = 3  # inputs: the value, cosines and sines; no position ids
_VIEWS = ("Reshape", "Squeeze", "Unsqueeze")


def fold_scale_into_rotary(model: ir.Model, op: OpBuilder) -> int:
    """Scale the tables instead of what they rotate; return for how many rotations."""
    # Only nodes as `fuse_rotary_embedding` writes them: without position ids and attributes.
    rotations = [
        n
        for n in nodes(model.graph, "RotaryEmbedding")
        if len(n.inputs) == _TABLES_FOR_EVERY_TOKEN and not n.attributes
    ]
    if rotations:
        remove_dead_nodes(model.graph)  # the fused nodes still read the same values
    return sum(
        _fold_single(op, n) or _fold_across_split(op, n) or _fold_across_concat(op, n)
        for n in rotations
    )


@dataclasses.dataclass(frozen=True)
class _Scale:
    """A node `number * x` whose operand `x` is a view of some value with no other reader."""

    node: ir.Node
    x: ir.Value
    number: ir.Value


def _fold_single(op: OpBuilder, rotation: ir.Node) -> int:
    """Rewrite `c R(x)` and `R(c x)`."""
    x, y = rotation.inputs[0], rotation.outputs[0]
    scale = _scale_before(x) or _scale_after(y)
    if x is None or scale is None:
        return 0
    op.position = rotation
    x = scale.x if x is scale.node.outputs[0] else x
    _bypass(scale)
    replace_value(y, _rotate(op, rotation, x, scale), list(y.uses()))
    return 1


def _fold_across_split(op: OpBuilder, rotation: ir.Node) -> int:
    """Rewrite `a, b = Split(R(x))` and `c a`, where `x` is itself an output of a Split."""
    around = _nodes_around(rotation, "Split")
    if around is None:
        return 0
    x, outer, inner = around
    sizes, parts = _split_sizes(outer), _split_sizes(inner)
    if sizes is None or parts is None or len(parts) != 2:
        return 0
    scales = [_scale_after(part) for part in inner.outputs]
    if not any(scales):
        return 0
    index = outer.outputs.index(x)
    op.position = outer
    all_sizes = [*sizes[:index], *parts, *sizes[index + 1 :]]
    pieces = op.Split(outer.inputs[0], all_sizes, axis=1, _outputs=len(all_sizes))
    unchanged = [*outer.outputs[:index], *outer.outputs[index + 1 :]]
    for old, new in zip(unchanged, [*pieces[:index], *pieces[index + 2 :]], strict=True):
        replace_value(old, new, list(old.uses()))
    op.position = rotation
    for part, new, scale in zip(inner.outputs, pieces[index : index + 2], scales, strict=True):
        new.shape = part.shape
        replace_value(part, _rotate(op, rotation, new, scale), list(part.uses()))
        if scale is not None:
            _bypass(scale)
    return 1


def _fold_across_concat(op: OpBuilder, rotation: ir.Node) -> int:
    """Rewrite `Concat(R(Concat(c a, b)), ...)`."""
    around = _nodes_around(rotation, "Concat")
    if around is None:
        return 0
    _, inner, outer = around
    if _axis(inner) != 1 or _axis(outer) != 1 or len(inner.inputs) != 2:
        return 0
    if None in inner.inputs or None in outer.inputs:
        return 0
    scales = [_scale_before(part) for part in inner.inputs]
    if not any(scales):
        return 0
    op.position = rotation
    rotated = []
    for part, scale in zip(inner.inputs, scales, strict=True):
        assert part is not None
        if scale is not None:
            part = scale.x if part is scale.node.outputs[0] else part
            _bypass(scale)
        rotated.append(_rotate(op, rotation, part, scale))
    index = outer.inputs.index(rotation.outputs[0])
    parts = [*outer.inputs[:index], *rotated, *outer.inputs[index + 1 :]]
    op.position = outer
    y = outer.outputs[0]
    replace_value(y, op.Concat(*parts, axis=1), list(y.uses()))
    return 1


def _bypass(scale: _Scale) -> None:
    result = scale.node.outputs[0]
    replace_value(result, scale.x, list(result.uses()))


def _rotate(op: OpBuilder, rotation: ir.Node, x: ir.Value, scale: _Scale | None) -> ir.Value:
    tables = rotation.inputs[1:3]
    if scale is not None:
        tables = [op.Mul(t, scale.number) for t in tables]
    y = op.RotaryEmbedding(x, *tables)
    y.shape = x.shape
    return y


def _scale_after(x: ir.Value) -> _Scale | None:
    """Return the node that multiplies a view of `x` by a number, if `x` has no other reader."""
    node = _only_reader(x)
    while node is not None and is_op(node, *_VIEWS) and node.inputs[0] is x:
        x = node.outputs[0]
        node = _only_reader(x)
    return None if node is None else _scale(node, x)


def _scale_before(x: ir.Value | None) -> _Scale | None:
    """Return the node that multiplies by a number, if `x` is a view of its result."""
    while x is not None and _only_reader(x) is not None:
        node = x.producer()
        if node is None:
            return None
        if not is_op(node, *_VIEWS):
            return next((s for v in node.inputs if (s := _scale(node, v)) is not None), None)
        x = node.inputs[0]
    return None


def _scale(node: ir.Node, x: ir.Value | None) -> _Scale | None:
    if not is_op(node, "Mul") or x is None or x not in node.inputs:
        return None
    number = node.inputs[1] if node.inputs[0] is x else node.inputs[0]
    if number is None or not S.is_generated_constant(number):
        return None
    array = S.constant_of(number)
    if array is None or array.size != 1:
        return None
    y = node.outputs[0]
    return _Scale(node, x, number) if S.same_shape(x, y) and not y.is_graph_output() else None


def _nodes_around(rotation: ir.Node, op_type: str) -> tuple[ir.Value, ir.Node, ir.Node] | None:
    """Return the rotated value, and the nodes of a type right before and after the rotation."""
    x = rotation.inputs[0]
    before = None if x is None else x.producer()
    after = _only_reader(rotation.outputs[0], op_type)
    if x is None or before is None or after is None or not is_op(before, op_type):
        return None
    return (x, before, after) if _only_reader(x) is rotation else None


def _only_reader(x: ir.Value, op_type: str | None = None) -> ir.Node | None:
    uses = list(x.uses())
    if len(uses) != 1 or x.is_graph_output() or uses[0].node.graph is not x.graph:
        return None
    return uses[0].node if op_type is None or is_op(uses[0].node, op_type) else None


def _axis(node: ir.Node) -> int:
    axis = node.attributes.get("axis")
    return 0 if axis is None else axis.as_int() % 4


def _split_sizes(split: ir.Node) -> list[int] | None:
    """Return the numbers of heads of each output of a Split along axis 1."""
    if _axis(split) != 1:
        return None
    sizes = [(S.dims_of(y) or (None, None))[1] for y in split.outputs]
    known = [s for s in sizes if isinstance(s, int)]
    return known if len(known) == len(sizes) else None
