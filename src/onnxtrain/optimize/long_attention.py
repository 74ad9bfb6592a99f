"""Attention over long sequences on CUDA: padded keys, and chunks of the batch.

- `pad_attention_keys`: keys and values get a few more rows, so that rows of scores are aligned.
- `chunked_attention`: attention runs for a chunk of the batch at a time, so that only the scores of
  one chunk are in memory.
- `group_attention_chunk_grads`: gradients of all chunks are concatenated together, so that one
  chunk is finished before the next begins.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.attention_scores import (
    PADDED_ATTENTION,
    AttentionScores,
    live_uses,
    match_attention_scores,
)
from onnxtrain.graph.builder import OpBuilder, copy_node, replace_value
from onnxtrain.graph.memory_usage import ancestors, forward_nodes
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.importer import constant_names

# Padded keys.

_ALIGNMENT_BITS = 128  # CUDA's fast matmul kernels read this many bits at once
_MASKED_SCORE = -1e30  # finite, and its exponential is zero next to any score
_TYPES = (ir.DataType.FLOAT, ir.DataType.BFLOAT16)


def pad_attention_keys(model: ir.Model, op: OpBuilder) -> int:
    """Pad keys and values of attention to aligned rows of scores; return how many.

        before:  Softmax(Q K^T + mask) V                      197 keys
        after:   Softmax(Q [K; 0]^T + [mask, -inf]) [V; 0]    200 keys

    With 197 keys, the two matmuls forward and four backward that read or write scores take up to
    three times as long as with 200. The mask gives the new keys a score of minus infinity, so that
    their probability is exactly zero and no gradient comes back.

    Without a mask, adding one takes a pass over all scores. For long rows it is cheaper to mask the
    new keys inside the matmul: by features that are 1 in queries, 0 in keys and -1e30 in new keys.
    """
    changed = 0
    for node in nodes(op.graph, "Softmax"):
        attention = _find_unaligned_attention(node)
        if attention is not None:
            _pad_attention(op, attention, constant_names(model))
            changed += 1
    return changed


@dataclasses.dataclass(frozen=True)
class _Step:
    """A node between the two matmuls, and which of its inputs the scores are."""

    node: ir.Node
    index: int = 0


@dataclasses.dataclass(frozen=True)
class _Attention:
    """Attention, from the matmul of queries and keys to the matmul with the values.

    Attributes:
        scores: the matmul of queries and keys.
        before: nodes between it and the softmax.
        softmax: the softmax.
        after: nodes between the softmax and the last matmul.
        output: the matmul of probabilities and values.
        keys: number of keys.
        padding: number of keys to add.
    """

    scores: ir.Node
    before: list[_Step]
    softmax: ir.Node
    after: list[_Step]
    output: ir.Node
    keys: int
    padding: int

    @property
    def alignment(self) -> int:
        """Elements that a matmul kernel reads at once."""
        dtype = self.scores.outputs[0].dtype
        assert dtype is not None
        return _ALIGNMENT_BITS // dtype.bitwidth

    @property
    def replaced(self) -> list[ir.Node]:
        """Nodes that work on rows of scores, in order; the last matmul stays."""
        steps = [*self.before, _Step(self.softmax), *self.after]
        return [self.scores, *(s.node for s in steps)]


def _find_unaligned_attention(softmax: ir.Node) -> _Attention | None:
    x, y = softmax.inputs[0], softmax.outputs[0]
    sizes, axis = _sizes(y), softmax.attributes.get("axis")
    if x is None or sizes is None or len(sizes) < 3 or y.dtype not in _TYPES:
        return None
    if axis is not None and axis.as_int() not in (-1, len(sizes) - 1):
        return None
    if min(sizes[-2:]) < T.PADDED_ATTENTION_KEYS or math.prod(sizes) < T.PADDED_ATTENTION_SCORES:
        return None
    producer, reader = _score_producer(x, sizes[-1]), _probability_reader(y, sizes[-1])
    if producer is None or reader is None:
        return None
    (scores, before), (after, output) = producer, reader
    if scores.graph is not softmax.graph or output.graph is not softmax.graph:
        return None
    operands = [*scores.inputs, output.inputs[1]]
    types = {None if v is None else v.dtype for v in operands}
    dtype = types.pop()
    if types or dtype is None or any(v is None or _sizes(v) is None for v in operands):
        return None
    if any(len(_sizes(v) or ()) < 2 for v in operands):
        return None
    padding = -sizes[-1] % (_ALIGNMENT_BITS // dtype.bitwidth)
    if not padding:
        return None
    return _Attention(scores, before, softmax, after, output, sizes[-1], padding)


def _score_producer(x: ir.Value, keys: int) -> tuple[ir.Node, list[_Step]] | None:
    """Return the matmul that computes scores, and the nodes after it, in order."""
    node, sizes = x.producer(), _sizes(x)
    if node is None or sizes is None or sizes[-1] != keys or not _is_used_once(x):
        return None
    if is_op(node, "MatMul"):
        return node, []
    for index, value in enumerate(node.inputs):
        if value is None or not _can_pad(node, index, keys):
            continue
        further = _score_producer(value, keys)
        if further is not None:
            return further[0], [*further[1], _Step(node, index)]
    return None


def _can_pad(node: ir.Node, index: int, keys: int) -> bool:
    """Return whether a node works on padded rows of scores, if its other operands are padded."""
    y = node.outputs[0]
    sizes = _sizes(y) or ()
    if is_op(node, "Cast", "Reshape"):
        return index == 0
    if _sizes(node.inputs[index]) != sizes:
        return False
    others = [v for i, v in enumerate(node.inputs) if i != index]
    if is_op(node, "Mul") or (is_op(node, "Div") and index == 0):
        return all(_last_size(v) == 1 for v in others)
    if is_op(node, "Where") and index > 0:
        return _is_cheap_to_pad(others[0], y, keys) and _last_size(others[1]) == 1
    if is_op(node, "Add") or (is_op(node, "Sub") and index == 0):
        return all(_is_cheap_to_pad(v, y, keys) for v in others)
    return False


def _is_cheap_to_pad(x: ir.Value | None, scores: ir.Value, keys: int) -> bool:
    """Return whether an operand is much smaller than the scores."""
    sizes, score_sizes = _sizes(x), _sizes(scores)
    if sizes is None or score_sizes is None:
        return False
    if _last_size(x) == 1:
        return True
    return sizes[-1] == keys and 2 * math.prod(sizes) <= math.prod(score_sizes)


def _probability_reader(y: ir.Value, keys: int) -> tuple[list[_Step], ir.Node] | None:
    """Return the nodes after the softmax, and the matmul with the values that ends them."""
    steps = list[_Step]()
    while _is_used_once(y):
        ((node, index),) = live_uses(y)
        if is_op(node, "MatMul") and index == 0:
            return steps, node
        y = node.outputs[0]
        if not is_op(node, "Cast", "Reshape") or index or (_sizes(y) or (0,))[-1] != keys:
            return None
        steps.append(_Step(node))
    return None


def _pad_attention(op: OpBuilder, attention: _Attention, constants: Collection[str]) -> None:
    scores, output, padding = attention.scores, attention.output, attention.padding
    op.position = output
    queries, keys, values = scores.inputs[0], scores.inputs[1], output.inputs[1]
    assert queries is not None
    assert keys is not None
    assert values is not None
    zeros = _Padding(padding)
    padded_keys = zeros.append(op, keys, op.rank(keys) - 1)
    values = zeros.append(op, values, op.rank(values) - 2)
    masking = _masking_step(attention.before, attention.keys)
    in_matmul = masking is None and _masks_in_matmul(attention, constants)
    if in_matmul:
        ones = _Padding(attention.alignment, 1.0, constants=constants)
        low = _Padding(attention.alignment, _MASKED_SCORE, attention.keys, constants)
        queries = ones.append(op, queries, op.rank(queries) - 1)
        padded_keys = low.append(op, padded_keys, op.rank(keys) - 2, op.rank(keys) - 1)
    x = copy_node(op, scores, [queries, padded_keys])
    for i, step in enumerate(attention.before):
        x = _append_padded(op, step, x, attention, masks=i == masking)
    if masking is None and not in_matmul:
        x = op.Add(x, op.const([0.0] * attention.keys + [-np.inf] * padding, x.dtype))
    x = _append_padded(op, _Step(attention.softmax), x, attention)
    softmax = x.producer()
    for step in attention.after:
        x = _append_padded(op, step, x, attention)
    _record_unpadded_sizes(attention, softmax)
    output.replace_input_with(0, x)
    output.replace_input_with(1, values)
    _remove(op.graph, attention.replaced)


def _record_unpadded_sizes(attention: _Attention, softmax: ir.Node | None) -> None:
    """Record keys and features without padding on a softmax that has no other mask.

    `fuse_attention` slices the padding off again.
    """
    width = (_sizes(attention.scores.inputs[0]) or [0])[-1]
    if softmax is not None and all(is_op(s.node, "Mul", "Div") for s in attention.before):
        softmax.meta[PADDED_ATTENTION] = (attention.keys, width)


def _masks_in_matmul(attention: _Attention, constants: Collection[str]) -> bool:
    """Return whether features mask the new keys: rows are long, and no scale is negative."""
    queries = _sizes(attention.scores.inputs[0]) or []
    if attention.scores.outputs[0].dtype not in _TYPES:
        return False
    if attention.keys < T.MASK_IN_MATMUL_RATIO * queries[-1]:
        return False
    return all(
        is_op(s.node, "Cast", "Reshape")
        or (is_op(s.node, "Mul", "Div") and _is_positive(s.node.inputs[1 - s.index], constants))
        for s in attention.before
    )


def _masking_step(steps: Sequence[_Step], keys: int) -> int | None:
    """Return the last step whose mask can mask the new keys, if later steps keep infinities."""
    for i in reversed(range(len(steps))):
        node, index = steps[i].node, steps[i].index
        if is_op(node, "Add") and _last_size(node.inputs[1 - index]) == keys:
            return i
        if is_op(node, "Where") and _last_size(node.inputs[0]) == keys:
            return i if _is_scalar(node.inputs[3 - index]) else None
        if not is_op(node, "Add", "Sub", "Cast", "Reshape"):
            return None
    return None


def _append_padded(
    op: OpBuilder, step: _Step, x: ir.Value, attention: _Attention, *, masks: bool = False
) -> ir.Value:
    """Append a copy of a step that works on padded rows."""
    node, padding = step.node, attention.padding
    if is_op(node, "Reshape"):
        return op.Reshape(x, op.const([*op.dims(node.outputs[0])[:-1], attention.keys + padding]))
    inputs = list(node.inputs)
    inputs[step.index] = x
    for i, mask in enumerate(node.inputs):
        if i != step.index and mask is not None and _last_size(mask) == attention.keys:
            fill = step.index == 2 if is_op(node, "Where") else -np.inf if masks else 0.0
            inputs[i] = _append_block(op, mask, op.rank(mask) - 1, padding, fill)
    if masks and is_op(node, "Where"):
        row = op.Expand(op.Reshape(inputs[3 - step.index], [1]), [attention.keys])
        inputs[3 - step.index] = _append_block(op, row, 0, padding, -np.inf)
    return copy_node(op, node, inputs)


@dataclasses.dataclass
class _Padding:
    """Appends a block along an axis, as early as all later nodes only move or scale elements.

    There the elements of one position are contiguous, and a transpose next to a matmul stays there.

    Attributes:
        size: size of the block.
        value: the element of the first feature of the block; all others are zero.
        start: first position whose feature is set.
        constants: constants that may scale the block; None if any factor may, as for zeros.
        padded: values that are padded already, by value and axis.
    """

    size: int
    value: float = 0.0
    start: int = 0
    constants: Collection[str] | None = None
    padded: dict[tuple[ir.Value, int], ir.Value] = dataclasses.field(default_factory=dict)

    def append(
        self, op: OpBuilder, x: ir.Value, axis: int, positions: int | None = None
    ) -> ir.Value:
        """Return a padded value; `positions` is the axis of positions, if features differ by it."""
        if (x, axis) in self.padded:
            return self.padded[x, axis]
        step = self._step(op, x, axis, positions)
        if step is None:
            y = op.Concat(x, self._block(op, x, axis, positions), axis=axis)
        else:
            node, index, source_axis, source_positions = step
            inputs = list(node.inputs)
            value = inputs[index]
            assert value is not None
            inputs[index] = self.append(op, value, source_axis, source_positions)
            if is_op(node, "Reshape", "Expand"):
                sizes = list(_sizes(x) or ())
                sizes[axis] += self.size
                inputs[1] = op.const(sizes)
            y = copy_node(op, node, inputs)
        self.padded[x, axis] = y
        return y

    def _step(
        self, op: OpBuilder, x: ir.Value, axis: int, positions: int | None
    ) -> tuple[ir.Node, int, int, int | None] | None:
        """Return the node that moves or scales a value, the input, and both axes of that input.

        None if the node does more than that, or if something else reads the value.
        """
        node = x.producer()
        if node is None or node.graph is not op.graph:
            return None
        if len(live_uses(x)) > 1 or x.is_graph_output():
            return None
        source = _source_axis(node, axis)
        other = None if positions is None else _source_axis(node, positions)
        if source is None or (positions is not None and other is None):
            return None
        scales = self.constants is not None and is_op(node, "Mul", "Div")
        if scales and not _is_positive(node.inputs[1 - source[0]], self.constants or ()):
            return None
        return node, *source, None if other is None else other[1]

    def _block(self, op: OpBuilder, x: ir.Value, axis: int, positions: int | None) -> ir.Value:
        full = list(_sizes(x) or ())
        full[axis] = self.size
        if not self.value:
            return op.const(np.zeros(full), x.dtype)
        sizes = [d if i in (axis, positions) else 1 for i, d in enumerate(full)]
        block = np.zeros(sizes)
        first = [slice(0, 1) if i == axis else slice(None) for i in range(len(sizes))]
        if positions is not None:
            first[positions] = slice(self.start, None)
        block[tuple(first)] = self.value
        return op.Expand(op.const(block, x.dtype), full)


def _source_axis(node: ir.Node, axis: int) -> tuple[int, int] | None:
    """Return the input that a node moves or scales by a scalar, and the axis of that input."""
    if is_op(node, "Mul", "Div"):
        index = 1 if is_op(node, "Mul") and _is_scalar(node.inputs[0]) else 0
        same = _sizes(node.inputs[index]) == _sizes(node.outputs[0])
        return (index, axis) if same and _is_scalar(node.inputs[1 - index]) else None
    x, y = _sizes(node.inputs[0]), _sizes(node.outputs[0])
    if x is None or y is None:
        return None
    if is_op(node, "Transpose"):
        perm = node.attributes.get("perm")
        return 0, (len(x) - 1 - axis if perm is None else perm.as_ints()[axis])
    if is_op(node, "Expand"):
        source = axis - len(y) + len(x)
        return (0, source) if source >= 0 and x[source] == y[axis] else None
    if is_op(node, "Reshape", "Squeeze", "Unsqueeze"):
        outer = math.prod(y[:axis])
        same_axis = [i for i, d in enumerate(x) if d == y[axis] and math.prod(x[:i]) == outer]
        return (0, same_axis[0]) if len(same_axis) == 1 else None
    return None


def _append_block(op: OpBuilder, x: ir.Value, axis: int, size: int, fill: float) -> ir.Value:
    sizes = list(_sizes(x) or ())
    sizes[axis] = size
    return op.Concat(x, op.const(np.full(sizes, fill), x.dtype), axis=axis)


def _remove(graph: ir.Graph, replaced: Sequence[ir.Node]) -> None:
    """Remove replaced nodes together with dead nodes that read them."""
    for node in reversed(replaced):
        dead = {use.node for y in node.outputs for use in y.uses()}
        graph.remove([*dead, node], safe=True)


def _is_used_once(x: ir.Value) -> bool:
    return len(live_uses(x)) == 1 and not x.is_graph_output()


def _is_positive(x: ir.Value | None, constants: Collection[str]) -> bool:
    """Return whether a value is a positive constant that is not a parameter."""
    node = None if x is None else x.producer()
    if node is not None and is_op(node, "Cast"):
        x = node.inputs[0]
    array = S.constant_of(x)
    if x is None or array is None or array.size != 1:
        return False
    return array.item() > 0 and (x.name in constants or S.is_generated_constant(x))


def _is_scalar(x: ir.Value | None) -> bool:
    sizes = _sizes(x)
    return sizes is not None and math.prod(sizes) == 1


def _sizes(x: ir.Value | None) -> list[int] | None:
    """Return the sizes of a value if all are static."""
    dims = None if x is None else S.dims_of(x)
    sizes = [d for d in dims or () if isinstance(d, int)]
    return None if dims is None or len(sizes) != len(dims) else sizes


def _last_size(x: ir.Value | None) -> int | None:
    """Return the size of the last axis, 1 for a value of rank 0."""
    sizes = _sizes(x)
    return None if sizes is None else [1, *sizes][-1]


# Chunks of the batch.


def chunked_attention(model: ir.Model, op: OpBuilder) -> int:
    """Split attention with many scores into chunks of the batch; return how many.

        before:  Softmax(Q K^T) V
        after:   Concat(Softmax(Q_1 K_1^T) V_1, Softmax(Q_2 K_2^T) V_2, ...)

    Scores of a long sequence are much larger than queries, keys and values. In chunks they take the
    memory of one chunk, forward and backward; `rematerialize` recomputes them for the gradient.
    """
    count = 0
    for node in nodes(model.graph, "Softmax"):
        long = _find_long_attention(node)
        if long is not None:
            _split_into_chunks(op, long)
            count += 1
    return count


@dataclasses.dataclass(frozen=True)
class _LongAttention:
    """Attention with many scores.

    Attributes:
        scores: how the scores are computed.
        output: the matmul with the values.
        axis: the axis to split, negative.
        chunks: number of chunks.
    """

    scores: AttentionScores
    output: ir.Node
    axis: int
    chunks: int

    @property
    def operands(self) -> list[ir.Value]:
        """Values that may differ between chunks."""
        values = self.output.inputs[1]
        assert values is not None
        return [*self.scores.operands, values]


def _find_long_attention(softmax: ir.Node) -> _LongAttention | None:
    p, scores = softmax.outputs[0], match_attention_scores(softmax)
    uses = live_uses(p)
    if scores is None or not scores.is_long or len(uses) != 1 or p.is_graph_output():
        return None
    output, index = uses[0]
    if not is_op(output, "MatMul") or index != 0 or output.graph is not softmax.graph:
        return None
    values = output.inputs[1]
    if output.outputs[0].is_graph_output() or values is None or p.dtype is None:
        return None
    sizes = _sizes(p)
    if sizes is None or len(S.dims_of(values) or ()) != len(sizes):
        return None
    # The batch, or the heads if there is one sequence.
    axis = next((i for i, d in enumerate(sizes[:-2]) if d > 1), None)
    if axis is None:
        return None
    chunks = _chunk_count(sizes[axis], math.prod(sizes) * p.dtype.bitwidth // 8)
    back = axis - len(sizes)
    operands = [scores.query, scores.key, values]
    if chunks == 1 or any((S.dims_of(x) or ())[axis] != sizes[axis] for x in operands):
        return None
    if any(_axis_size(x, back) not in (1, sizes[axis]) for x in scores.operands):
        return None
    return _LongAttention(scores, output, back, chunks)


def _chunk_count(rows: int, size: int) -> int:
    """Return the lowest number of equal chunks whose scores are small enough."""
    # One Concat joins the gradients of queries, keys and values of all chunks.
    most = T.CUDA_GRAPH_CONCAT_INPUTS // 3
    counts = [n for n in range(1, most + 1) if rows % n == 0]
    return next((n for n in counts if size <= n * T.ATTENTION_CHUNK_BYTES), counts[-1])


def _axis_size(x: ir.Value, axis: int) -> int | None:
    """Return the size of a negative axis, 1 if the value has fewer axes."""
    dims = S.dims_of(x)
    if dims is None:
        return None
    size = dims[axis] if -axis <= len(dims) else 1
    return size if isinstance(size, int) else None


def _split_into_chunks(op: OpBuilder, long: _LongAttention) -> None:
    op.position = output = long.output
    pieces: dict[ir.Value, tuple[ir.Value, ...]] = {}
    for x in dict.fromkeys(long.operands):
        size = _axis_size(x, long.axis)
        if size is not None and size > 1:
            sizes = op.const([size // long.chunks] * long.chunks)
            axis = long.axis + len(S.dims_of(x) or ())
            pieces[x] = op.Split(x, sizes, axis=axis, _outputs=long.chunks)
    results = []
    for i in range(long.chunks):
        copies = {x: chunks[i] for x, chunks in pieces.items()}
        for node in (*long.scores.nodes, output):
            inputs = [x if x is None else copies.get(x, x) for x in node.inputs]
            copies[node.outputs[0]] = copy_node(op, node, inputs)
        results.append(copies[output.outputs[0]])
    y = output.outputs[0]
    axis = long.axis + len(S.dims_of(y) or ())
    replace_value(y, op.Concat(*results, axis=axis), list(y.uses()))


_ELEMENTWISE_OR_VIEW = ("Mul", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Cast")


def group_attention_chunk_grads(model: ir.Model, op: OpBuilder) -> int:
    """Concatenate gradients that come from the same scores together; return how many.

        before:  dQ = Concat(dQ_1, dQ_2), dK = Concat(dK_1, dK_2), dV = Concat(dV_1, dV_2)
        after:   dQ, dK, dV = Split(Concat(dQ_1, dK_1, dV_1, dQ_2, dK_2, dV_2))

    Nodes run in topological order. The first separate Concat would compute the scores of all chunks
    and keep them for the others.
    """
    groups: dict[tuple[ir.Node, ...], list[ir.Node]] = {}
    forward = forward_nodes(model.graph)
    for node in nodes(model.graph, "Concat"):
        key = None if node in forward else _chunk_scores(node)
        if key is not None:
            groups.setdefault(key, []).append(node)
    count = 0
    for key, group in groups.items():
        equal = [n for n in group if _size_and_type(n) == _size_and_type(group[0])]
        if len(equal) < 2 or len(equal) * len(key) > T.CUDA_GRAPH_CONCAT_INPUTS:
            continue
        if any(ancestors(n.outputs[0]) & (set(equal) - {n}) for n in equal):
            continue  # one depends on another
        _concat_together(op, equal)
        count += len(equal)
    if count:
        model.graph.sort()
    return count


def _chunk_scores(concat: ir.Node) -> tuple[ir.Node, ...] | None:
    """Return the softmax of each operand of a Concat along the first axis, if all have one."""
    y, axis = concat.outputs[0], concat.attributes.get("axis")
    dims = S.dims_of(y)
    if dims is None or axis is None or len(concat.inputs) < 2:
        return None
    if any(d != 1 for d in dims[: axis.as_int() % len(dims)]) or _size_and_type(concat) is None:
        return None
    first = concat.inputs[0]
    softmaxes = []
    for x in concat.inputs:
        matmul = None if x is None else x.producer()
        if x is None or first is None or matmul is None or not is_op(matmul, "MatMul"):
            return None
        softmax = next((s for v in matmul.inputs if (s := _source_softmax(v)) is not None), None)
        if softmax is None or matmul.inputs[0] is softmax.outputs[0]:  # attention's own output
            return None
        if not S.same_shape(x, first) or x.dtype != first.dtype:
            return None
        softmaxes.append(softmax)
    return tuple(softmaxes) if len(set(softmaxes)) == len(softmaxes) else None


def _source_softmax(x: ir.Value | None) -> ir.Node | None:
    """Return the softmax that a value depends on through elementwise nodes and views."""
    node = None if x is None else x.producer()
    if node is None or is_op(node, "Softmax"):
        return node
    if not is_op(node, *_ELEMENTWISE_OR_VIEW):
        return None
    return next((s for v in node.inputs if (s := _source_softmax(v)) is not None), None)


def _size_and_type(concat: ir.Node) -> tuple[int, ir.DataType | None] | None:
    y = concat.outputs[0]
    sizes = _sizes(y)
    return None if sizes is None else (math.prod(sizes), y.dtype)


def _concat_together(op: OpBuilder, group: list[ir.Node]) -> None:
    op.position = group[0]
    chunks, kinds = len(group[0].inputs), len(group)
    rows = [op.Reshape(node.inputs[i], [1, -1]) for i in range(chunks) for node in group]
    table = op.Reshape(op.Concat(*rows, axis=0), [chunks, kinds, -1])
    pieces = op.Split(table, op.const([1] * kinds), axis=1, _outputs=kinds)
    for node, piece in zip(group, pieces, strict=True):
        y = node.outputs[0]
        joined = op.Reshape(piece, _sizes(y) or [])
        replace_value(y, joined, list(y.uses()))
