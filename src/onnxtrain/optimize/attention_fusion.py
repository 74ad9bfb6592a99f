"""Attention in 16 bits by its own operator, where the backward pass makes its scores again.

CUDA's kernel for it writes no scores at all, and takes a fraction of the time of two products and a
softmax. It has no gradient of its own, so it stands for the forward pass alone: where nothing but
that reads the scores, which is what ``make_again`` leaves.

Masks that depend on no input: computed here, once for all rows of a batch, or left out.

Once sizes are numbers, an exporter's causal mask is known: the same for each row of the batch and
for each layer, or zero everywhere. As nodes it is kept for each row and added by a kernel for any
broadcast. ``x + 0 = x`` and ``Where(true, x, 0) = x`` leave the rest out, the guards of rows that
see nothing among it; an axis along which all elements are equal has size 1.

Attention without the exporters' guard against rows that are masked as a whole.

Such a row is a softmax of minus infinities, which is NaN; exporters put ``Where(IsNaN(p), 0, p)``
behind it, two passes over all scores and two more in the gradient. Here the mask's infinities
become large numbers, so that no row is NaN, and what attention gives for a masked row is set to
zero behind the product with the values, which is far smaller.

Masks of finite numbers need no guard: where all keys have the lowest one, all weigh the same. What
a mask holds has to be seen; one of infinities and of numbers nearly as low keeps its guard.

Numbers that are subtracted from the rows of a product, inside the product.

``A B - r = [A, r] [B; -1]``: the gradient of attention's softmax takes a row's sum from products
of short vectors, ``dY V^T - r``. With one column more there is no pass over all scores for that.
Eight columns keep rows whole words; those of ``B`` that are not needed are zero.

In float32 a GPU may round operands to 10 bits. So ``r`` is given in two parts: what is left of 8
bits, and the rest. In 16 bits ``r`` is a number of that type already, and the difference is rounded
once, not twice.

Sums over a gradient of attention's weights, from the smaller result of attention.

Softmax subtracts from the gradient of each row ``sum(P dP)``. Where ``dP = dY V^T`` and
``Y = P V``, that is ``sum(dY Y)``: rows as long as a head instead of rows as long as the sequence,
and ``P dP`` is never written.

Parts of a packed projection, cut out where they lie.

torch's MultiheadAttention computes queries, keys and values side by side as ``[..., 3 E]``, brings
the three to the front, ``[3, ..., E]``, and picks each. A Split of the last axis gives the same
numbers without moving all of them first, and its gradient joins the parts without moving them back.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.attention_scores import (
    AttentionScores,
    attention_scale,
    live_uses,
    match_attention_scores,
)
from onnxtrain.graph.builder import OpBuilder, replace_value
from onnxtrain.graph.nodes import is_op, nan_guard, nodes
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.simplify.constant_subgraphs import FoldableValues
from onnxtrain.graph.simplify.dead_code import remove_dead_nodes
from onnxtrain.importer import mark_constants
from onnxtrain.modes.mixed_precision import ATTENTION_OPSET, can_upgrade_opset, upgrade_opset


def fuse_attention(model: ir.Model, op: OpBuilder) -> int:
    """Replace attention whose scores nothing else reads, in place; return how often."""
    plain: list[tuple[AttentionScores, ir.Node]] = []
    for node in nodes(model.graph, "Softmax"):
        scores = match_attention_scores(node)
        product = None if scores is None else _result(scores)
        if scores is not None and product is not None:
            plain.append((scores, product))
    if not plain or not can_upgrade_opset(model, ATTENTION_OPSET):
        return 0
    upgrade_opset(model, ATTENTION_OPSET)
    op.opset = model.opset_imports[""]
    for scores, product in plain:
        op.position = product
        y, values = product.outputs[0], product.inputs[1]
        query, keys = scores.query, _transposed_keys(op, scores)
        if scores.counted is not None:
            length, width = scores.counted
            query = query if op.dims(query)[-1] == width else op.Slice(query, [0], [width], [3])
            keys = op.Slice(keys, [0, 0], [length, width], [2, 3])
            values = op.Slice(values, [0], [length], [2])
        again = op.Attention(query, keys, values, scale=attention_scale(scores))
        replace_value(y, again, list(y.uses()))
    return len(plain)


def _transposed_keys(op: OpBuilder, scores: AttentionScores) -> ir.Value:
    """Return the keys as rows.

    The backward pass has the same transpose inside its products. If it were the same node, its
    result would be kept until then.
    """
    shape = [d if isinstance(d, int) else -1 for d in S.dims_of(scores.key) or ()]
    turned = op.Transpose(op.Reshape(scores.key, [1, *shape]), perm=[0, 1, 2, 4, 3])
    return op.Reshape(turned, [*shape[:2], shape[3], shape[2]])


def _result(scores: AttentionScores) -> ir.Node | None:
    """Return the product that reads attention's weights, if the operator can stand for all."""
    p = scores.nodes[-1].outputs[0]
    uses = live_uses(p)
    if not scores.fits_fused_attention or len(uses) != 1 or p.is_graph_output():
        return None
    node, place = uses[0]
    if not is_op(node, "MatMul") or place != 0 or node.inputs[1] is None:
        return None
    query, values = S.dims_of(scores.query), S.dims_of(node.inputs[1])
    if query is None or values is None or len(values) != 4:
        return None
    return node if (*values[:2], values[3]) == (*query[:2], scores.width) else None


def fold_constant_masks(model: ir.Model, op: OpBuilder) -> int:
    """Compute masks that depend on no input; return how many nodes changed or went."""
    closed = FoldableValues(op.graph, op.opset, T.COMPUTED_MASK_ELEMENTS)
    changed = 0
    for node in nodes(op.graph, "Add", "Sub", "Where"):
        y = node.outputs[0]
        if y in closed:
            continue
        for i, x in enumerate(node.inputs):
            if x in closed and (y.uses() or y.is_graph_output()):
                changed += _fold_mask(op, node, i, closed)
    return changed


def _fold_mask(op: OpBuilder, node: ir.Node, at: int, closed: FoldableValues) -> int:
    """Put the elements of an operand in its place, or leave the node out."""
    x, y = node.inputs[at], node.outputs[0]
    array = None if x is None else closed.array(x)
    sizes = D.static_sizes(S.dims_of(y))
    if x is None or array is None or not array.size:
        return 0
    stands = _passthrough_operand(node, at, array)
    if stands is not None and S.same_shape(stands, y) and not y.is_graph_output():
        replace_value(y, stands, list(y.uses()))
        return 1
    others = [S.dims_of(z) for j, z in enumerate(node.inputs) if j != at and z is not None]
    array = _without_copies(array, sizes, [D.static_sizes(d) for d in others])
    kept = x.const_value.size if x.const_value is not None else T.CONSTANT_MASK_ELEMENTS + 1
    if array.size >= kept:
        return 0
    node.replace_input_with(at, op.const(array, x.dtype))
    return 1


def _passthrough_operand(node: ir.Node, at: int, array: np.ndarray) -> ir.Value | None:
    """Return the operand that a node gives as it is."""
    if is_op(node, "Where"):
        if at != 0 or array.any() != array.all():
            return None
        return node.inputs[1 if array.flat[0] else 2]
    if array.any() or (is_op(node, "Sub") and at == 0):
        return None
    return node.inputs[1 - at]


def _without_copies(
    array: np.ndarray, sizes: list[int] | None, others: list[list[int] | None]
) -> np.ndarray:
    """Return an array that gives the same where it is broadcast to ``sizes``."""
    for axis in range(array.ndim):
        back = axis - array.ndim  # counted from the last one, as broadcasting does
        if sizes is None or array.shape[axis] == 1:
            continue
        told = any(d is not None and len(d) >= -back and d[back] == sizes[back] for d in others)
        first = array.take([0], axis)
        if told and (array == first).all():
            array = first
    return array


_MASKED_SCORE = -1e30  # its exponential is 0 beside any score, and it is no infinity
_UNMASKED_SCORE = -1e29
_MOVES = ("Expand", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")


def remove_nan_guard(model: ir.Model, op: OpBuilder) -> int:
    """Move guards of attention's softmax behind the product; return how many moved or went."""
    order = list(op.graph)
    following = dict(zip(order, [*order[1:], None], strict=True))
    moved = 0
    for node in nodes(op.graph, "Softmax"):
        guarded = _find_guarded_softmax(node)
        if guarded is None:
            continue
        _move_guard(op, guarded, following[guarded.product])
        moved += 1
    return moved


@dataclasses.dataclass(frozen=True)
class _GuardedSoftmax:
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


def _find_guarded_softmax(softmax: ir.Node) -> _GuardedSoftmax | None:
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
    return _GuardedSoftmax(softmax, found.test, guard, product, add, mask, at, infinite)


def _mask_of(add: ir.Node) -> int | None:
    """Return which operand of a sum is no product of queries and keys."""
    sides = [x for x in add.inputs if x is not None]
    if len(sides) != 2:
        return None
    scores = [_is_score(x) for x in sides]
    return None if scores[0] == scores[1] else scores.index(False)


def _may_be_infinite(mask: ir.Value) -> bool | None:
    """Return whether a mask holds infinities, ``None`` if it is not seen, or they do not differ."""
    numbers = _possible_values(mask)
    if numbers is None or not (numbers < np.inf).all():
        return None
    finite = numbers[np.isfinite(numbers)]
    if len(finite) == len(numbers):
        return False
    return True if (finite > _UNMASKED_SCORE).all() else None


def _possible_values(x: ir.Value | None) -> np.ndarray | None:
    """Return the numbers that a value's elements are among, ``None`` if that is not seen."""
    known, node = S.constant_of(x), None if x is None else x.producer()
    if known is not None:
        return np.unique(known)
    if node is None or not is_op(node, "Where", *_MOVES):
        return None
    parts = [
        _possible_values(y) for y in (node.inputs[1:] if is_op(node, "Where") else node.inputs[:1])
    ]
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


def _move_guard(op: OpBuilder, guarded: _GuardedSoftmax, following: ir.Node | None) -> None:
    product, y = guarded.product, guarded.product.outputs[0]
    product.replace_input_with(0, guarded.softmax.outputs[0])
    op.graph.remove([guarded.guard, guarded.test], safe=True)
    if not guarded.infinite:
        return
    op.position = guarded.add
    mask = op.Max(
        guarded.mask, _MASKED_SCORE
    )  # fixed_masks computes what is known, without weights
    is_open = op.Greater(op.ReduceMax(mask, [-1], keepdims=1), _UNMASKED_SCORE)
    guarded.add.replace_input_with(guarded.at, mask)
    uses = list(y.uses())
    op.position = following
    replace_value(y, op.Where(is_open, y, 0.0), uses)


_ALIGNMENT = 8


def fold_row_subtraction(model: ir.Model, op: OpBuilder) -> int:
    """Subtract from rows of products inside them; return how often."""
    remove_dead_nodes(op.graph)  # what earlier passes left counts as no reader
    changed = 0
    for node in nodes(op.graph, "Sub"):
        difference = _difference(node)
        if difference is not None:
            op.position = node
            y = node.outputs[0]
            replace_value(y, _augmented_matmul(op, difference), list(y.uses()))
            changed += 1
    return changed


@dataclasses.dataclass(frozen=True)
class _Difference:
    """``a @ b - rows``; ``lead`` are the axes that a product is made for each of."""

    a: ir.Value
    b: ir.Value
    rows: ir.Value
    lead: list[int]


def _difference(node: ir.Node) -> _Difference | None:
    whole, rows = node.inputs
    product = None if whole is None else whole.producer()
    if whole is None or rows is None or product is None or not is_op(product, "MatMul"):
        return None
    if len(whole.uses()) != 1 or whole.is_graph_output() or product.graph is not node.graph:
        return None
    if whole.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        return None
    a, b = product.inputs
    sizes = [D.static_sizes(S.dims_of(x)) for x in (a, b, rows) if x is not None]
    if a is None or b is None or len(sizes) != 3 or node.outputs[0].is_graph_output():
        return None
    left, right, each = sizes
    if left is None or right is None or each is None or len(left) < 3:
        return None
    *lead, height, inner = left
    if each != [*lead, height, 1] or right[:-1] != [*lead, inner]:
        return None
    columns = right[-1]
    if math.prod([*lead, height, columns]) < T.COALESCED_BROADCAST_ELEMENTS:
        return None
    return (
        _Difference(a, b, rows, lead) if columns >= T.ROW_SUBTRACTION_COLUMN_RATIO * inner else None
    )


def _augmented_matmul(op: OpBuilder, it: _Difference) -> ir.Value:
    parts = [it.rows]
    if it.rows.dtype == ir.DataType.FLOAT:
        coarse = op.Cast(op.Cast(it.rows, to=ir.DataType.BFLOAT16), to=ir.DataType.FLOAT)
        parts = [coarse, op.Sub(it.rows, coarse)]
    signs = [-1.0] * len(parts) + [0.0] * (_ALIGNMENT - len(parts))
    fill = [parts[-1]] * (_ALIGNMENT - len(parts))  # meets zeros
    a = op.Concat(it.a, *parts, *fill, axis=-1)
    return op.MatMul(a, _with_rows(op, it, signs))


def _with_rows(op: OpBuilder, it: _Difference, signs: list[float]) -> ir.Value:
    """Return ``b`` with rows of equal numbers below it; what turns it stays next to the product."""
    turn = it.b.producer()
    columns = op.dims(it.b)[-1]
    rank = len(it.lead) + 2
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    perm = None if turn is None or not is_op(turn, "Transpose") else turn.attributes.get("perm")
    if turn is not None and perm is not None and list(perm.as_ints()) == swapped:
        extra = op.Expand(op.const(signs, it.b.dtype), [*it.lead, columns, _ALIGNMENT])
        return op.Transpose(op.Concat(turn.inputs[0], extra, axis=-1), perm=swapped)
    extra = op.Expand(op.const([[s] for s in signs], it.b.dtype), [*it.lead, _ALIGNMENT, columns])
    return op.Concat(it.b, extra, axis=-2)


def row_sums_from_attention_output(model: ir.Model, op: OpBuilder) -> int:
    """Sum over the shorter rows where two sums are the same; return how often."""
    changed = 0
    for node in nodes(model.graph, "ReduceSum"):
        pair = _output_and_grad(node)
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
class _OutputAndGrad:
    """What attention gives and its gradient, and how their sums must be transposed."""

    slope: ir.Value
    result: ir.Value
    turned: tuple[int, ...] | None = None
    part: tuple[ir.Node, int] | None = None
    """The Split that one of several parts comes from, and which one it is."""


def _output_and_grad(total: ir.Node) -> _OutputAndGrad | None:
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
            if S.same_shape(dy, y) and _is_not_wider(y, weights):
                return _before_mask_and_transpose(_OutputAndGrad(dy, y))
    return None


def _is_not_wider(y: ir.Value, weights: ir.Value) -> bool:
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


def _before_mask_and_transpose(pair: _OutputAndGrad) -> _OutputAndGrad:
    """Return the same two behind the mask of rows and the axes' order, where they are kept."""
    while True:
        before = pair.slope.producer()
        if before is None or pair.turned is not None:
            return pair
        for reader, place in pair.result.uses():
            if is_op(before, "Split") and is_op(reader, "Concat") and pair.part is None:
                further = _before_concat(pair, before, reader, place)
                if further is not None:
                    break
                continue
            if reader.graph is not before.graph or len(before.inputs) != len(reader.inputs):
                continue
            if is_op(before, "Where") and is_op(reader, "Where") and place == 1:
                further = _unmasked(pair, before, reader)
            elif is_op(before, "Transpose") and is_op(reader, "Transpose"):
                further = _before_transpose(pair, before, reader)
            else:
                continue
            if further is not None:
                break
        else:
            return pair
        pair = further


def _unmasked(pair: _OutputAndGrad, before: ir.Node, behind: ir.Node) -> _OutputAndGrad | None:
    """Both are zero in the same places: one of them says which."""
    slope = before.inputs[1]
    zeros = [S.constant_of(n.inputs[2]) for n in (before, behind) if n.inputs[2] is not None]
    if slope is None or before.inputs[0] is not behind.inputs[0]:
        return None
    if not S.same_shape(slope, behind.outputs[0]) or not S.same_shape(slope, pair.slope):
        return None
    if len(zeros) != 2 or any(z is None or z.any() for z in zeros):
        return None
    return _OutputAndGrad(slope, behind.outputs[0], part=pair.part)


def _before_concat(
    pair: _OutputAndGrad, before: ir.Node, behind: ir.Node, place: int
) -> _OutputAndGrad | None:
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
    return _OutputAndGrad(whole, joined, part=(before, place))


def _axis(node: ir.Node) -> int:
    axis = node.attributes.get("axis")
    return 0 if axis is None else axis.as_int()


def _before_transpose(
    pair: _OutputAndGrad, before: ir.Node, behind: ir.Node
) -> _OutputAndGrad | None:
    """The order of all axes but the last changes, and changes back."""
    slope, back = _source(before.outputs[0])
    _, there = _source(behind.outputs[0])
    if back is None or there is None or back[-1] != len(back) - 1:
        return None
    if [back[i] for i in there] != sorted(back) and [there[i] for i in back] != sorted(back):
        return None
    return _OutputAndGrad(slope, behind.outputs[0], back, pair.part)


def split_qkv(model: ir.Model, op: OpBuilder) -> int:
    """Cut packed projections where they lie; return how many."""
    graph, known, changed = model.graph, set(model.graph.initializers), 0
    for node in nodes(graph, "Transpose"):
        packed = _packed(node)
        if packed is None:
            continue
        x, parts, picks = packed
        here = OpBuilder(graph, "parts/", target=op.target, before=picks[0][0])
        dims = S.dims_of(x)
        assert dims is not None
        sizes = [here.dims(picks[0][0].outputs[0])[-1]] * parts
        cut = here.Split(x, here.const(sizes), axis=len(dims) - 1, _outputs=parts)
        for pick, index in picks:
            pick.outputs[0].replace_all_uses_with(cut[index])
        changed += 1
    mark_constants(model, set(graph.initializers) - known)
    return changed


def _packed(turn: ir.Node) -> tuple[ir.Value, int, list[tuple[ir.Node, int]]] | None:
    """Return what is packed, of how many parts, and the nodes that pick one each."""
    ahead = _before(turn, "Unsqueeze")
    apart = None if ahead is None else _before(ahead, "Reshape")
    after = _only_reader(turn, "Squeeze")
    if ahead is None or apart is None or after is None:
        return None
    x, wide = apart.inputs[0], S.dims_of(apart.outputs[0])
    dims = None if x is None else S.dims_of(x)
    if x is None or dims is None or wide is None or None in dims or len(dims) + 1 != len(wide):
        return None
    parts, width, rank = wide[-2], wide[-1], len(wide)
    if not isinstance(parts, int) or not isinstance(width, int) or dims[-1] != parts * width:
        return None
    if list(wide[:-2]) != list(dims[:-1]) or _axes(ahead, rank + 1) != [0]:
        return None
    perm = turn.attributes.get("perm")
    swapped = [rank - 1, *range(1, rank - 1), 0, rank]  # the new axis trades places with the parts
    if perm is None or list(perm.as_ints()) != swapped or _axes(after, rank + 1) != [rank - 1]:
        return None
    y, picks = after.outputs[0], []
    if y.is_graph_output():
        return None
    for node, at in y.uses():
        index = _index(node) if at == 0 and node.graph is turn.graph else None
        if index is None or not -parts <= index < parts or node.outputs[0].is_graph_output():
            return None
        picks.append((node, index % parts))
    order = {node: i for i, node in enumerate(turn.graph or ())}
    return (x, parts, sorted(picks, key=lambda p: order[p[0]])) if picks else None


def _before(node: ir.Node, kind: str) -> ir.Node | None:
    x = node.inputs[0]
    maker = None if x is None else x.producer()
    if x is None or maker is None or not is_op(maker, kind) or maker.graph is not node.graph:
        return None
    return maker if len(x.uses()) == 1 and not x.is_graph_output() else None


def _only_reader(node: ir.Node, kind: str) -> ir.Node | None:
    y = node.outputs[0]
    if len(y.uses()) != 1 or y.is_graph_output():
        return None
    ((reader, _),) = y.uses()
    return reader if is_op(reader, kind) and reader.graph is node.graph else None


def _axes(node: ir.Node, rank: int) -> list[int] | None:
    axes = S.constant_of((*node.inputs, None)[1])
    return None if axes is None else [int(a) % rank for a in axes]


def _index(node: ir.Node) -> int | None:
    """Return the position that a Gather of one element of the first axis reads."""
    axis = node.attributes.get("axis")
    if not is_op(node, "Gather") or (axis is not None and axis.as_int() != 0):
        return None
    index = S.constant_of(node.inputs[1])
    return int(index) if index is not None and index.ndim == 0 else None
