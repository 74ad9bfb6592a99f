"""Gradients of attention in parts, joined so that one part is done before the next begins.

The gradients of queries, keys and values of a part come from the same scores. Joined one by one,
each over all parts, the first of them would run through all parts and leave all scores behind for
the others. Joined as one value, which is cut again, they are made part by part.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.memory.forward_nodes import ancestors, forward_nodes
from onnxtrain.graph.nodes import is_op, nodes

_THROUGH = ("Mul", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Cast")


def parts_together(model: ir.Model, op: OpBuilder) -> int:
    """Join gradients that come from the same scores, in place; return how many."""
    groups: dict[tuple[ir.Node, ...], list[ir.Node]] = {}
    early = forward_nodes(model.graph)
    for node in nodes(model.graph, "Concat"):
        key = None if node in early else _scores_of_parts(node)
        if key is not None:
            groups.setdefault(key, []).append(node)
    count = 0
    for key, group in groups.items():
        alike = [n for n in group if _size(n) == _size(group[0])]
        if len(alike) < 2 or len(alike) * len(key) > T.CAPTURED_CONCAT_INPUTS:
            continue
        if any(ancestors(n.outputs[0]) & (set(alike) - {n}) for n in alike):
            continue  # one is made of another
        _join(op, alike)
        count += len(alike)
    if count:
        model.graph.sort()
    return count


def _scores_of_parts(concat: ir.Node) -> tuple[ir.Node, ...] | None:
    """Return the softmax that each part of a value goes back to, if it is stacked of them."""
    y, axis = concat.outputs[0], concat.attributes.get("axis")
    dims = S.dims_of(y)
    if dims is None or axis is None or len(concat.inputs) < 2:
        return None
    if any(d != 1 for d in dims[: axis.as_int() % len(dims)]) or _size(concat) is None:
        return None
    first = concat.inputs[0]
    softmaxes = []
    for x in concat.inputs:
        node = None if x is None else x.producer()
        if x is None or first is None or node is None or not is_op(node, "MatMul"):
            return None
        softmax = next((s for v in node.inputs if (s := _softmax(v)) is not None), None)
        if (
            softmax is None
            or _weighs(node, softmax)
            or not S.same_shape(x, first)
            or x.dtype != first.dtype
        ):
            return None
        softmaxes.append(softmax)
    return tuple(softmaxes) if len(set(softmaxes)) == len(softmaxes) else None


def _weighs(product: ir.Node, softmax: ir.Node) -> bool:
    """Return whether a product is the result of attention itself."""
    return product.inputs[0] is softmax.outputs[0]


def _softmax(x: ir.Value | None) -> ir.Node | None:
    node = None if x is None else x.producer()
    if node is None or is_op(node, "Softmax"):
        return node
    if not is_op(node, *_THROUGH):
        return None
    return next((s for v in node.inputs if (s := _softmax(v)) is not None), None)


def _size(concat: ir.Node) -> tuple[int, ir.DataType | None] | None:
    y = concat.outputs[0]
    dims = S.dims_of(y) or ()
    sizes = [d for d in dims if isinstance(d, int)]
    return (math.prod(sizes), y.dtype) if len(sizes) == len(dims) else None


def _join(op: OpBuilder, group: list[ir.Node]) -> None:
    op.position = group[0]
    parts, kinds = len(group[0].inputs), len(group)
    rows = [op.Reshape(node.inputs[i], [1, -1]) for i in range(parts) for node in group]
    whole = op.Reshape(op.Concat(*rows, axis=0), [parts, kinds, -1])
    cut = op.Split(whole, op.const([1] * kinds), axis=1, _outputs=kinds)
    for node, piece in zip(group, cut, strict=True):
        y = node.outputs[0]
        joined = op.Reshape(piece, [d for d in S.dims_of(y) or () if isinstance(d, int)])
        replace_value(y, joined, list(y.uses()))


__all__ = ["parts_together"]
