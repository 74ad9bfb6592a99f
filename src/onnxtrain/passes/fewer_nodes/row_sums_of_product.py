"""Sums over a gradient of attention's weights, from the smaller result of attention.

Softmax subtracts from the gradient of each row ``sum(P dP)``. Where ``dP = dY V^T`` and
``Y = P V``, that is ``sum(dY Y)``: rows as long as a head instead of rows as long as the sequence,
and ``P dP`` is never written.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import is_op, nodes


def row_sums_of_product(model: ir.Model, op: OpBuilder) -> int:
    """Sum over the shorter rows where two sums are the same; return how often."""
    changed = 0
    for node in nodes(model.graph, "ReduceSum"):
        pair = _pair(node)
        if pair is None:
            continue
        op.position = node
        total = op.ReduceSum(op.Mul(pair.slope, pair.result), [-1], keepdims=1)
        if pair.turned is not None:
            total = op.Transpose(total, perm=pair.turned)
        if pair.part is not None:
            cut, place = pair.part
            parts = op.Split(total, cut.inputs[1], axis=_axis(cut), _outputs=len(cut.outputs))
            total = parts[place]
        y = node.outputs[0]
        replace_value(y, total, list(y.uses()))
        changed += 1
    if changed:
        model.graph.sort()  # the result may stand behind the sums, where it is computed again
    return changed


@dataclasses.dataclass(frozen=True)
class _Pair:
    """What attention gives and its gradient, and how their sums must be transposed."""

    slope: ir.Value
    result: ir.Value
    turned: tuple[int, ...] | None = None
    part: tuple[ir.Node, int] | None = None
    """The Split that one of several parts comes from, and which one it is."""


def _pair(total: ir.Node) -> _Pair | None:
    """Return what to sum instead of ``sum(P (dY V^T))``."""
    terms = total.inputs[0]
    product = None if terms is None else terms.producer()
    if terms is None or product is None or not is_op(product, "Mul"):
        return None
    if len(terms.uses()) != 1 or terms.is_graph_output() or not _over_last_axis(total):
        return None
    for slope, weights in (tuple(product.inputs), tuple(reversed(product.inputs))):
        through = None if slope is None else slope.producer()
        if weights is None or through is None or not is_op(through, "MatMul"):
            continue
        dy, turned_values = through.inputs
        for reader, place in weights.uses():
            if place != 0 or not is_op(reader, "MatMul") or reader.graph is not total.graph:
                continue
            y = reader.outputs[0]
            if dy is None or not _transposes(reader.inputs[1], turned_values):
                continue
            if S.same_shape(dy, y) and _shorter(y, weights):
                return _where_kept(_Pair(dy, y))
    return None


def _shorter(y: ir.Value, weights: ir.Value) -> bool:
    """Return whether rows of the result are shorter, or as long as those of heads are."""
    width, length = ((S.dims_of(v) or (None,))[-1] for v in (y, weights))
    return isinstance(width, int) and (not isinstance(length, int) or width < length)


def _over_last_axis(node: ir.Node) -> bool:
    axes = S.constant_of(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else None
    kept, x = node.attributes.get("keepdims"), node.inputs[0]
    rank = None if x is None or x.shape is None else len(x.shape)
    return (
        axes is not None
        and axes.size == 1
        and int(axes.item()) in (-1, (rank or 0) - 1)
        and (kept is None or kept.as_int() == 1)
    )


def _transposes(x: ir.Value | None, y: ir.Value | None) -> bool:
    """Return whether ``y`` is ``x`` with its last two axes swapped."""
    if x is None or y is None:
        return False
    (a, p), (b, q) = _source(x), _source(y)
    if a is not b or a.shape is None:
        return False
    order = list(range(len(a.shape)))
    p, q = list(p or order), list(q or order)
    return len(p) > 1 and q == [*p[:-2], p[-1], p[-2]]


def _source(x: ir.Value) -> tuple[ir.Value, tuple[int, ...] | None]:
    """Return what a value is a Transpose of, and the order of its axes."""
    node = x.producer()
    if node is None or not is_op(node, "Transpose") or node.inputs[0] is None:
        return x, None
    given = node.attributes.get("perm")
    axes = reversed(range(len(x.shape or ()))) if given is None else given.as_ints()
    return node.inputs[0], tuple(axes)


def _where_kept(pair: _Pair) -> _Pair:
    """Return the same two behind the mask of rows and the axes' order, where they are kept."""
    while True:
        before = pair.slope.producer()
        if before is None or pair.turned is not None:
            return pair
        for reader, place in pair.result.uses():
            if is_op(before, "Split") and is_op(reader, "Concat") and pair.part is None:
                further = _joined(pair, before, reader, place)
                if further is not None:
                    break
                continue
            if reader.graph is not before.graph or len(before.inputs) != len(reader.inputs):
                continue
            if is_op(before, "Where") and is_op(reader, "Where") and place == 1:
                further = _unmasked(pair, before, reader)
            elif is_op(before, "Transpose") and is_op(reader, "Transpose"):
                further = _turned(pair, before, reader)
            else:
                continue
            if further is not None:
                break
        else:
            return pair
        pair = further


def _unmasked(pair: _Pair, before: ir.Node, behind: ir.Node) -> _Pair | None:
    """Both are zero in the same places: one of them says which."""
    slope = before.inputs[1]
    zeros = [S.constant_of(n.inputs[2]) for n in (before, behind) if n.inputs[2] is not None]
    if slope is None or before.inputs[0] is not behind.inputs[0]:
        return None
    if not S.same_shape(slope, behind.outputs[0]) or not S.same_shape(slope, pair.slope):
        return None
    if len(zeros) != 2 or any(z is None or z.any() for z in zeros):
        return None
    return _Pair(slope, behind.outputs[0], part=pair.part)


def _joined(pair: _Pair, before: ir.Node, behind: ir.Node, place: int) -> _Pair | None:
    """Both are one part of what is joined and cut in the same places."""
    whole, joined = before.inputs[0], behind.outputs[0]
    if pair.slope is not before.outputs[place] or len(before.inputs) != 2 or whole is None:
        return None
    if not S.same_shape(whole, joined) or len(before.outputs) != len(behind.inputs):
        return None
    pieces = zip(before.outputs, behind.inputs, strict=True)
    if not all(x is not None and S.same_shape(x, y) for y, x in pieces):
        return None
    rank = len(S.dims_of(whole) or ())
    if _axis(before) % rank != _axis(behind) % rank or _axis(before) % rank == rank - 1:
        return None
    return _Pair(whole, joined, part=(before, place))


def _axis(node: ir.Node) -> int:
    axis = node.attributes.get("axis")
    return 0 if axis is None else axis.as_int()


def _turned(pair: _Pair, before: ir.Node, behind: ir.Node) -> _Pair | None:
    """The order of all axes but the last changes, and changes back."""
    slope, back = _source(before.outputs[0])
    _, there = _source(behind.outputs[0])
    if back is None or there is None or back[-1] != len(back) - 1:
        return None
    if [back[i] for i in there] != sorted(back) and [there[i] for i in back] != sorted(back):
        return None
    return _Pair(slope, behind.outputs[0], back, pair.part)


__all__ = ["row_sums_of_product"]
