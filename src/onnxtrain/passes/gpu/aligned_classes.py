"""Scores of many classes, so many that kernels can read them in whole words.

A product whose rows are no multiple of eight numbers long has a slow kernel on a GPU, and so have
both products of its gradient: a vocabulary of 50,257 words costs up to twice the time of one of
50,264. So the weight gets rows for a few classes more, whose scores are so low that their
probability is zero and nothing comes back from them. The rows are no parameters: each of them reads
one number that is put behind every row of the input, and is always 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes.dims import Dim

_WORD = 8
_LOW = -1e30  # its exponential is zero beside any score, also in 16 bits


def aligned_classes(model: ir.Model, op: OpBuilder) -> int:
    """Add classes to losses over a number of them that is no multiple of eight; return how many."""
    return sum(_align(op, node) for node in nodes(op.graph, "SoftmaxCrossEntropyLoss"))


@dataclasses.dataclass(frozen=True)
class _Head:
    """The product that makes the scores of a loss, and what gives them another shape on the way."""

    product: ir.Node
    transposed: ir.Node | None
    """What turns the weight ``[classes, width]``; without it, it is ``[width, classes]``."""
    weight: ir.Value
    width: int
    classes: int
    views: list[ir.Node]
    casts: list[ir.Value]
    """The turned weight in other types."""


def _align(op: OpBuilder, loss: ir.Node) -> int:
    head = _head(loss)
    if head is None:
        return 0
    more, wider = -head.classes % _WORD, _WORD + -head.width % _WORD
    op.position = head.transposed or head.product
    assert head.weight.dtype is not None
    rows = np.zeros((more, head.width + wider))
    rows[:, head.width] = _LOW
    if head.transposed is not None:
        weight = op.Pad(head.weight, [0, 0, 0, wider])
        weight = op.Concat(weight, op.const(rows, head.weight.dtype), axis=0)
        head.transposed.replace_input_with(0, weight)
        for turned in (head.transposed.outputs[0], *head.casts):
            _set_dims(turned, [head.width + wider, head.classes + more])
    else:
        weight = op.Pad(head.weight, [0, 0, wider, 0])
        weight = op.Concat(weight, op.const(rows.T, head.weight.dtype), axis=1)
        head.product.replace_input_with(1, weight)
    op.position = head.product
    x = head.product.inputs[0]
    assert x is not None
    pads, kind = [0] * (2 * op.rank(x) - 1), x.dtype
    if kind == ir.DataType.BFLOAT16:  # CUDA pads none
        wide = op.Pad(op.Cast(x, to=ir.DataType.FLOAT), [*pads, wider], 1.0)
        head.product.replace_input_with(0, op.Cast(wide, to=kind))
    else:
        head.product.replace_input_with(0, op.Pad(x, [*pads, wider], op.const(1.0, kind)))
    _set_dims(head.product.outputs[0], [*(S.dims_of(x) or ())[:-1], head.classes + more])
    for view in head.views:
        _widen(op, view, head.classes, head.classes + more)
    return 1


def _head(loss: ir.Node) -> _Head | None:
    """Return what makes the scores of a loss, if nothing else reads them."""
    if len(loss.inputs) > 2 and loss.inputs[2] is not None:
        return None
    scores, views = loss.inputs[0], []
    while scores is not None:
        readers = {use.node for use in scores.uses() if _is_read(use.node)}
        node = scores.producer()
        if len(readers) != 1 or scores.is_graph_output() or node is None:
            return None
        if not is_op(node, "Reshape", "Cast"):
            return _product(node, loss, views)
        views.append(node)
        scores = node.inputs[0]
    return None


def _is_read(node: ir.Node) -> bool:
    """Return whether anything comes of a node; casts that nothing reads are left over."""
    return any(y.is_graph_output() or y.uses() for y in node.outputs)


def _product(node: ir.Node, loss: ir.Node, views: list[ir.Node]) -> _Head | None:
    dims = None if loss.inputs[0] is None else S.dims_of(loss.inputs[0])
    weight = node.inputs[1] if is_op(node, "MatMul") else None
    if weight is None or dims is None or len(dims) != 2 or node.graph is not loss.graph:
        return None
    classes = dims[1]
    if not isinstance(classes, int) or classes % _WORD == 0 or classes < T.ALIGNED_CLASSES:
        return None
    if any(is_op(v, "Reshape") and not _keeps(v, classes) for v in views):
        return None
    casts = []
    while (node_of := weight.producer()) is not None and is_op(node_of, "Cast"):
        if len(weight.uses()) != 1 or node_of.inputs[0] is None:
            return None
        casts.append(weight)
        weight = node_of.inputs[0]
    transposed = weight.producer()
    if transposed is not None:
        if not is_op(transposed, "Transpose") or len(weight.uses()) != 1:
            return None
        weight = transposed.inputs[0]
    sizes = None if weight is None else S.dims_of(weight)
    if weight is None or sizes is None or len(sizes) != 2:
        return None
    width = sizes[1] if transposed is not None else sizes[0]
    if not isinstance(width, int) or sizes[0 if transposed is not None else 1] != classes:
        return None
    if casts and transposed is None:
        return None
    return _Head(node, transposed, weight, width, classes, views, casts)


def _keeps(view: ir.Node, classes: int) -> bool:
    """Return whether a Reshape leaves the last axis alone, and says so by its number."""
    shape = S.constant_of(view.inputs[1])
    return shape is not None and shape.size > 1 and shape.ravel()[-1] in (classes, -1)


def _widen(op: OpBuilder, view: ir.Node, classes: int, wider: int) -> None:
    y = view.outputs[0]
    if is_op(view, "Reshape"):
        shape = S.constant_of(view.inputs[1])
        assert shape is not None
        sizes = [int(d) for d in shape.ravel()]
        if sizes[-1] == classes:
            op.position = view
            view.replace_input_with(1, op.const([*sizes[:-1], wider]))
    _set_dims(y, [*(S.dims_of(y) or ())[:-1], wider])


def _set_dims(x: ir.Value, dims: Sequence[Dim]) -> None:
    S.set_dims(x, tuple(dims))
