"""Cross entropy's gradient in 16 bits from the start, where it is rounded to them in the end.

With ``bf16-mixed`` the scores of a large vocabulary come as 16-bit numbers. The loss needs their
logarithms of probabilities in float32; the gradient, ``p`` less one at the label, was made from
these in float32, over all classes, and rounded. A softmax reads and writes 16 bits and sums in
float32 all the same, so ``p`` comes from the scores themselves. At the label the difference is
still taken in float32: there ``p`` may be so near one that 16 bits know no difference.
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
    """Let gradients of cross entropy be made in 16 bits, in place; return how many are."""
    changed = 0
    for node in nodes(op.graph, "ScatterElements"):
        slope = _slope(node)
        if slope is not None:
            _narrow(op, slope)
            changed += 1
    return changed


@dataclasses.dataclass(frozen=True)
class _Slope:
    """Probabilities of which one per row is replaced, and what they were made of."""

    scatter: ir.Node
    casts: list[ir.Node]
    scores: ir.Value
    """The scores in 16 bits."""
    log_softmax: ir.Node


def _slope(scatter: ir.Node) -> _Slope | None:
    y = scatter.outputs[0]
    how = scatter.attributes.get("reduction")
    if y.is_graph_output() or (how is not None and how.as_string() != "none"):
        return None
    casts = [use.node for use in y.uses() if not _is_dead(use.node)]
    kinds = {n.outputs[0].dtype for n in casts if is_op(n, "Cast")}
    if len(kinds) != 1 or not all(is_op(n, "Cast") for n in casts) or not kinds <= _HALF:
        return None
    exp = _made_by(scatter.inputs[0], "Exp")
    log_softmax = None if exp is None else _made_by(exp.inputs[0], "LogSoftmax")
    wide = None if log_softmax is None else _made_by(log_softmax.inputs[0], "Cast")
    scores = None if wide is None else wide.inputs[0]
    if log_softmax is None or scores is None or scores.dtype not in kinds:
        return None
    if not _is_less_one(scatter.inputs[2], scatter.inputs[0], scatter.inputs[1], scatter):
        return None
    return _Slope(scatter, casts, scores, log_softmax)


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
    scatter, scores = slope.scatter, slope.scores
    kind, at = scores.dtype, scatter.inputs[1]
    assert kind is not None
    assert at is not None
    axis = S.attributes_of(scatter, op.opset)["axis"]
    op.position = scatter
    classes = S.attributes_of(slope.log_softmax, op.opset)["axis"]
    label = op.Exp(op.GatherElements(slope.log_softmax.outputs[0], at, axis=axis))
    less = op.Cast(op.Sub(label, 1.0), to=kind)
    new = op.ScatterElements(op.Softmax(scores, axis=classes), at, less, axis=axis)
    for cast in slope.casts:
        y = cast.outputs[0]
        replace_value(y, new, list(y.uses()))


__all__ = ["slope_of_scores"]
