"""Sums of 16-bit numbers over many rows, as gradients of biases are, in float32.

A kernel that sums columns adds the parts of its blocks at the same few places, one after the other.
For 16-bit numbers a GPU has no such addition in one instruction: over a hundred thousand rows it
takes thirty times as long as in float32. Where the numbers were float32 before they were rounded,
these are summed, whatever their count; that is more exact, too.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes import dims as D

_HALF = frozenset({ir.DataType.BFLOAT16, ir.DataType.FLOAT16})
FLOAT = ir.DataType.FLOAT


def sums_in_float32(model: ir.Model, op: OpBuilder) -> int:
    """Sum rows of 16-bit numbers in float32, in place; return how many sums there were."""
    return sum(_widen(op, node) for node in nodes(op.graph, "ReduceSum"))


def _widen(op: OpBuilder, node: ir.Node) -> int:
    x, y = node.inputs[0], node.outputs[0]
    rows = None if x is None or x.dtype not in _HALF else _rows(node, x)
    if x is None or x.dtype is None or rows is None or y.is_graph_output():
        return 0
    wide = _before_rounding(x)
    if wide is None and rows < T.HALF_SUM_ROWS:
        return 0
    uses = list(y.uses())
    op.position = node
    source = op.Cast(x, to=FLOAT) if wide is None else wide
    axes = list(range(S.rank_of(x) - 1))
    total = op.ReduceSum(source, axes, keepdims=S.attributes_of(node, op.opset)["keepdims"])
    rounded = [use for use in uses if not _widens(use.node)]
    for use in uses:
        if _widens(use.node):
            new = use.node.outputs[0]
            replace_value(new, total, list(new.uses()))
    if rounded:
        replace_value(y, op.Cast(total, to=x.dtype), rounded)
    return 1


def _rows(node: ir.Node, x: ir.Value) -> int | None:
    """Return how many rows are summed, if nothing but the last axis is left."""
    dims, axes = S.dims_of(x), S.constant_of((*node.inputs, None)[1])
    if dims is None or axes is None or len(dims) < 2:
        return None
    if sorted(int(a) % len(dims) for a in axes.ravel()) != list(range(len(dims) - 1)):
        return None
    sizes = D.numbers(dims[:-1])
    return None if sizes is None else math.prod(sizes)


def _before_rounding(x: ir.Value) -> ir.Value | None:
    """Return the float32 tensor that 16-bit numbers were made of."""
    cast = x.producer()
    if cast is None or not is_op(cast, "Cast"):
        return None
    source = cast.inputs[0]
    return source if source is not None and source.dtype == FLOAT else None


def _widens(node: ir.Node) -> bool:
    """Return whether a node only makes float32 of a sum."""
    return is_op(node, "Cast") and node.outputs[0].dtype == FLOAT and not _is_output(node)


def _is_output(node: ir.Node) -> bool:
    return node.outputs[0].is_graph_output()


__all__ = ["sums_in_float32"]
