"""Cross entropy's gradient rounded to 16 bits before the labels are marked in it, not behind.

With ``bf16-mixed`` the gradient of the scores of a large vocabulary is ``p`` less one at the label,
made in float32 and rounded in the end. To replace one element per row a kernel copies all others,
so they are rounded first: half as much is copied. At the label the difference is still taken in
float32: there ``p`` may be so near one that 16 bits know no difference.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import is_op, nodes

_HALF = frozenset({ir.DataType.BFLOAT16, ir.DataType.FLOAT16})


def slope_of_scores(model: ir.Model, op: OpBuilder) -> int:
    """Let labels be marked in 16 bits, in place; return in how many gradients."""
    changed = 0
    for node in nodes(op.graph, "ScatterElements"):
        slope = _slope(node)
        if slope is not None:
            _narrow(op, slope)
            changed += 1
    return changed


@dataclasses.dataclass(frozen=True)
class _Slope:
    """Probabilities of which one per row is replaced, and the type that all are rounded to."""

    scatter: ir.Node
    casts: list[ir.Node]
    kind: ir.DataType


def _slope(scatter: ir.Node) -> _Slope | None:
    y = scatter.outputs[0]
    how = scatter.attributes.get("reduction")
    if y.is_graph_output() or (how is not None and how.as_string() != "none"):
        return None
    casts = [use.node for use in y.uses() if not _is_dead(use.node)]
    kinds = {n.outputs[0].dtype for n in casts if is_op(n, "Cast")}
    if len(kinds) != 1 or not all(is_op(n, "Cast") for n in casts) or not kinds <= _HALF:
        return None
    (kind,) = kinds
    if kind is None or _made_by(scatter.inputs[0], "Exp") is None:
        return None
    if not _is_less_one(scatter.inputs[2], scatter.inputs[0], scatter.inputs[1], scatter):
        return None
    return _Slope(scatter, casts, kind)


def _is_dead(node: ir.Node) -> bool:
    """Return whether nobody reads a node any more: passes before this one leave such behind."""
    return not any(y.uses() or y.is_graph_output() for y in node.outputs)


def _made_by(x: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if x is None else x.producer()
    return node if node is not None and is_op(node, op_type) else None


def _is_less_one(
    x: ir.Value | None, p: ir.Value | None, at: ir.Value | None, scatter: ir.Node
) -> bool:
    """Return whether a value is what ``p`` has at the places, less one."""
    sub = _made_by(x, "Sub")
    gather = None if sub is None else _made_by(sub.inputs[0], "GatherElements")
    one = None if sub is None else S.constant_of(sub.inputs[1])
    if gather is None or one is None or one.size != 1 or one.item() != 1.0:
        return False
    axes = [
        n.attributes["axis"].as_int() if "axis" in n.attributes else 0 for n in (gather, scatter)
    ]
    return gather.inputs[0] is p and gather.inputs[1] is at and axes[0] == axes[1]


def _narrow(op: OpBuilder, slope: _Slope) -> None:
    p, at, less = slope.scatter.inputs[:3]
    assert p is not None
    assert less is not None
    axis = S.attributes_of(slope.scatter, op.opset)["axis"]
    op.position = slope.scatter
    rounded, label = op.Cast(p, to=slope.kind), op.Cast(less, to=slope.kind)
    new = op.ScatterElements(rounded, at, label, axis=axis)
    for cast in slope.casts:
        y = cast.outputs[0]
        replace_value(y, new, list(y.uses()))


__all__ = ["slope_of_scores"]
