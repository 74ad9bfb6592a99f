"""Attention over so many keys that kernels can read rows of scores in whole words.

Scores of 197 positions have rows of 197 numbers, and a GPU takes slow kernels for all products that
read or write them, two forward and four backward: up to three times the time of rows of 200. So
keys and values get a few more rows of zeros. Their scores are minus infinity, by the mask if there
is one, so that their probability is exactly zero, and nothing comes back from them.

Without a mask, that is a pass over all scores. If rows are long, it costs less to close the new
keys inside the product: by features that are 1 in queries, 0 in keys, and very low in new keys.

Attention over long sequences in parts of the batch, so that few scores are there at a time.

Scores of a long sequence are far larger than all that they are made of. One part after the other,
each a few rows of the batch, they take the memory of one part, forward and backward; what is left
of them for the backward pass is computed again there, by ``make_again``.

Gradients of attention in parts, joined so that one part is done before the next begins.

The gradients of queries, keys and values of a part come from the same scores. Joined one by one,
each over all parts, the first of them would run through all parts and leave all scores behind for
the others. Joined as one value, which is cut again, they are made part by part.
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

_ALIGNMENT_BITS = 128  # bits that a kernel reads at once
_MASKED_SCORE = -1e30  # its exponential is zero beside any score, and it is no infinity
_TYPES = (ir.DataType.FLOAT, ir.DataType.BFLOAT16)


def pad_attention_keys(model: ir.Model, op: OpBuilder) -> int:
    """Fill up keys and values of attention to whole words, in place; return how often."""
    changed = 0
    for node in nodes(op.graph, "Softmax"):
        attention = _attention(node)
        if attention is not None:
            _pad_attention(op, attention, constant_names(model))
            changed += 1
    return changed


@dataclasses.dataclass(frozen=True)
class _Step:
    """A node on the way of the scores, and which of its inputs they are."""

    node: ir.Node
    place: int = 0


@dataclasses.dataclass(frozen=True)
class _Attention:
    """Attention, from the product of queries and keys to the product with the values."""

    product: ir.Node
    before: list[_Step]
    softmax: ir.Node
    after: list[_Step]
    values: ir.Node
    keys: int
    more: int
    """How many keys are added."""

    @property
    def word(self) -> int:
        """How many numbers of the products a kernel reads at once."""
        dtype = self.product.outputs[0].dtype
        assert dtype is not None
        return _ALIGNMENT_BITS // dtype.bitwidth

    @property
    def replaced(self) -> list[ir.Node]:
        """All that works on rows of scores, in order, but the last product, which stays."""
        steps = [*self.before, _Step(self.softmax), *self.after]
        return [self.product, *(s.node for s in steps)]


def _attention(softmax: ir.Node) -> _Attention | None:
    x, y = softmax.inputs[0], softmax.outputs[0]
    sizes, axis = _sizes(y), softmax.attributes.get("axis")
    if x is None or sizes is None or len(sizes) < 3 or y.dtype not in _TYPES:
        return None
    if axis is not None and axis.as_int() not in (-1, len(sizes) - 1):
        return None
    if min(sizes[-2:]) < T.PADDED_ATTENTION_KEYS or math.prod(sizes) < T.PADDED_ATTENTION_SCORES:
        return None
    front, back = _score_producer(x, sizes[-1]), _probability_reader(y, sizes[-1])
    if (
        front is None
        or back is None
        or any(n.graph is not softmax.graph for n in (front[0], back[1]))
    ):
        return None
    (product, before), (after, values) = front, back
    sides = [*product.inputs, values.inputs[1]]
    types = {None if v is None else v.dtype for v in sides}
    dtype = types.pop()
    if types or dtype is None or any(v is None or _sizes(v) is None for v in sides):
        return None
    if any(len(_sizes(v) or ()) < 2 for v in sides):
        return None
    more = -sizes[-1] % (_ALIGNMENT_BITS // dtype.bitwidth)
    return _Attention(product, before, softmax, after, values, sizes[-1], more) if more else None


def _score_producer(x: ir.Value, keys: int) -> tuple[ir.Node, list[_Step]] | None:
    """Return the product that makes scores, and what happens to them, in order."""
    node, sizes = x.producer(), _sizes(x)
    if node is None or sizes is None or sizes[-1] != keys or not _is_read_once(x):
        return None
    if is_op(node, "MatMul"):
        return node, []
    for place, value in enumerate(node.inputs):
        if value is None or not _is_padded(node, place, keys):
            continue
        further = _score_producer(value, keys)
        if further is not None:
            return further[0], [*further[1], _Step(node, place)]
    return None


def _is_padded(node: ir.Node, place: int, keys: int) -> bool:
    """Return whether a node works on longer rows of scores, too, its other operands filled up."""
    y = node.outputs[0]
    whole = _sizes(y) or ()
    if is_op(node, "Cast", "Reshape"):
        return place == 0
    if _sizes(node.inputs[place]) != whole:
        return False
    others = [v for i, v in enumerate(node.inputs) if i != place]
    if is_op(node, "Mul") or (is_op(node, "Div") and place == 0):
        return all(_last(v) == 1 for v in others)
    if is_op(node, "Where") and place > 0:
        return _is_small(others[0], y, keys) and _last(others[1]) == 1
    if is_op(node, "Add") or (is_op(node, "Sub") and place == 0):
        return all(_is_small(v, y, keys) for v in others)
    return False


def _is_small(x: ir.Value | None, scores: ir.Value, keys: int) -> bool:
    """Return whether filling up an operand is little work beside a pass over the scores."""
    sizes, whole = _sizes(x), _sizes(scores)
    if sizes is None or whole is None:
        return False
    return _last(x) == 1 or (sizes[-1] == keys and 2 * math.prod(sizes) <= math.prod(whole))


def _probability_reader(y: ir.Value, keys: int) -> tuple[list[_Step], ir.Node] | None:
    """Return what happens to probabilities, and the product with the values that reads them."""
    steps = list[_Step]()
    while _is_read_once(y):
        ((node, place),) = _uses(y)
        if is_op(node, "MatMul") and place == 0:
            return steps, node
        y = node.outputs[0]
        if not is_op(node, "Cast", "Reshape") or place or (_sizes(y) or (0,))[-1] != keys:
            return None
        steps.append(_Step(node))
    return None


def _pad_attention(op: OpBuilder, attention: _Attention, constants: Collection[str]) -> None:
    product, values, more = attention.product, attention.values, attention.more
    op.position = values
    queries, keys, rows = product.inputs[0], product.inputs[1], values.inputs[1]
    assert queries is not None
    assert keys is not None
    assert rows is not None
    zeros = _Padding(more)
    longer = zeros.behind(op, keys, op.rank(keys) - 1)
    rows = zeros.behind(op, rows, op.rank(rows) - 2)
    closing = _masking_step(attention.before, attention.keys)
    within = closing is None and _masks_in_matmul(attention, constants)
    if within:
        one = _Padding(attention.word, 1.0, constants=constants)
        low = _Padding(attention.word, _MASKED_SCORE, attention.keys, constants)
        queries = one.behind(op, queries, op.rank(queries) - 1)
        longer = low.behind(op, longer, op.rank(keys) - 2, op.rank(keys) - 1)
    x = copy_node(op, product, [queries, longer])
    for i, step in enumerate(attention.before):
        x = _append_padded(op, step, x, attention, closes=i == closing)
    if closing is None and not within:
        x = op.Add(x, op.const([0.0] * attention.keys + [-np.inf] * more, x.dtype))
    x = _append_padded(op, _Step(attention.softmax), x, attention)
    softmax = x.producer()
    for step in attention.after:
        x = _append_padded(op, step, x, attention)
    _record_valid_keys(attention, softmax)
    values.replace_input_with(0, x)
    values.replace_input_with(1, rows)
    _remove(op.graph, attention.replaced)


def _record_valid_keys(attention: _Attention, softmax: ir.Node | None) -> None:
    """Let a softmax know how many keys and features count, if that is all that its mask says."""
    width = (_sizes(attention.product.inputs[0]) or [0])[-1]
    if softmax is not None and all(is_op(s.node, "Mul", "Div") for s in attention.before):
        softmax.meta[PADDED_ATTENTION] = (attention.keys, width)


def _masks_in_matmul(attention: _Attention, constants: Collection[str]) -> bool:
    """Return whether features close new keys: in long rows that nothing turns to high numbers."""
    queries = _sizes(attention.product.inputs[0]) or []
    if attention.product.outputs[0].dtype not in _TYPES:
        return False
    if attention.keys < T.MASK_IN_MATMUL_RATIO * queries[-1]:
        return False
    return all(
        is_op(s.node, "Cast", "Reshape")
        or (is_op(s.node, "Mul", "Div") and _is_positive(s.node.inputs[1 - s.place], constants))
        for s in attention.before
    )


def _masking_step(steps: Sequence[_Step], keys: int) -> int | None:
    """Return the step whose mask can close the new keys: what follows leaves an infinity alone."""
    for i in reversed(range(len(steps))):
        node, place = steps[i].node, steps[i].place
        if is_op(node, "Add") and _last(node.inputs[1 - place]) == keys:
            return i
        if is_op(node, "Where") and _last(node.inputs[0]) == keys:
            return i if _is_number(node.inputs[3 - place]) else None
        if not is_op(node, "Add", "Sub", "Cast", "Reshape"):
            return None
    return None


def _append_padded(
    op: OpBuilder, step: _Step, x: ir.Value, attention: _Attention, *, closes: bool = False
) -> ir.Value:
    """Append a step once more, on longer rows."""
    node, more = step.node, attention.more
    if is_op(node, "Reshape"):
        return op.Reshape(x, op.const([*op.dims(node.outputs[0])[:-1], attention.keys + more]))
    inputs = list(node.inputs)
    inputs[step.place] = x
    for i, mask in enumerate(node.inputs):
        if i != step.place and mask is not None and _last(mask) == attention.keys:
            filling = step.place == 2 if is_op(node, "Where") else -np.inf if closes else 0.0
            inputs[i] = _with_block(op, mask, op.rank(mask) - 1, more, filling)
    if closes and is_op(node, "Where"):
        row = op.Expand(op.Reshape(inputs[3 - step.place], [1]), [attention.keys])
        inputs[3 - step.place] = _with_block(op, row, 0, more, -np.inf)
    return copy_node(op, node, inputs)


@dataclasses.dataclass
class _Padding:
    """What is put behind an axis where all that follows only moves it, or scales it.

    There rows of one position lie together, and a transposition next to a product stays there.
    Without ``number`` it is zeros. It is the first of several features otherwise: of all positions,
    or, with ``start``, of those from there on.
    """

    more: int
    number: float = 0.0
    start: int = 0
    constants: Collection[str] | None = None
    """The only numbers that may scale it; ``None`` if any may."""
    made: dict[tuple[ir.Value, int], ir.Value] = dataclasses.field(default_factory=dict)

    def behind(self, op: OpBuilder, x: ir.Value, axis: int, along: int | None = None) -> ir.Value:
        """Return a value with more behind ``axis``; ``along`` is the axis of positions."""
        if (x, axis) in self.made:
            return self.made[x, axis]
        step = self._step(op, x, axis, along)
        if step is None:
            y = op.Concat(x, self._block(op, x, axis, along), axis=axis)
        else:
            node, place, before, positions = step
            inputs = list(node.inputs)
            value = inputs[place]
            assert value is not None
            inputs[place] = self.behind(op, value, before, positions)
            if is_op(node, "Reshape", "Expand"):
                sizes = list(_sizes(x) or ())
                sizes[axis] += self.more
                inputs[1] = op.const(sizes)
            y = copy_node(op, node, inputs)
        self.made[x, axis] = y
        return y

    def _step(
        self, op: OpBuilder, x: ir.Value, axis: int, along: int | None
    ) -> tuple[ir.Node, int, int, int | None] | None:
        """Return the node that moves or scales a value, which input, and what both axes are there.

        There is none if something else reads the value, or if the node does more than that.
        """
        node = x.producer()
        if node is None or node.graph is not op.graph or len(_uses(x)) > 1 or x.is_graph_output():
            return None
        source, other = _source(node, axis), None if along is None else _source(node, along)
        if source is None or (along is not None and other is None):
            return None
        scales = self.constants is not None and is_op(node, "Mul", "Div")
        if scales and not _is_positive(node.inputs[1 - source[0]], self.constants or ()):
            return None
        return node, *source, None if other is None else other[1]

    def _block(self, op: OpBuilder, x: ir.Value, axis: int, along: int | None) -> ir.Value:
        whole = list(_sizes(x) or ())
        whole[axis] = self.more
        if not self.number:
            return op.const(np.zeros(whole), x.dtype)
        sizes = [d if i in (axis, along) else 1 for i, d in enumerate(whole)]
        block = np.zeros(sizes)
        first = [slice(0, 1) if i == axis else slice(None) for i in range(len(sizes))]
        if along is not None:
            first[along] = slice(self.start, None)
        block[tuple(first)] = self.number
        return op.Expand(op.const(block, x.dtype), whole)


def _source(node: ir.Node, axis: int) -> tuple[int, int] | None:
    """Return the input that a node moves, or scales by a number, and what the axis is there."""
    if is_op(node, "Mul", "Div"):
        place = 1 if is_op(node, "Mul") and _is_number(node.inputs[0]) else 0
        same = _sizes(node.inputs[place]) == _sizes(node.outputs[0])
        return (place, axis) if same and _is_number(node.inputs[1 - place]) else None
    x, y = _sizes(node.inputs[0]), _sizes(node.outputs[0])
    if x is None or y is None:
        return None
    if is_op(node, "Transpose"):
        perm = node.attributes.get("perm")
        return 0, (len(x) - 1 - axis if perm is None else perm.as_ints()[axis])
    if is_op(node, "Expand"):
        before = axis - len(y) + len(x)
        return (0, before) if before >= 0 and x[before] == y[axis] else None
    if is_op(node, "Reshape", "Squeeze", "Unsqueeze"):
        outer = math.prod(y[:axis])
        alike = [i for i, d in enumerate(x) if d == y[axis] and math.prod(x[:i]) == outer]
        return (0, alike[0]) if len(alike) == 1 else None
    return None


def _with_block(op: OpBuilder, x: ir.Value, axis: int, more: int, filling: float) -> ir.Value:
    sizes = list(_sizes(x) or ())
    sizes[axis] = more
    return op.Concat(x, op.const(np.full(sizes, filling), x.dtype), axis=axis)


def _remove(graph: ir.Graph, old: Sequence[ir.Node]) -> None:
    """Remove nodes in whose place others are, and what read them for nothing."""
    for node in reversed(old):
        unread = {use.node for y in node.outputs for use in y.uses()}
        graph.remove([*unread, node], safe=True)


def _uses(x: ir.Value) -> list[tuple[ir.Node, int]]:
    """Return the uses of a value; casts that nothing reads are left over."""
    return [
        (use.node, use.idx)
        for use in x.uses()
        if any(y.is_graph_output() or y.uses() for y in use.node.outputs)
    ]


def _is_read_once(x: ir.Value) -> bool:
    return len(_uses(x)) == 1 and not x.is_graph_output()


def _is_positive(x: ir.Value | None, constants: Collection[str]) -> bool:
    """Return whether a value is a number above zero that nobody trains."""
    node = None if x is None else x.producer()
    if node is not None and is_op(node, "Cast"):
        x = node.inputs[0]
    number = S.constant_of(x)
    if x is None or number is None or number.size != 1:
        return False
    return number.item() > 0 and (x.name in constants or S.is_generated_constant(x))


def _is_number(x: ir.Value | None) -> bool:
    sizes = _sizes(x)
    return sizes is not None and math.prod(sizes) == 1


def _sizes(x: ir.Value | None) -> list[int] | None:
    """Return the sizes of a value if all are known."""
    dims = None if x is None else S.dims_of(x)
    sizes = [d for d in dims or () if isinstance(d, int)]
    return None if dims is None or len(sizes) != len(dims) else sizes


def _last(x: ir.Value | None) -> int | None:
    """Return the size of the last axis; a number counts as one of size 1."""
    sizes = _sizes(x)
    return None if sizes is None else [1, *sizes][-1]


def chunked_attention(model: ir.Model, op: OpBuilder) -> int:
    """Cut attention with many scores into parts, in place; return how often."""
    count = 0
    for node in nodes(model.graph, "Softmax"):
        long = _find_long_attention(node)
        if long is not None:
            _split_into_chunks(op, long)
            count += 1
    return count


@dataclasses.dataclass(frozen=True)
class _LongAttention:
    """Attention whose scores are many: how they are made, what reads them, and where to cut."""

    scores: AttentionScores
    product: ir.Node
    axis: int
    """Counted from the end."""
    parts: int

    @property
    def sources(self) -> list[ir.Value]:
        """All that differs from part to part, or may."""
        values = self.product.inputs[1]
        assert values is not None
        return [*self.scores.operands, values]


def _find_long_attention(softmax: ir.Node) -> _LongAttention | None:
    p, scores = softmax.outputs[0], match_attention_scores(softmax)
    uses = live_uses(p)
    if scores is None or not scores.is_long or len(uses) != 1 or p.is_graph_output():
        return None
    product, place = uses[0]
    if not is_op(product, "MatMul") or place != 0 or product.graph is not softmax.graph:
        return None
    values = product.inputs[1]
    if product.outputs[0].is_graph_output() or values is None or p.dtype is None:
        return None
    dims = S.dims_of(p) or ()
    sizes = [d for d in dims if isinstance(d, int)]
    if len(sizes) != len(dims) or len(S.dims_of(values) or ()) != len(dims):
        return None
    # Rows of the batch; of a single one, its heads.
    axis = next((i for i, d in enumerate(sizes[:-2]) if d > 1), None)
    if axis is None:
        return None
    parts = _chunk_count(sizes[axis], math.prod(sizes) * p.dtype.bitwidth // 8)
    back = axis - len(dims)
    main = [scores.query, scores.key, values]
    if parts == 1 or any((S.dims_of(x) or ())[axis] != sizes[axis] for x in main):
        return None
    if any(_axis_size(x, back) not in (1, sizes[axis]) for x in scores.operands):
        return None
    return _LongAttention(scores, product, back, parts)


def _chunk_count(rows: int, size: int) -> int:
    """Return the fewest equal parts of some rows that are small enough.

    Gradients of queries, keys and values of all parts are joined by one node.
    """
    counts = [n for n in range(1, T.CUDA_GRAPH_CONCAT_INPUTS // 3 + 1) if rows % n == 0]
    return next((n for n in counts if size <= n * T.ATTENTION_CHUNK_BYTES), counts[-1])


def _axis_size(x: ir.Value, axis: int) -> int | None:
    """Return the size of an axis; one that is not there counts as one."""
    dims = S.dims_of(x)
    if dims is None:
        return None
    size = dims[axis] if -axis <= len(dims) else 1
    return size if isinstance(size, int) else None


def _split_into_chunks(op: OpBuilder, long: _LongAttention) -> None:
    op.position = product = long.product
    cut: dict[ir.Value, tuple[ir.Value, ...]] = {}
    for x in dict.fromkeys(long.sources):
        size = _axis_size(x, long.axis)
        if size is not None and size > 1:
            sizes = op.const([size // long.parts] * long.parts)
            axis = long.axis + len(S.dims_of(x) or ())
            cut[x] = op.Split(x, sizes, axis=axis, _outputs=long.parts)
    results = []
    for i in range(long.parts):
        mine = {x: parts[i] for x, parts in cut.items()}
        for node in (*long.scores.nodes, product):
            y = copy_node(op, node, [x if x is None else mine.get(x, x) for x in node.inputs])
            mine[node.outputs[0]] = y
        results.append(mine[product.outputs[0]])
    y = product.outputs[0]
    axis = long.axis + len(S.dims_of(y) or ())
    replace_value(y, op.Concat(*results, axis=axis), list(y.uses()))


_THROUGH = ("Mul", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Cast")


def group_attention_chunk_grads(model: ir.Model, op: OpBuilder) -> int:
    """Join gradients that come from the same scores, in place; return how many."""
    groups: dict[tuple[ir.Node, ...], list[ir.Node]] = {}
    early = forward_nodes(model.graph)
    for node in nodes(model.graph, "Concat"):
        key = None if node in early else _chunk_scores(node)
        if key is not None:
            groups.setdefault(key, []).append(node)
    count = 0
    for key, group in groups.items():
        alike = [n for n in group if _chunk_size(n) == _chunk_size(group[0])]
        if len(alike) < 2 or len(alike) * len(key) > T.CUDA_GRAPH_CONCAT_INPUTS:
            continue
        if any(ancestors(n.outputs[0]) & (set(alike) - {n}) for n in alike):
            continue  # one is made of another
        _join_chunks(op, alike)
        count += len(alike)
    if count:
        model.graph.sort()
    return count


def _chunk_scores(concat: ir.Node) -> tuple[ir.Node, ...] | None:
    """Return the softmax that each part of a value goes back to, if it is stacked of them."""
    y, axis = concat.outputs[0], concat.attributes.get("axis")
    dims = S.dims_of(y)
    if dims is None or axis is None or len(concat.inputs) < 2:
        return None
    if any(d != 1 for d in dims[: axis.as_int() % len(dims)]) or _chunk_size(concat) is None:
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


def _chunk_size(concat: ir.Node) -> tuple[int, ir.DataType | None] | None:
    y = concat.outputs[0]
    dims = S.dims_of(y) or ()
    sizes = [d for d in dims if isinstance(d, int)]
    return (math.prod(sizes), y.dtype) if len(sizes) == len(dims) else None


def _join_chunks(op: OpBuilder, group: list[ir.Node]) -> None:
    op.position = group[0]
    parts, kinds = len(group[0].inputs), len(group)
    rows = [op.Reshape(node.inputs[i], [1, -1]) for i in range(parts) for node in group]
    whole = op.Reshape(op.Concat(*rows, axis=0), [parts, kinds, -1])
    cut = op.Split(whole, op.const([1] * kinds), axis=1, _outputs=kinds)
    for node, piece in zip(group, cut, strict=True):
        y = node.outputs[0]
        joined = op.Reshape(piece, [d for d in S.dims_of(y) or () if isinstance(d, int)])
        replace_value(y, joined, list(y.uses()))
