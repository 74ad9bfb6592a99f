"""Nodes in the types that a runtime has: int32 for int64, and 0 and 1 for booleans.

The result is cast back; where one node's cast meets the next one's, both go. Integers have to fit
into 32 bits, as they have to in such a runtime anyway.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_standard
from onnxtrain.lowering.profile import Profile, dtypes_of

_BOOL, _FLOAT = ir.DataType.BOOL, ir.DataType.FLOAT
_INT32, _INT64 = ir.DataType.INT32, ir.DataType.INT64
TRUTH = "onnxtrain.truth"  # in the meta of a value that is 0 and 1 only


def in_other_types(op: OpBuilder, node: ir.Node, profile: Profile) -> list[ir.Value | None] | None:
    """Return the outputs of a node computed in types that the runtime has, ``None`` if it has none.

    ``Cast`` is none of these nodes: there the type is what it is about.
    """
    allowed, free = dtypes_of(profile, node.op_type)
    if allowed is None or node.op_type == "Cast" or "Cast" not in profile.ops:
        return None
    instead = _instead(allowed)
    values = [
        *((i, x) for i, x in enumerate(node.inputs) if i not in free),
        *enumerate(node.outputs),
    ]
    if not any(x is not None and x.dtype in instead for _, x in values):
        return None
    if node.op_type in _LOGIC and node.inputs[0] is not None and node.inputs[0].dtype == _BOOL:
        return [_logic(op, node, instead.get(_BOOL, _FLOAT))]
    return _emitted(op, node, instead, free)


def _instead(allowed: list[str]) -> dict[ir.DataType, ir.DataType]:
    substitutes = {}
    if "int64" not in allowed and "int32" in allowed:
        substitutes[_INT64] = _INT32
    if "bool" not in allowed:
        substitutes[_BOOL] = _FLOAT if "float" in allowed else _INT32
    return substitutes


def _emitted(
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
            cast.meta[TRUTH] = True
        inputs.append(cast)
    new = ir.Node(
        "", node.op_type, inputs, list(node.attributes.values()),
        num_outputs=len(node.outputs), version=op.opset,
    )  # fmt: skip
    emitted = op.append(new)
    outputs = []
    for old, y in zip(
        node.outputs, emitted if isinstance(emitted, tuple) else (emitted,), strict=True
    ):
        if old.dtype is None or y.dtype is None or not old.name:
            outputs.append(None)
            continue
        if old.dtype == _BOOL and y.dtype != _BOOL:
            y.meta[TRUTH] = True
        outputs.append(op.cast(y, old.dtype))
    return outputs


_LOGIC = frozenset({"And", "Or", "Xor", "Not", "Equal"})


def _logic(op: OpBuilder, node: ir.Node, dtype: ir.DataType) -> ir.Value:
    """Return a combination of booleans, computed with numbers."""
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
    y.meta[TRUTH] = True
    return op.Cast(y, to=_BOOL)


def undone(node: ir.Node) -> ir.Value | None:
    """Return the value that a Cast of a Cast brings back, if that loses nothing."""
    x, y = node.inputs[0], node.outputs[0]
    before = None if x is None else x.producer()
    if node.op_type != "Cast" or x is None or before is None or before.op_type != "Cast":
        return None
    source = before.inputs[0]
    if not is_standard(before) or source is None or source.dtype is None or source.dtype != y.dtype:
        return None
    longer = (source.dtype, x.dtype) == (_INT32, _INT64)
    truth = source.dtype == _BOOL or (x.dtype == _BOOL and bool(source.meta.get(TRUTH)))
    return source if longer or truth else None
