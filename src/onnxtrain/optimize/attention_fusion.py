"""Rewrites of attention: the fused operator, constant masks, NaN guards and sums of its gradient.

Below, `P = Softmax(S)` are the attention weights of scores `S = Q K^T`, and `Y = P V` is the
output. Most passes are for CUDA, where a pass over `S` costs more than the matmuls that make it.

- `fuse_attention`: `MatMul(Softmax(c Q K^T), V) -> Attention(Q, K, V)` in the forward pass.
- `fold_constant_masks`: masks that depend on no input become constants, or vanish.
- `remove_nan_guard`: `Where(IsNaN(P), 0, P) V` becomes `Where(row is not masked, P V, 0)`.
- `fold_row_subtraction`: `A B - r` becomes one matmul, `[A, r] [B; -1]`.
- `row_sums_from_attention_output`: `sum(P * (dY V^T))` becomes `sum(dY * Y)`.
- `split_qkv`: queries, keys and values are split off a packed projection without a transpose.
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
from onnxtrain.graph.match import Match, checked
from onnxtrain.graph.nodes import is_op, nan_guard, nodes
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.simplify.constant_subgraphs import FoldableValues
from onnxtrain.graph.simplify.dead_code import remove_dead_nodes
from onnxtrain.importer import mark_constants
from onnxtrain.modes.mixed_precision import ATTENTION_OPSET, can_upgrade_opset, upgrade_opset

# Attention by the operator of that name.


def fuse_attention(model: ir.Model, op: OpBuilder) -> int:
    """Replace attention whose scores nothing else reads with Attention; return how many.

    CUDA's kernel never writes the scores. onnxruntime has no gradient kernel for it, so the pass
    only fits where the backward pass recomputes the scores, as `rematerialize` arranges.
    """
    fusable: list[tuple[AttentionScores, ir.Node]] = []
    for node in nodes(model.graph, "Softmax"):
        scores = match_attention_scores(node)
        matmul = None if scores is None else _output_matmul(scores)
        if scores is not None and matmul is not None:
            fusable.append((scores, matmul))
    if not fusable or not can_upgrade_opset(model, ATTENTION_OPSET):
        return 0
    upgrade_opset(model, ATTENTION_OPSET)
    op.opset = model.opset_imports[""]
    for scores, matmul in fusable:
        op.position = matmul
        y, values = matmul.outputs[0], matmul.inputs[1]
        query, keys = scores.query, _transposed_keys(op, scores)
        if scores.unpadded is not None:
            length, width = scores.unpadded
            query = query if op.dims(query)[-1] == width else op.Slice(query, [0], [width], [3])
            keys = op.Slice(keys, [0, 0], [length, width], [2, 3])
            values = op.Slice(values, [0], [length], [2])
        fused = op.Attention(query, keys, values, scale=attention_scale(scores))
        replace_value(y, fused, list(y.uses()))
    return len(fusable)


def _transposed_keys(op: OpBuilder, scores: AttentionScores) -> ir.Value:
    """Return the keys as rows.

    The two reshapes make the transpose differ from that of the backward pass. onnxruntime would
    merge equal nodes and keep the result in memory until the backward pass reads it.
    """
    shape = [d if isinstance(d, int) else -1 for d in S.dims_of(scores.key) or ()]
    transposed = op.Transpose(op.Reshape(scores.key, [1, *shape]), perm=[0, 1, 2, 4, 3])
    return op.Reshape(transposed, [*shape[:2], shape[3], shape[2]])


def _output_matmul(scores: AttentionScores) -> ir.Node | None:
    """Return the matmul of attention's weights with the values, if Attention can replace both."""
    p = scores.nodes[-1].outputs[0]
    uses = live_uses(p)
    if not scores.fits_fused_attention or len(uses) != 1 or p.is_graph_output():
        return None
    node, index = uses[0]
    if not is_op(node, "MatMul") or index != 0 or node.inputs[1] is None:
        return None
    query, values = S.dims_of(scores.query), S.dims_of(node.inputs[1])
    if query is None or values is None or len(values) != 4:
        return None
    return node if (*values[:2], values[3]) == (*query[:2], scores.width) else None


# Constant masks.


def fold_constant_masks(model: ir.Model, op: OpBuilder) -> int:
    """Fold masks that depend on no input; return how many nodes changed or were removed.

    Once all sizes are static, an exporter's causal mask is constant: equal for all rows of the
    batch and all layers, or zero everywhere. Axes along which all elements are equal get size 1,
    and `x + 0` and `Where(true, x, 0)` become `x`.
    """
    foldable = FoldableValues(op.graph, op.opset, T.COMPUTED_MASK_ELEMENTS)
    changed = 0
    for node in nodes(op.graph, "Add", "Sub", "Where"):
        y = node.outputs[0]
        if y in foldable:
            continue
        for i, x in enumerate(node.inputs):
            if x in foldable and (y.uses() or y.is_graph_output()):
                changed += _fold_mask(op, node, i, foldable)
    return changed


def _fold_mask(op: OpBuilder, node: ir.Node, index: int, foldable: FoldableValues) -> int:
    """Replace a constant operand with a smaller constant, or bypass the node."""
    x, y = node.inputs[index], node.outputs[0]
    array = None if x is None else foldable.array(x)
    sizes = D.static_sizes(S.dims_of(y))
    if x is None or array is None or not array.size:
        return 0
    same = _passthrough_operand(node, index, array)
    if same is not None and S.same_shape(same, y) and not y.is_graph_output():
        replace_value(y, same, list(y.uses()))
        return 1
    others = [S.dims_of(z) for j, z in enumerate(node.inputs) if j != index and z is not None]
    array = _squeeze_equal_axes(array, sizes, [D.static_sizes(d) for d in others])
    stored = x.const_value.size if x.const_value is not None else T.CONSTANT_MASK_ELEMENTS + 1
    if array.size >= stored:
        return 0
    node.replace_input_with(index, op.const(array, x.dtype))
    return 1


def _passthrough_operand(node: ir.Node, index: int, array: np.ndarray) -> ir.Value | None:
    """Return the operand that a node returns unchanged."""
    if is_op(node, "Where"):
        if index != 0 or array.any() != array.all():
            return None
        return node.inputs[1 if array.flat[0] else 2]
    if array.any() or (is_op(node, "Sub") and index == 0):
        return None
    return node.inputs[1 - index]


def _squeeze_equal_axes(
    array: np.ndarray, sizes: list[int] | None, others: list[list[int] | None]
) -> np.ndarray:
    """Return an array with size 1 along axes of equal elements that another operand broadcasts."""
    for axis in range(array.ndim):
        back = axis - array.ndim  # broadcasting aligns the last axes
        if sizes is None or array.shape[axis] == 1:
            continue
        has_size = any(d is not None and len(d) >= -back and d[back] == sizes[back] for d in others)
        first = array.take([0], axis)
        if has_size and (array == first).all():
            array = first
    return array


# NaN guards.

_MASKED_SCORE = -1e30  # finite, and its exponential is 0 next to any score
_UNMASKED_SCORE = -1e29
_MOVES = ("Expand", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")


def remove_nan_guard(model: ir.Model, op: OpBuilder) -> int:
    """Move NaN guards from attention's weights to its output; return how many moved or vanished.

    The softmax of a fully masked row is NaN, and exporters write `Where(IsNaN(P), 0, P)`: two
    passes over all scores, and two more in the gradient. Instead, infinities of the mask become
    large finite numbers, and rows of the much smaller output are set to zero where the mask is
    full:

        before:  P = Softmax(S + mask);  Where(IsNaN(P), 0, P) V
        after:   m = Max(mask, -1e30);  P = Softmax(S + m);  Where(max(m) > -1e29, P V, 0)

    A mask without infinities needs no guard. A mask with infinities and finite numbers almost as
    low, or with unknown elements, keeps its guard.
    """
    order = list(op.graph)
    following = dict(zip(order, [*order[1:], None], strict=True))
    moved = 0
    for node in nodes(op.graph, "Softmax"):
        guarded = _find_guarded_softmax(node)
        if guarded is None:
            continue
        _move_guard(op, guarded, following[guarded.matmul])
        moved += 1
    return moved


@dataclasses.dataclass(frozen=True)
class _GuardedSoftmax:
    """A softmax over the last axis, its mask and guard, and the matmul that reads the guard.

    Attributes:
        mask_index: which operand of `add` is the mask.
        has_infinities: whether the mask has elements that are minus infinity.
    """

    softmax: ir.Node
    test: ir.Node
    guard: ir.Node
    matmul: ir.Node
    add: ir.Node
    mask: ir.Value
    mask_index: int
    has_infinities: bool


def _find_guarded_softmax(softmax: ir.Node) -> _GuardedSoftmax | None:
    p = softmax.outputs[0]
    x = softmax.inputs[0]
    if p.dtype != ir.DataType.FLOAT or x is None:
        return None
    rank, axis = len(S.dims_of(p) or ()), softmax.attributes.get("axis")
    if rank < 3 or (axis is not None and axis.as_int() not in (-1, rank - 1)):
        return None
    nodes_ = nan_guard(p)
    if nodes_ is None:
        return None
    guard = nodes_.guard
    uses = list(guard.outputs[0].uses())
    if len(uses) != 1 or guard.outputs[0].is_graph_output():
        return None
    matmul = uses[0].node
    if not is_op(matmul, "MatMul") or uses[0].idx != 0 or matmul.graph is not softmax.graph:
        return None
    if matmul.outputs[0].is_graph_output():  # callers hold on to output values
        return None
    add = x.producer()
    if add is None or not is_op(add, "Add") or len(x.uses()) != 1 or x.is_graph_output():
        return None
    index = _mask_index(add)
    mask = None if index is None else add.inputs[index]
    infinities = None if mask is None else _has_infinities(mask)
    if index is None or mask is None or infinities is None:
        return None
    return _GuardedSoftmax(softmax, nodes_.test, guard, matmul, add, mask, index, infinities)


def _mask_index(add: ir.Node) -> int | None:
    """Return which operand of a sum is not a matmul of queries and keys."""
    sides = [x for x in add.inputs if x is not None]
    if len(sides) != 2:
        return None
    scores = [_is_scaled_matmul(x) for x in sides]
    return None if scores[0] == scores[1] else scores.index(False)


def _has_infinities(mask: ir.Value) -> bool | None:
    """Return whether a mask has infinities; None if unknown, or if finite elements are as low."""
    elements = _possible_elements(mask)
    if elements is None or not (elements < np.inf).all():
        return None
    finite = elements[np.isfinite(elements)]
    if len(finite) == len(elements):
        return False
    return True if (finite > _UNMASKED_SCORE).all() else None


def _possible_elements(x: ir.Value | None) -> np.ndarray | None:
    """Return a superset of a value's elements, or None if it depends on inputs."""
    constant, node = S.constant_of(x), None if x is None else x.producer()
    if constant is not None:
        return np.unique(constant)
    if node is None or not is_op(node, "Where", *_MOVES):
        return None
    operands = node.inputs[1:] if is_op(node, "Where") else node.inputs[:1]
    parts = [_possible_elements(y) for y in operands]
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if len(known) == len(parts) else None


def _is_scaled_matmul(x: ir.Value) -> bool:
    node = x.producer()
    while node is not None and is_op(node, "Mul", "Div") and node.inputs[0] is not None:
        factor = S.constant_of(node.inputs[1])
        if factor is None or factor.size != 1:
            return False
        node = node.inputs[0].producer()
    return node is not None and is_op(node, "MatMul", "Gemm", "Einsum")


def _move_guard(op: OpBuilder, guarded: _GuardedSoftmax, following: ir.Node | None) -> None:
    matmul, y = guarded.matmul, guarded.matmul.outputs[0]
    matmul.replace_input_with(0, guarded.softmax.outputs[0])
    op.graph.remove([guarded.guard, guarded.test], safe=True)
    if not guarded.has_infinities:
        return
    op.position = guarded.add
    # `fold_constant_masks` folds both nodes where the mask is constant.
    mask = op.Max(guarded.mask, _MASKED_SCORE)
    is_unmasked = op.Greater(op.ReduceMax(mask, [-1], keepdims=1), _UNMASKED_SCORE)
    guarded.add.replace_input_with(guarded.mask_index, mask)
    uses = list(y.uses())
    op.position = following
    replace_value(y, op.Where(is_unmasked, y, 0.0), uses)


# Subtraction from the rows of a matmul.

_ALIGNMENT = 8  # elements; CUDA's fast matmul kernels need rows of whole 128-bit words


def fold_row_subtraction(model: ir.Model, op: OpBuilder) -> int:
    """Fold subtractions from the rows of a matmul into the matmul; return how many.

        before:  A B - r
        after:   [A, r] [B; -1]

    The gradient of attention's softmax subtracts a sum per row from `dY V^T`, the product of narrow
    matrices. Appending columns to those saves a pass over all scores. Eight columns keep rows
    aligned; unused ones are multiplied by zero.

    CUDA may round float32 operands to 10 bits (TF32). So `r` is split into a part of 8 bits and the
    rest. In 16 bits `r` has that type already, and the difference is rounded once instead of twice.
    """
    remove_dead_nodes(op.graph)  # dead nodes count as readers
    changed = 0
    for node in nodes(op.graph, "Sub"):
        match = _row_subtraction.match(node)
        if match is not None:
            op.position = node
            y = node.outputs[0]
            replace_value(y, _augmented_matmul(op, match), list(y.uses()))
            changed += 1
    return changed


def _check_row_subtraction(match: Match) -> bool | str:
    product, y = match["product"], match.root.outputs[0]
    if product.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        return "the type is not a float of at most 32 bits"
    a, b, rows = (D.static_sizes(S.dims_of(match[name])) for name in ("a", "b", "rows"))
    if a is None or b is None or rows is None or len(a) < 3 or y.is_graph_output():
        return "sizes are not static, or there is no batch"
    *lead, height, inner = a
    if rows != [*lead, height, 1] or b[:-1] != [*lead, inner]:
        return "operands are broadcast"
    columns = b[-1]
    if math.prod([*lead, height, columns]) < T.COALESCED_BROADCAST_ELEMENTS:
        return "the product is small"
    return columns >= T.ROW_SUBTRACTION_COLUMN_RATIO * inner or "the left operand is too wide"


@checked(_check_row_subtraction)
def _row_subtraction(op, a, b, rows):
    return op.Sub(op.MatMul(a, b).once().named("product"), rows)


def _augmented_matmul(op: OpBuilder, match: Match) -> ir.Value:
    """Return `[A, r] [B; -1]`."""
    rows = match["rows"]
    parts = [rows]
    if rows.dtype == ir.DataType.FLOAT:
        coarse = op.Cast(op.Cast(rows, to=ir.DataType.BFLOAT16), to=ir.DataType.FLOAT)
        parts = [coarse, op.Sub(rows, coarse)]
    signs = [-1.0] * len(parts) + [0.0] * (_ALIGNMENT - len(parts))
    padding = [parts[-1]] * (_ALIGNMENT - len(parts))  # multiplied by zeros
    a = op.Concat(match["a"], *parts, *padding, axis=-1)
    return op.MatMul(a, _append_sign_rows(op, match["b"], signs))


def _append_sign_rows(op: OpBuilder, b: ir.Value, signs: list[float]) -> ir.Value:
    """Append constant rows to `b`; a transpose stays next to the matmul, which absorbs it."""
    transpose = b.producer()
    *lead, _, columns = op.dims(b)
    rank = op.rank(b)
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    is_transpose = transpose is not None and is_op(transpose, "Transpose")
    perm = transpose.attributes.get("perm") if transpose is not None and is_transpose else None
    if transpose is not None and perm is not None and list(perm.as_ints()) == swapped:
        extra = op.Expand(op.const(signs, b.dtype), [*lead, columns, _ALIGNMENT])
        return op.Transpose(op.Concat(transpose.inputs[0], extra, axis=-1), perm=swapped)
    extra = op.Expand(op.const([[s] for s in signs], b.dtype), [*lead, _ALIGNMENT, columns])
    return op.Concat(b, extra, axis=-2)


# Row sums of the softmax gradient.


def row_sums_from_attention_output(model: ir.Model, op: OpBuilder) -> int:
    """Replace row sums of `P * dP` with row sums of `dY * Y`; return how many.

    The gradient of softmax needs `sum(P * dP)` per row. With `dP = dY V^T` and `Y = P V` that
    equals `sum(dY * Y)`: rows are as long as a head instead of the sequence, and `P * dP` is never
    written.

    Masks, transposes and splits between `Y` and the next layer are followed as far as they are
    undone in the gradient. There both values are computed anyway.
    """
    changed = 0
    for node in nodes(model.graph, "ReduceSum"):
        pair = _find_output_and_grad(node)
        if pair is None:
            continue
        op.position = node
        total = op.ReduceSum(op.Mul(pair.grad, pair.output), [-1], keepdims=1)
        if pair.perm is not None:
            total = op.Transpose(total, perm=pair.perm)
        if pair.part is not None:
            split, index = pair.part
            parts = op.Split(total, split.inputs[1], axis=_axis(split), _outputs=len(split.outputs))
            total = parts[index]
        y = node.outputs[0]
        replace_value(y, total, list(y.uses()))
        changed += 1
    if changed:
        model.graph.sort()  # with recomputation, the output may come after the old sums
    return changed


@dataclasses.dataclass(frozen=True)
class _OutputAndGrad:
    """Attention's output and its gradient, after the same transpose and concatenation.

    Attributes:
        grad: `dY`.
        output: `Y`.
        perm: the transpose that brings row sums back to the order of axes of the scores.
        part: the Split, and which of its outputs the scores belong to.
    """

    grad: ir.Value
    output: ir.Value
    perm: tuple[int, ...] | None = None
    part: tuple[ir.Node, int] | None = None


def _find_output_and_grad(total: ir.Node) -> _OutputAndGrad | None:
    """Return what to sum instead of `sum(P * (dY V^T))`."""
    terms = total.inputs[0]
    product = None if terms is None else terms.producer()
    if terms is None or product is None or not is_op(product, "Mul"):
        return None
    if len(terms.uses()) != 1 or terms.is_graph_output() or not _reduces_last_axis(total):
        return None
    for weights_grad, weights in (tuple(product.inputs), tuple(reversed(product.inputs))):
        matmul = None if weights_grad is None else weights_grad.producer()
        if weights is None or matmul is None or not is_op(matmul, "MatMul"):
            continue
        dy, transposed_values = matmul.inputs
        for reader, index in weights.uses():
            if index != 0 or not is_op(reader, "MatMul") or reader.graph is not total.graph:
                continue
            y = reader.outputs[0]
            if dy is None or not _is_matrix_transpose(reader.inputs[1], transposed_values):
                continue
            if S.same_shape(dy, y) and _has_shorter_rows(y, weights):
                return _follow_layout(_OutputAndGrad(dy, y))
    return None


def _has_shorter_rows(y: ir.Value, weights: ir.Value) -> bool:
    width, length = ((S.dims_of(v) or (None,))[-1] for v in (y, weights))
    return isinstance(width, int) and (not isinstance(length, int) or width < length)


def _reduces_last_axis(node: ir.Node) -> bool:
    axes = S.constant_of(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else None
    keepdims, x = node.attributes.get("keepdims"), node.inputs[0]
    rank = None if x is None or x.shape is None else len(x.shape)
    return (
        axes is not None
        and axes.size == 1
        and int(axes.item()) in (-1, (rank or 0) - 1)
        and (keepdims is None or keepdims.as_int() == 1)
    )


def _is_matrix_transpose(x: ir.Value | None, y: ir.Value | None) -> bool:
    """Return whether `y` is `x` with its last two axes swapped."""
    if x is None or y is None:
        return False
    (a, p), (b, q) = _transposed_source(x), _transposed_source(y)
    if a is not b or a.shape is None:
        return False
    order = list(range(len(a.shape)))
    p, q = list(p or order), list(q or order)
    return len(p) > 1 and q == [*p[:-2], p[-1], p[-2]]


def _transposed_source(x: ir.Value) -> tuple[ir.Value, tuple[int, ...] | None]:
    """Return the input and the permutation of the Transpose that computes a value."""
    node = x.producer()
    if node is None or not is_op(node, "Transpose") or node.inputs[0] is None:
        return x, None
    perm = node.attributes.get("perm")
    axes = reversed(range(len(x.shape or ()))) if perm is None else perm.as_ints()
    return node.inputs[0], tuple(axes)


def _follow_layout(pair: _OutputAndGrad) -> _OutputAndGrad:
    """Follow a mask, a transpose and a concatenation of the output that the gradient undoes."""
    while True:
        grad_node = pair.grad.producer()
        if grad_node is None or pair.perm is not None:
            return pair
        for reader, index in pair.output.uses():
            if is_op(grad_node, "Split") and is_op(reader, "Concat") and pair.part is None:
                further = _follow_concat(pair, grad_node, reader, index)
                if further is not None:
                    break
                continue
            if reader.graph is not grad_node.graph or len(grad_node.inputs) != len(reader.inputs):
                continue
            if is_op(grad_node, "Where") and is_op(reader, "Where") and index == 1:
                further = _follow_mask(pair, grad_node, reader)
            elif is_op(grad_node, "Transpose") and is_op(reader, "Transpose"):
                further = _follow_transpose(pair, grad_node, reader)
            else:
                continue
            if further is not None:
                break
        else:
            return pair
        pair = further


def _follow_mask(
    pair: _OutputAndGrad, grad_node: ir.Node, output_node: ir.Node
) -> _OutputAndGrad | None:
    """Both are zero at the same positions: one factor is enough to zero the product."""
    grad = grad_node.inputs[1]
    zeros = [
        S.constant_of(n.inputs[2]) for n in (grad_node, output_node) if n.inputs[2] is not None
    ]
    if grad is None or grad_node.inputs[0] is not output_node.inputs[0]:
        return None
    if not S.same_shape(grad, output_node.outputs[0]) or not S.same_shape(grad, pair.grad):
        return None
    if len(zeros) != 2 or any(z is None or z.any() for z in zeros):
        return None
    return _OutputAndGrad(grad, output_node.outputs[0], part=pair.part)


def _follow_concat(
    pair: _OutputAndGrad, split: ir.Node, concat: ir.Node, index: int
) -> _OutputAndGrad | None:
    """The output is one operand of a Concat, and the gradient is the same output of a Split."""
    grad, output = split.inputs[0], concat.outputs[0]
    if pair.grad is not split.outputs[index] or len(split.inputs) != 2 or grad is None:
        return None
    if not S.same_shape(grad, output) or len(split.outputs) != len(concat.inputs):
        return None
    parts = zip(split.outputs, concat.inputs, strict=True)
    if not all(x is not None and S.same_shape(x, y) for y, x in parts):
        return None
    rank = len(S.dims_of(grad) or ())
    if _axis(split) % rank != _axis(concat) % rank or _axis(split) % rank == rank - 1:
        return None
    return _OutputAndGrad(grad, output, part=(split, index))


def _axis(node: ir.Node) -> int:
    axis = node.attributes.get("axis")
    return 0 if axis is None else axis.as_int()


def _follow_transpose(
    pair: _OutputAndGrad, grad_node: ir.Node, output_node: ir.Node
) -> _OutputAndGrad | None:
    """The output is transposed except for its last axis, and the gradient is transposed back."""
    grad, back = _transposed_source(grad_node.outputs[0])
    _, there = _transposed_source(output_node.outputs[0])
    if back is None or there is None or back[-1] != len(back) - 1:
        return None
    if [back[i] for i in there] != sorted(back) and [there[i] for i in back] != sorted(back):
        return None
    return _OutputAndGrad(grad, output_node.outputs[0], back, pair.part)


# Packed projections.


def split_qkv(model: ir.Model, op: OpBuilder) -> int:
    """Split packed projections along their last axis; return how many.

    torch's MultiheadAttention computes queries, keys and values as one value `[..., 3 E]`, moves
    the three to the front and picks each. A Split moves no elements, and its gradient is a Concat:

        before:  Gather(Squeeze(Transpose(Unsqueeze(Reshape(x, [..., 3, E]), 0))), 0 | 1 | 2)
        after:   Split(x, axis=-1)
    """
    graph, existing, changed = model.graph, set(model.graph.initializers), 0
    order = {node: i for i, node in enumerate(graph)}
    for node in nodes(graph, "Squeeze"):
        match = _packed_projection.match(node)
        picks = [] if match is None else sorted(_picks(match) or (), key=lambda p: order[p[0]])
        if match is None or not picks:
            continue
        x, first = match["x"], picks[0][0]
        unpacked = S.dims_of(match["unpacked"])
        parts = None if unpacked is None else unpacked[-2]
        assert isinstance(parts, int)  # `_check_packed_projection` makes sure
        here = OpBuilder(graph, "parts/", target=op.target, before=first)
        sizes = [here.dims(first.outputs[0])[-1]] * parts
        pieces = here.Split(x, here.const(sizes), axis=op.rank(x) - 1, _outputs=parts)
        for pick, index in picks:
            pick.outputs[0].replace_all_uses_with(pieces[index])
        changed += 1
    mark_constants(model, set(graph.initializers) - existing)
    return changed


def _check_packed_projection(match: Match) -> bool | str:
    dims, unpacked = S.dims_of(match["x"]), S.dims_of(match["unpacked"])
    if dims is None or unpacked is None or None in dims or len(dims) + 1 != len(unpacked):
        return "the reshape does not add one axis"
    parts, width, rank = unpacked[-2], unpacked[-1], len(unpacked)
    if not isinstance(parts, int) or not isinstance(width, int) or dims[-1] != parts * width:
        return "the last axis is not split into parts"
    if list(unpacked[:-2]) != list(dims[:-1]):
        return "the reshape changes other axes"
    # The new first axis trades places with the parts.
    swapped = [rank - 1, *range(1, rank - 1), 0, rank]
    perm = match.node("transposed").attributes.get("perm")
    if perm is None or list(perm.as_ints()) != swapped:
        return "the transpose does not move the parts to the front"
    first, last = match.node("unsqueezed"), match.root
    if _axes(first, rank + 1) != [0] or _axes(last, rank + 1) != [rank - 1]:
        return "the new axis is not the one that is removed"
    return _picks(match) is not None or "something else than one part is read"


@checked(_check_packed_projection)
def _packed_projection(op, x):
    unpacked = op.Reshape(x, ...).once().named("unpacked")
    unsqueezed = op.Unsqueeze(unpacked, ...).once().named("unsqueezed")
    return op.Squeeze(op.Transpose(unsqueezed).once().named("transposed"), ...)


def _picks(match: Match) -> list[tuple[ir.Node, int]] | None:
    """Return the nodes that each pick one part, and which one; None if there are other readers."""
    y, parts = match.root.outputs[0], (S.dims_of(match["unpacked"]) or (0, 0))[-2]
    if y.is_graph_output() or not isinstance(parts, int):
        return None
    picks = []
    for node, operand in y.uses():
        index = _gathered_index(node) if operand == 0 and node.graph is y.graph else None
        if index is None or not -parts <= index < parts or node.outputs[0].is_graph_output():
            return None
        picks.append((node, index % parts))
    return picks


def _axes(node: ir.Node, rank: int) -> list[int] | None:
    axes = S.constant_of((*node.inputs, None)[1])
    return None if axes is None else [int(a) % rank for a in axes]


def _gathered_index(node: ir.Node) -> int | None:
    """Return the index of a Gather of one element along the first axis."""
    axis = node.attributes.get("axis")
    if not is_op(node, "Gather") or (axis is not None and axis.as_int() != 0):
        return None
    index = S.constant_of(node.inputs[1])
    return int(index) if index is not None and index.ndim == 0 else None
