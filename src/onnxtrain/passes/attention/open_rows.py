"""Attention without the exporters' guard against rows that are masked as a whole.

Such a row is a softmax of minus infinities, which is NaN; exporters put ``Where(IsNaN(p), 0, p)``
behind it, two passes over all scores and two more in the gradient. Here the mask's infinities
become large numbers, so that no row is NaN, and what attention gives for a masked row is set to
zero behind the product with the values, which is far smaller.

Masks of finite numbers need no guard: where all keys have the lowest one, all weigh the same. What
a mask holds has to be seen; one of infinities and of numbers nearly as low keeps its guard.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nan_guard import nan_guard
from onnxtrain.graph.nodes import is_op, nodes

_CLOSED = -1e30  # its exponential is 0 beside any score, and it is no infinity
_OPEN = -1e29
_MOVES = ("Expand", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")


def open_rows(model: ir.Model, op: OpBuilder) -> int:
    """Move guards of attention's softmax behind the product; return how many moved or went."""
    order = list(op.graph)
    following = dict(zip(order, [*order[1:], None], strict=True))
    moved = 0
    for node in nodes(op.graph, "Softmax"):
        guarded = _guarded(node)
        if guarded is None:
            continue
        _move(op, guarded, following[guarded.product])
        moved += 1
    return moved


@dataclasses.dataclass(frozen=True)
class _Guarded:
    """A softmax over the last axis, its mask and guard, and the product that reads it."""

    softmax: ir.Node
    test: ir.Node
    guard: ir.Node
    product: ir.Node
    add: ir.Node
    mask: ir.Value
    at: int
    """Which operand of ``add`` is the mask."""
    infinite: bool
    """Whether there are infinities in the mask."""


def _guarded(softmax: ir.Node) -> _Guarded | None:
    p = softmax.outputs[0]
    x = softmax.inputs[0]
    if p.dtype != ir.DataType.FLOAT or x is None:
        return None
    rank, axis = len(S.dims_of(p) or ()), softmax.attributes.get("axis")
    if rank < 3 or (axis is not None and axis.as_int() not in (-1, rank - 1)):
        return None
    found = nan_guard(p)
    if found is None:
        return None
    guard = found.guard
    uses = list(guard.outputs[0].uses())
    if len(uses) != 1 or guard.outputs[0].is_graph_output():
        return None
    product = uses[0].node
    if not is_op(product, "MatMul") or uses[0].idx != 0 or product.graph is not softmax.graph:
        return None
    if product.outputs[0].is_graph_output():  # callers hold on to it
        return None
    add = x.producer()
    if add is None or not is_op(add, "Add") or len(x.uses()) != 1 or x.is_graph_output():
        return None
    at = _mask_of(add)
    mask = None if at is None else add.inputs[at]
    infinite = None if mask is None else _may_be_infinite(mask)
    if at is None or mask is None or infinite is None:
        return None
    return _Guarded(softmax, found.test, guard, product, add, mask, at, infinite)


def _mask_of(add: ir.Node) -> int | None:
    """Return which operand of a sum is no product of queries and keys."""
    sides = [x for x in add.inputs if x is not None]
    if len(sides) != 2:
        return None
    scores = [_is_score(x) for x in sides]
    return None if scores[0] == scores[1] else scores.index(False)


def _may_be_infinite(mask: ir.Value) -> bool | None:
    """Return whether a mask holds infinities, ``None`` if it is not seen, or they do not differ."""
    numbers = _numbers(mask)
    if numbers is None or not (numbers < np.inf).all():
        return None
    finite = numbers[np.isfinite(numbers)]
    if len(finite) == len(numbers):
        return False
    return True if (finite > _OPEN).all() else None


def _numbers(x: ir.Value | None) -> np.ndarray | None:
    """Return the numbers that a value's elements are among, ``None`` if that is not seen."""
    known, node = S.constant_of(x), None if x is None else x.producer()
    if known is not None:
        return np.unique(known)
    if node is None or not is_op(node, "Where", *_MOVES):
        return None
    parts = [_numbers(y) for y in (node.inputs[1:] if is_op(node, "Where") else node.inputs[:1])]
    seen = [part for part in parts if part is not None]
    return np.concatenate(seen) if len(seen) == len(parts) else None


def _is_score(x: ir.Value) -> bool:
    node = x.producer()
    while node is not None and is_op(node, "Mul", "Div") and node.inputs[0] is not None:
        numbers = [S.constant_of(v) for v in node.inputs]
        if numbers[1] is None or numbers[1].size != 1:
            return False
        node = node.inputs[0].producer()
    return node is not None and is_op(node, "MatMul", "Gemm", "Einsum")


def _move(op: OpBuilder, guarded: _Guarded, following: ir.Node | None) -> None:
    product, y = guarded.product, guarded.product.outputs[0]
    product.replace_input_with(0, guarded.softmax.outputs[0])
    op.graph.remove([guarded.guard, guarded.test], safe=True)
    if not guarded.infinite:
        return
    op.position = guarded.add
    mask = op.Max(guarded.mask, _CLOSED)  # fixed_masks computes what is known, without weights
    is_open = op.Greater(op.ReduceMax(mask, [-1], keepdims=1), _OPEN)
    guarded.add.replace_input_with(guarded.at, mask)
    uses = list(y.uses())
    op.position = following
    replace_value(y, op.Where(is_open, y, 0.0), uses)
