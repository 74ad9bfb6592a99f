"""Compute nodes in the types and ranks that a runtime has.

``legalize_types`` computes int64 nodes in int32 and boolean nodes with 0 and 1, and casts the
result back. Values have to fit into 32 bits, as they must in such a runtime anyway.
``reduce_rank`` merges axes that a node treats alike and restores the shape with a Reshape. Casts
and reshapes that meet the inverse ones of the next node cancel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_standard
from onnxtrain.lowering.profile import Profile, dtypes_of

_BOOL, _FLOAT = ir.DataType.BOOL, ir.DataType.FLOAT
_INT32, _INT64 = ir.DataType.INT32, ir.DataType.INT64
BOOL_AS_NUMBER_KEY = "onnxtrain.truth"  # in Value.meta: the value is 0 or 1


def legalize_types(op: OpBuilder, node: ir.Node, profile: Profile) -> list[ir.Value | None] | None:
    """Return the outputs of a node computed in supported types, ``None`` if that is impossible.

    Not for Cast, whose purpose is the type.
    """
    allowed, free = dtypes_of(profile, node.op_type)
    if allowed is None or node.op_type == "Cast" or "Cast" not in profile.ops:
        return None
    instead = _substitute_types(allowed)
    values = [
        *((i, x) for i, x in enumerate(node.inputs) if i not in free),
        *enumerate(node.outputs),
    ]
    if not any(x is not None and x.dtype in instead for _, x in values):
        return None
    if node.op_type in _LOGIC and node.inputs[0] is not None and node.inputs[0].dtype == _BOOL:
        return [_logic(op, node, instead.get(_BOOL, _FLOAT))]
    return _emit_with_types(op, node, instead, free)


def _substitute_types(allowed: list[str]) -> dict[ir.DataType, ir.DataType]:
    substitutes = {}
    if "int64" not in allowed and "int32" in allowed:
        substitutes[_INT64] = _INT32
    if "bool" not in allowed:
        substitutes[_BOOL] = _FLOAT if "float" in allowed else _INT32
    return substitutes


def _emit_with_types(
    op: OpBuilder, node: ir.Node, instead: dict[ir.DataType, ir.DataType], free: tuple[int, ...]
) -> list[ir.Value | None] | None:
    schema = S.schema_of(node.op_type, op.opset)
    assert schema is not None
    types = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    inputs = []
    for i, x in enumerate(node.inputs):
        formal = schema.inputs[min(i, len(schema.inputs) - 1)]
        other = None if x is None or x.dtype is None or i in free else instead.get(x.dtype)
        if x is None or other is None:
            inputs.append(x)
            continue
        if f"tensor({other.name.lower()})" not in types.get(formal.type_str, ()):
            return None
        cast = op.Cast(x, to=other)
        if x.dtype == _BOOL:
            cast.meta[BOOL_AS_NUMBER_KEY] = True
        inputs.append(cast)
    new = ir.Node(
        "",
        node.op_type,
        inputs,
        list(node.attributes.values()),
        num_outputs=len(node.outputs),
        version=op.opset,
    )
    emitted = op.append(new)
    outputs = []
    for old, y in zip(
        node.outputs, emitted if isinstance(emitted, tuple) else (emitted,), strict=True
    ):
        if old.dtype is None or y.dtype is None or not old.name:
            outputs.append(None)
            continue
        if old.dtype == _BOOL and y.dtype != _BOOL:
            y.meta[BOOL_AS_NUMBER_KEY] = True
        outputs.append(op.cast(y, old.dtype))
    return outputs


_LOGIC = frozenset({"And", "Or", "Xor", "Not", "Equal"})


def _logic(op: OpBuilder, node: ir.Node, dtype: ir.DataType) -> ir.Value:
    """Return a logical operation computed with 0 and 1."""
    a, *rest = (op.Cast(x, to=dtype) for x in node.inputs if x is not None)
    one = op.const(1, dtype)
    if node.op_type == "Not":
        y = op.Sub(one, a)
    elif node.op_type == "And":
        y = op.Mul(a, *rest)
    elif node.op_type == "Or":
        y = op.Sub(op.Add(a, *rest), op.Mul(a, *rest))
    else:
        apart = op.Sub(a, *rest)
        apart = op.Mul(apart, apart)
        y = apart if node.op_type == "Xor" else op.Sub(one, apart)
    y.meta[BOOL_AS_NUMBER_KEY] = True
    return op.Cast(y, to=_BOOL)


def undo_cast(node: ir.Node) -> ir.Value | None:
    """Return the source of a pair of casts that restores it without loss, else ``None``."""
    x, y = node.inputs[0], node.outputs[0]
    before = None if x is None else x.producer()
    if node.op_type != "Cast" or x is None or before is None or before.op_type != "Cast":
        return None
    source = before.inputs[0]
    if not is_standard(before) or source is None or source.dtype is None or source.dtype != y.dtype:
        return None
    longer = (source.dtype, x.dtype) == (_INT32, _INT64)
    truth = source.dtype == _BOOL or (
        x.dtype == _BOOL and bool(source.meta.get(BOOL_AS_NUMBER_KEY))
    )
    return source if longer or truth else None


_ELEMENTWISE_OPS = frozenset(
    {
        *(
            "Abs",
            "Ceil",
            "Celu",
            "Clip",
            "Cos",
            "Elu",
            "Erf",
            "Exp",
            "Floor",
            "Gelu",
            "HardSigmoid",
        ),
        *("HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Log", "Mish", "Neg", "Not"),
        *("Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Softplus"),
        *("Softsign", "Sqrt", "Tan", "Tanh", "ThresholdedRelu", "Cast"),
    }
)
_BROADCAST_OPS = frozenset(
    {
        *("Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max"),
        *("Mean", "Min", "Mod", "Mul", "Or", "PRelu", "Pow", "Sub", "Sum", "Where", "Xor"),
    }
)
_SINGLE_AXIS_OPS = frozenset(
    {"ArgMax", "ArgMin", "Hardmax", "LogSoftmax", "LpNormalization", "Softmax"}
)


def reduce_rank(op: OpBuilder, node: ir.Node, limit: int) -> list[ir.Value] | None:
    """Return the outputs of a node computed at rank ``limit`` or less, ``None`` if impossible.

    Only for nodes with one output and static shapes.
    """
    x, y = node.inputs[0] if node.inputs else None, node.outputs[0]
    if x is None or len(node.outputs) != 1 or not is_standard(node):
        return None
    before, after = op.static(x), op.static(y)
    if before is None or after is None or max(len(before), len(after)) <= limit:
        return None
    reduced = _compute_at_lower_rank(op, node, x, before, after, limit)
    return None if reduced is None else [op.Reshape(reduced, list(after))]


def _compute_at_lower_rank(
    op: OpBuilder,
    node: ir.Node,
    x: ir.Value,
    before: tuple[int, ...],
    after: tuple[int, ...],
    limit: int,
) -> ir.Value | None:
    kind, rank = node.op_type, len(before)
    if kind in _ELEMENTWISE_OPS:
        return _same(op, node, [op.Reshape(x, [-1]), *node.inputs[1:]])
    if kind in _BROADCAST_OPS:
        return _broadcast(op, node, after, limit)
    if kind == "Transpose":
        given = node.attributes.get("perm")
        perm = list(given.as_ints()) if given is not None else list(range(rank))[::-1]
        return _transposed(op, x, before, perm, limit)
    if kind == "MatMul":
        return _product(op, node, before)
    known = S.attributes_of(node, op.opset)
    if kind.startswith("Reduce"):
        return _reduced(op, node, x, before, limit, known)
    if kind in _SINGLE_AXIS_OPS or kind in ("Gather", "Concat"):
        axis = int(known["axis"]) % rank
        return _along(op, node, before, axis, known)
    return None


def _same(op: OpBuilder, node: ir.Node, inputs: Sequence[ir.Value | None], **changed: Any) -> Any:
    attributes = {n: a for n, a in node.attributes.items() if n not in changed}
    extra = ir.convenience.convert_attributes(changed)
    return op.append(
        ir.Node("", node.op_type, inputs, [*attributes.values(), *extra], version=op.opset)
    )


def _broadcast(op: OpBuilder, node: ir.Node, out: tuple[int, ...], limit: int) -> Any:
    """Merge adjacent axes along which the same inputs broadcast."""
    shapes = []
    for x in node.inputs:
        dims = None if x is None else op.static(x)
        if dims is None:
            return None
        shapes.append((1,) * (len(out) - len(dims)) + dims)
    groups: list[list[int]] = []
    last = None
    for axis, size in enumerate(out):
        pattern = tuple(s[axis] == size for s in shapes)
        if groups and (pattern == last or size == 1):
            groups[-1].append(axis)
        else:
            groups.append([axis])
            last = pattern
    if len(groups) > limit:
        return None
    inputs = [
        op.Reshape(x, [math.prod(s[a] for a in g) for g in groups]) if op.rank(x) else x
        for x, s in zip(node.inputs, shapes, strict=True)
        if x is not None
    ]
    return _same(op, node, inputs)


def _transposed(
    op: OpBuilder, x: ir.Value, dims: tuple[int, ...], perm: list[int], limit: int
) -> ir.Value | None:
    """Transpose in steps of rank 4, each moving one block of axes to its position."""
    blocks: list[list[int]] = []
    for axis in perm:
        if blocks and blocks[-1][-1] == axis - 1:
            blocks[-1].append(axis)
        else:
            blocks.append([axis])
    wanted = [math.prod(dims[a] for a in b) for b in blocks]
    order = sorted(range(len(blocks)), key=lambda i: blocks[i])
    if len(blocks) <= limit:
        y = op.Reshape(x, [wanted[i] for i in order])
        return op.Transpose(y, perm=[order.index(i) for i in range(len(blocks))])
    if limit < 4:
        return None
    for place in range(len(blocks)):
        at = order.index(place)
        if at == place:
            continue
        parts = [order[:place], order[place:at], [place], order[at + 1 :]]
        sizes = [math.prod(wanted[i] for i in part) for part in parts]
        x = op.Transpose(op.Reshape(x, sizes), perm=[0, 2, 1, 3])
        order.insert(place, order.pop(at))
    return x


def _reduced(
    op: OpBuilder, node: ir.Node, x: ir.Value, dims: tuple[int, ...], limit: int, known: Any
) -> Any:
    given = node.inputs[1] if len(node.inputs) > 1 else None
    axes = op.axes(given, len(dims))
    if axes is None or known["noop_with_empty_axes"]:
        return None
    groups: list[list[int]] = []
    for axis in range(len(dims)):
        if groups and (axis in axes) == (groups[-1][-1] in axes):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    if len(groups) > limit:
        return None
    y = op.Reshape(x, [math.prod(dims[a] for a in g) for g in groups])
    chosen = [i for i, g in enumerate(groups) if g[0] in axes]
    return _same(op, node, [y, op.const(np.asarray(chosen, np.int64))], keepdims=0)


def _along(op: OpBuilder, node: ir.Node, dims: tuple[int, ...], axis: int, known: Any) -> Any:
    """Compute on [before, axis, after]."""

    def three(x: ir.Value) -> ir.Value:
        sizes = op.dims(x)
        behind = math.prod(s for s in sizes[axis + 1 :] if isinstance(s, int))
        front = math.prod(s for s in sizes[:axis] if isinstance(s, int))
        return op.Reshape(x, [front, sizes[axis], behind])

    if node.op_type == "Gather":
        indices = node.inputs[1]
        assert indices is not None
        first = node.inputs[0]
        assert first is not None
        flat = indices if op.rank(indices) < 2 else op.Reshape(indices, [-1])
        return op.Gather(three(first), flat, axis=1)
    inputs = [three(x) for x in node.inputs if x is not None and op.static(x) is not None]
    if len(inputs) != len(node.inputs):
        return None
    changed = {"keepdims": 0} if "keepdims" in known else {}
    return _same(op, node, inputs, axis=1, **changed)


def _product(op: OpBuilder, node: ir.Node, dims: tuple[int, ...]) -> ir.Value | None:
    a, b = node.inputs
    assert a is not None
    assert b is not None
    other = op.static(b)
    if other is None:
        return None
    if len(other) == 2:
        return op.MatMul(op.Reshape(a, [-1, dims[-1]]), b)
    if dims[:-2] != other[:-2]:
        return None
    return op.MatMul(op.Reshape(a, [-1, *dims[-2:]]), op.Reshape(b, [-1, *other[-2:]]))
