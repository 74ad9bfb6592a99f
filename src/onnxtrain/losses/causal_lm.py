"""The loss of language models: each token predicts the next one.

The last layer of a language model: what makes scores of hidden rows, each row by itself.

Cross entropy over a frozen, packed last layer: a part of the vocabulary at a time.

With scores ``x_v = <h, W_v>``, running maximum ``m`` and sum ``z`` of ``exp(x - m)``, the loss of a
row is ``log z + m - x_label`` and its gradient ``sum of exp(x_v - m) W_v / z - W_label``. Both are
sums over words, so that one loop gives both, and weights are unpacked once, some words at a time.

The loop is cut off from the sweep. ``<h - h', gradient>``, where ``h'`` is ``h`` as the loop hands
it through, is zero, and brings the gradient to ``h``. Where nobody asks for it, the loop sums the
loss only.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.autodiff.rule_registry import (
    Choice,
    Choices,
    Variant,
    Variants,
    mark_stop_gradient,
    select_variant,
)
from onnxtrain.autodiff.rules.control_flow import mark_sum_scan
from onnxtrain.autodiff.rules.quantize import emit_contrib
from onnxtrain.errors import PrepareError, ShapeError
from onnxtrain.expand.packed_matmul import PackedMatMul
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, copy_node
from onnxtrain.losses.classification import CrossEntropy, in_range_labels
from onnxtrain.losses.loss import INT64, LOSSES, Loss, TargetSpec, check_rank, labels_for

_UNARY = ("Cast", "Identity", "Neg", "Sigmoid", "Tanh")
_BINARY = ("Add", "Div", "Mul", "Sub")
_MATMULS = ("MatMul", "MatMulNBits")


@dataclasses.dataclass(frozen=True)
class Head:
    """Nodes that turn rows of ``hidden`` into rows of scores; without any, the scores are it."""

    hidden: ir.Value
    nodes: tuple[ir.Node, ...]
    scores: ir.Value

    def apply(self, op: OpBuilder, rows: ir.Value) -> ir.Value:
        """Emit the scores of some rows ``[R, H]``."""
        made = {self.hidden: rows}
        for node in self.nodes:
            inputs = [None if x is None else made.get(x, x) for x in node.inputs]
            made[node.outputs[0]] = copy_node(op, node, inputs)
            _set_rows(made[node.outputs[0]], node.outputs[0], rows)
        return made[self.scores]


def _set_rows(copy: ir.Value, original: ir.Value, rows: ir.Value) -> None:
    dims, count = S.dims_of(original), S.dims_of(rows)
    copy.type = original.type
    if dims is not None and count is not None:
        S.set_dims(copy, [count[0], dims[-1]])


def find_head(scores: ir.Value) -> Head:
    """Return the nodes from the last hidden rows to the scores ``[..., V]``, as far as they go.

    They are followed backwards until one value is left that leads to the scores through a product.
    A node that looks at several rows at once ends the search without a result.
    """
    open_values, nodes, product = [scores], list[ir.Node](), False
    while len(open_values) > 1 or not product:
        value = _last_computed(open_values)
        node = None if value is None else value.producer()
        sources = None if node is None else _row_inputs(node)
        if node is None or sources is None:
            return Head(scores, (), scores)
        open_values.remove(node.outputs[0])
        open_values += [x for x in sources if x not in open_values]
        nodes.append(node)
        product = product or node.op_type in _MATMULS
    (hidden,) = open_values
    dims, wide = S.dims_of(hidden), S.dims_of(scores)
    if dims is None or wide is None or dims[:-1] != wide[:-1] or not isinstance(dims[-1], int):
        return Head(scores, (), scores)
    return Head(hidden, tuple(reversed(nodes)), scores)


def _last_computed(values: list[ir.Value]) -> ir.Value | None:
    """Return the value that the graph computes last: nothing else of them can depend on it."""
    graph = values[0].graph
    made = {x.producer(): x for x in values if x.producer() is not None}
    if len(made) < len(values) or graph is None:
        return None
    if len(values) == 1:
        return values[0]
    return next((made[node] for node in reversed(graph) if node in made), None)


def _row_inputs(node: ir.Node) -> list[ir.Value] | None:
    """Return the inputs that rows of the output come from; ``None`` if rows are mixed."""
    inputs = [x for x in node.inputs if x is not None]
    if len(node.outputs) != 1 or not inputs:
        return None
    if node.op_type in _UNARY:
        return inputs
    if node.op_type in _MATMULS:
        flat = node.op_type == "MatMulNBits" or len(S.dims_of(inputs[1]) or ()) == 2
        return inputs[:1] if flat and _from_weights(inputs[1]) else None
    if node.op_type in _BINARY:
        rank = len(S.dims_of(node.outputs[0]) or ())
        rows = [x for x in inputs if len(S.dims_of(x) or ()) == rank]
        others = [x for x in inputs if x not in rows]
        same = all((S.dims_of(x) or ())[:-1] == (S.dims_of(inputs[0]) or ())[:-1] for x in rows)
        narrow = all(S.dims_of(x) is not None and len(S.dims_of(x) or ()) <= 1 for x in others)
        if rows and narrow and (same or len(rows) == 1) and rank > 1:
            return rows
    return None


def _from_weights(x: ir.Value) -> bool:
    """Return whether a value is a weight, or a weight in another layout or type."""
    seen: ir.Value | None = x
    while seen is not None and seen.producer() is not None:
        node = seen.producer()
        assert node is not None
        if node.op_type not in ("Cast", "DequantizeLinear", "Identity", "Reshape", "Transpose"):
            return False
        seen = node.inputs[0]
    return seen is not None and seen.is_initializer()


_LOWEST = float(np.finfo(np.float32).min)
_FEWEST = 256  # words at a time: with fewer, the loop costs more than it saves


@dataclasses.dataclass(frozen=True)
class PackedHead:
    """A last layer of 4 or 8 bits without bias: ``x = h W^T``, ``W`` of ``words`` rows."""

    hidden: ir.Value
    bits: ir.Value
    scales: ir.Value
    words: int
    width: int
    attributes: dict[str, int]
    piece: int

    def rows(self, op: OpBuilder, places: ir.Value) -> ir.Value:
        """Return rows of the weights, ``[places, width]``."""
        block = self.attributes["block_size"]
        blocks = self.width // block
        dims = [*(S.dims_of(places) or (None,)), blocks, block]
        scales = op.Reshape(self.scales, [self.words, blocks, 1])
        wide = emit_contrib(
            op,
            "GatherBlockQuantized",
            [self.bits, places, scales],
            self.scales.dtype,
            dims,
            gather_axis=0,
            quantize_axis=2,
            **self.attributes,
        )
        rows = op.Reshape(wide, [-1, self.width])
        S.set_dims(rows, [dims[0], self.width])
        return rows

    def parts(self, op: OpBuilder) -> PackedMatMul | None:
        """Return how the words of one turn are unpacked by operators on bytes, if they are."""
        block, bits = self.attributes["block_size"], self.attributes["bits"]
        form = PackedMatMul(self.piece, self.width, block, bits, self.scales.dtype)
        return select_variant(op, form, UNPACK_VARIANTS, UNPACK_CHOICES)(form)

    def turn(self, op: OpBuilder, first: ir.Value, form: PackedMatMul | None) -> list[ir.Value]:
        """Return the weights of the words from ``first`` on, as one matrix or in parts."""
        if form is None:
            return [self.rows(op, op.Add(first, op.iota(self.piece)))]
        start = op.Unsqueeze(first, [0])
        end = op.Add(start, self.piece)
        scales = op.Reshape(self.scales, [self.words, self.width // form.block])
        b, scales = (op.Slice(x, start, end, [0]) for x in (self.bits, scales))
        return form.weights(op, b, scales)


def _unpack_whole(form: PackedMatMul) -> None:
    return None


def _unpack_in_parts(form: PackedMatMul) -> PackedMatMul:
    return form


UNPACK_VARIANTS: Variants[PackedMatMul] = {
    "whole": Variant(_unpack_whole),
    "parts": Variant(_unpack_in_parts, PackedMatMul.fits),
}
UNPACK_CHOICES: Choices[PackedMatMul] = [
    Choice("parts", prefers="unpack-nbits-weights"),
    Choice("whole"),
]


def find_packed_head(head: Head) -> PackedHead | None:
    """Return the last layer if it is one packed product that the loop can take."""
    if len(head.nodes) != 1 or head.nodes[0].op_type != "MatMulNBits":
        return None
    node = head.nodes[0]
    a, bits, scales, *others = node.inputs
    named = S.attributes_of(node, 1)
    words, width, block = named["N"], named["K"], named["block_size"]
    plain = bits is not None and scales is not None and all(x is None for x in others)
    if a is None or bits is None or scales is None or not plain or width % block:
        return None
    if scales.dtype != ir.DataType.FLOAT or S.constant_of(bits) is None:
        return None
    piece = max((n for n in range(1, T.LOSS_CHUNK_CLASSES + 1) if words % n == 0), default=1)
    if piece < _FEWEST or words == piece:
        return None
    attributes = {"bits": named.get("bits", 4), "block_size": block}
    return PackedHead(head.hidden, bits, scales, words, width, attributes, piece)


def chunked_cross_entropy(
    op: OpBuilder, head: PackedHead, labels: ir.Value, ignored: int
) -> ir.Value:
    """Emit the sum of the losses of all positions whose label counts."""
    labels = op.Reshape(labels, [-1])
    rows = op.reshape(head.hidden, [-1, head.width])
    counts = op.Not(op.Equal(labels, ignored))
    chosen = head.rows(op, op.Where(counts, labels, op.const(0, labels.dtype)))
    form = head.parts(op)
    if form is not None:  # a sum over columns, in whatever order
        rows, chosen = form.group_columns(op, rows), form.group_columns(op, chosen)
    column = [op.size(rows, 0), 1]
    start = [op.full(column, _LOWEST, ir.DataType.FLOAT), op.full(column, 0.0, ir.DataType.FLOAT)]
    firsts = op.const(np.arange(0, head.words, head.piece, dtype=np.int64))
    if not op.differentiated:
        most, total, own = _loop(op, head, [*start, rows], firsts)
        score = op.ReduceSum(op.Mul(own, chosen), [1], keepdims=1)
        each = op.Sub(op.Add(op.Log(total), most), score)
        return op.ReduceSum(op.Where(op.Unsqueeze(counts, [1]), each, 0.0), keepdims=0)
    start += [rows, op.zeros_like(rows), chosen]
    most, total, own, mean, label_rows = _loop(op, head, start, firsts)
    score = op.ReduceSum(op.Mul(own, label_rows), [1], keepdims=1)
    losses = op.Sub(op.Add(op.Log(total), most), score)
    gradient = op.Sub(op.Div(mean, total), label_rows)
    bridge = op.ReduceSum(op.Mul(op.Sub(rows, own), gradient), [1], keepdims=1)
    each = op.Where(op.Unsqueeze(counts, [1]), op.Add(losses, bridge), 0.0)
    return op.ReduceSum(each, keepdims=0)


def _loop(
    op: OpBuilder, head: PackedHead, start: list[ir.Value], firsts: ir.Value
) -> tuple[ir.Value, ...]:
    """Return maximum and sum of all words, what was handed through, and weighted rows if asked."""
    step = op.body(start)
    first = ir.Value(name=op.names.fresh(f"{op.prefix}first"), type=firsts.type)
    first.shape = ir.Shape([])
    step.graph.inputs.append(first)
    most, total, own, *rest = step.graph.inputs[: len(start)]
    form = head.parts(op)
    weights = head.turn(step, first, form)
    x = step.MatMul(own, step.mT(weights[0])) if form is None else form.product(step, own, weights)
    higher = step.Max(most, step.ReduceMax(x, [1], keepdims=1))
    e, shrink = step.Exp(step.Sub(x, higher)), step.Exp(step.Sub(most, higher))
    summed = step.Add(step.Mul(total, shrink), step.ReduceSum(e, [1], keepdims=1))
    step.graph.outputs.extend([higher, summed, step.Identity(own)])
    if rest:
        mean, chosen = rest
        rows = (
            step.MatMul(e, weights[0])
            if form is None
            else form.matmul_transposed_weight(step, e, weights)
        )
        weighted = step.Add(step.Mul(mean, shrink), rows)
        step.graph.outputs.extend([weighted, step.Identity(chosen)])
    results = op.Scan(*start, firsts, body=step.graph, num_scan_inputs=1, _outputs=len(start))
    mark_stop_gradient(results[0].producer())
    for y, x in zip(results, start, strict=True):
        y.type, y.shape = x.type, x.shape
    return tuple(results)


_LAYOUT = "[batch, sequence, vocabulary]"


@LOSSES.named("causal_lm")
@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalLM(Loss):
    """Cross entropy of ``logits [batch, sequence, vocabulary]`` with the token that follows.

    Labels have the shape of the input ids, and usually are a copy of them: position ``i`` is
    compared with label ``i + 1`` inside the graph. The mean is over all labels that count; a batch
    without any has the loss 0. Where the vocabulary is large, and the runtime is better off so, the
    last layer and the loss are computed for some rows at a time, gradient included: no tensor of
    the size of all logits exists then.

    Args:
        ignore_index: a label that does not count: of prompts, and of padding.
        rows: how many positions are computed at a time; ``None`` follows from the vocabulary, 0 is
            all of them.
        reduction: ``"mean"`` or ``"sum"``.
    """

    ignore_index: int = -100
    rows: int | None = None

    reductions = ("mean", "sum")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows is not None and self.rows < 0:
            raise PrepareError(f"rows must not be negative: {self.rows}")

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return one label per position."""
        check_rank(self, prediction, [3], _LAYOUT)
        if (S.dims_of(prediction) or ())[1:2] == (1,):
            raise ShapeError(
                f"CausalLM: {S.describe_value(prediction)} are the scores of one position only\n"
                "hint: export the model so that it gives the logits of the whole sequence"
            )
        return [labels_for("labels", prediction, 2)]

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the loss."""
        (labels,) = targets
        check_rank(self, prediction, [3], _LAYOUT)
        following = self._following(op, labels)
        form = select_variant(op, self._rows(prediction), CAUSAL_VARIANTS, CAUSAL_CHOICES)
        packed = find_packed_head(find_head(prediction)) if self.rows is None else None
        if packed is not None and form is CausalLM._by_rows:
            labels = in_range_labels(op, following, self.ignore_index)
            total = chunked_cross_entropy(op, packed, labels, self.ignore_index)
        else:
            total = form(self, op, prediction, following)
        if self.reduction == "sum":
            return total
        counted = op.Where(op.Equal(following, self.ignore_index), 0.0, 1.0)
        count = op.ReduceSum(counted, keepdims=0)
        return op.Div(total, op.cast(op.Where(op.Less(count, 1.0), 1.0, count), total.dtype))

    def _following(self, op: OpBuilder, labels: ir.Value) -> ir.Value:
        """Return for each position the label of the next one; the last has none."""
        last = op.full([op.size(labels, 0), 1], self.ignore_index, labels.dtype or INT64)
        following = op.Concat(op.Slice(labels, [1], [2**31 - 1], [1]), last, axis=1)
        S.set_dims(following, S.dims_of(labels))
        return following

    def _rows(self, prediction: ir.Value) -> int:
        """Return how many positions to compute at a time, 0 for all."""
        size = (S.dims_of(prediction) or (None,))[-1]
        if self.rows is not None or not isinstance(size, int):
            return self.rows or 0
        return 0 if size < T.CHUNKED_LOSS_CLASSES else max(1, T.LOSS_CHUNK_SCORES // size)

    def _at_once(self, op: OpBuilder, logits: ir.Value, labels: ir.Value) -> ir.Value:
        """Emit the sum over all positions as one cross entropy."""
        plain = CrossEntropy(axis=-1, reduction="sum", ignore_index=self.ignore_index)
        return plain.build(op, logits, labels)

    def _by_rows(self, op: OpBuilder, logits: ir.Value, labels: ir.Value) -> ir.Value:
        """Emit the same sum in a loop over some positions at a time."""
        head = find_head(logits)
        labels = op.Reshape(in_range_labels(op, labels, self.ignore_index), [-1])
        rows = op.reshape(head.hidden, [-1, op.size(head.hidden, -1)])
        groups = _row_chunks(op, labels, self._rows(logits))
        zero = op.const([0.0], logits.dtype)
        step = op.body(
            [
                zero,
                _chunk_like(groups.cut(op, rows, 0), op),
                _chunk_like(groups.cut(op, labels, self.ignore_index), op),
            ]
        )
        total, some, wanted = step.graph.inputs
        x = head.apply(step, some)
        z = step.Sub(x, step.Ceil(step.ReduceMax(x, [1], keepdims=1)))
        whole = step.Squeeze(step.Log(step.ReduceSum(step.Exp(z), [1], keepdims=1)), [1])
        ignored = step.Equal(wanted, self.ignore_index)
        at = step.Unsqueeze(step.Where(ignored, step.const(0, wanted.dtype), wanted), [1])
        each = step.Sub(whole, step.Squeeze(step.GatherElements(z, at, axis=1), [1]))
        counted = step.Where(ignored, step.const(0.0, each.dtype), each)
        step.graph.outputs.append(step.Add(total, step.ReduceSum(counted, keepdims=0)))
        result = op.Scan(
            *(zero, *groups.cuts),
            body=step.graph,
            num_scan_inputs=2,
        )
        mark_sum_scan(result.producer())
        result.type = ir.TensorType(logits.dtype or ir.DataType.FLOAT)
        S.set_dims(result, [1])
        return op.Reshape(result, op.const([]))


CAUSAL_VARIANTS: Variants[int] = {
    "rows": Variant(CausalLM._by_rows, lambda rows: rows > 0),
    "at once": Variant(CausalLM._at_once),
}
CAUSAL_CHOICES: Choices[int] = [
    Choice("at once", lacks="GatherElements"),
    Choice("rows", prefers="chunked-loss"),
    Choice("at once"),
]


class _RowChunks:
    """Rows cut into groups of one size; the last is filled up."""

    def __init__(self, sizes: tuple[ir.Value, ir.Value], short: ir.Value) -> None:
        self.count, self.size = sizes
        self.short = short
        self.cuts: list[ir.Value] = []

    def cut(self, op: OpBuilder, x: ir.Value, fill: float) -> ir.Value:
        """Return ``[groups, size, ...]``."""
        wide = [0] * (op.rank(x) - 1)
        pads = op.Concat(
            op.const([0, *wide]), self.short, *([op.const(wide)] if wide else []), axis=0
        )
        filled = op.Pad(x, pads, op.const(fill, x.dtype))
        inner = op.dims(x)[1:]
        cut = op.reshape(filled, [self.count, self.size, *(d for d in inner if isinstance(d, int))])
        S.set_dims(cut, ["loss_groups", "loss_rows", *inner])
        self.cuts.append(cut)
        return cut


def _row_chunks(op: OpBuilder, labels: ir.Value, most: int) -> _RowChunks:
    """Return groups of at most so many rows, as equal as they can be."""
    static = op.static(labels)
    if static is not None:
        rows = math.prod(static)
        count = max(1, -(-rows // most))
        size = -(-rows // count)
        return _RowChunks((op.const([count]), op.const([size])), op.const([count * size - rows]))
    rows = op.Shape(labels)
    count = op.Max(op.Div(op.Add(rows, most - 1), op.const([most])), op.const([1]))
    size = op.Div(op.Sub(op.Add(rows, count), op.const([1])), count)
    return _RowChunks((count, size), op.Sub(op.Mul(count, size), rows))


def _chunk_like(cut: ir.Value, op: OpBuilder) -> ir.Value:
    """Return a value that has the type of one group."""
    one = ir.Value(name=op.names.fresh(f"{op.prefix}group"), type=cut.type)
    S.set_dims(one, op.dims(cut)[1:])
    return one
