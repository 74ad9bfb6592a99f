"""The loss of causal language models, computed in chunks where the vocabulary is large.

The logits ``[batch, sequence, vocabulary]`` are the largest tensor of a language model. Two loops
avoid it:

* over rows: a Scan applies the last layer (:class:`Head`) and the cross entropy to some positions
  at a time, and is differentiated like any Scan;
* over the vocabulary, for a frozen, packed last layer (:class:`PackedHead`): with scores
  ``x_v = <h, W_v>``, running maximum ``m`` and sum ``z`` of ``exp(x - m)``, the loss of a row is
  ``log z + m - x_label``, and its gradient with respect to ``h`` is
  ``sum_v exp(x_v - m) W_v / z - W_label``. Both are sums over words, so one loop computes both and
  unpacks each weight once.

The second loop is not differentiated, because it computes the gradient itself. The term
``<h - h', gradient>``, where ``h'`` is a copy of ``h`` that passes through the loop, has value 0
and passes that gradient to ``h``.

The file in order: finding the last layer, the loop over the vocabulary, the loss with the loop over
rows.
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
from onnxtrain.errors import PrepareError, ShapeError
from onnxtrain.expand.packed_matmul import PackedMatMul
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, copy_node
from onnxtrain.losses.classification import CrossEntropy, in_range_labels
from onnxtrain.losses.logits import Reads
from onnxtrain.losses.loss import INT64, LOSSES, Loss, TargetSpec, check_rank, labels_for

_UNARY = ("Cast", "Identity", "Neg", "Sigmoid", "Tanh")
_BINARY = ("Add", "Div", "Mul", "Sub")
_MATMULS = ("MatMul", "MatMulNBits")


@dataclasses.dataclass(frozen=True)
class Head:
    """Nodes that compute rows of scores from rows of ``hidden``, each row independently.

    Without nodes, ``hidden`` is the scores.
    """

    hidden: ir.Value
    nodes: tuple[ir.Node, ...]
    scores: ir.Value

    def apply(self, op: OpBuilder, rows: ir.Value) -> ir.Value:
        """Emit the scores of some rows ``[R, H]``."""
        copies = {self.hidden: rows}
        for node in self.nodes:
            inputs = [None if x is None else copies.get(x, x) for x in node.inputs]
            copies[node.outputs[0]] = copy_node(op, node, inputs)
            _set_rows(copies[node.outputs[0]], node.outputs[0], rows)
        return copies[self.scores]


def _set_rows(copy: ir.Value, original: ir.Value, rows: ir.Value) -> None:
    dims, count = S.dims_of(original), S.dims_of(rows)
    copy.type = original.type
    if dims is not None and count is not None:
        S.set_dims(copy, [count[0], dims[-1]])


def find_head(scores: ir.Value) -> Head:
    """Return the nodes from the last hidden states to the scores ``[..., V]``.

    The search follows producers backwards until a single value is left that reaches the scores
    through a MatMul. It returns a head without nodes if a node mixes rows.
    """
    open_values, nodes, found_matmul = [scores], list[ir.Node](), False
    while len(open_values) > 1 or not found_matmul:
        value = _last_computed(open_values)
        node = None if value is None else value.producer()
        sources = None if node is None else _row_inputs(node)
        if node is None or sources is None:
            return Head(scores, (), scores)
        open_values.remove(node.outputs[0])
        open_values += [x for x in sources if x not in open_values]
        nodes.append(node)
        found_matmul = found_matmul or node.op_type in _MATMULS
    (hidden,) = open_values
    dims, out = S.dims_of(hidden), S.dims_of(scores)
    if dims is None or out is None or dims[:-1] != out[:-1] or not isinstance(dims[-1], int):
        return Head(scores, (), scores)
    return Head(hidden, tuple(reversed(nodes)), scores)


def _last_computed(values: list[ir.Value]) -> ir.Value | None:
    """Return the value that the graph computes last: none of the others depends on it."""
    graph = values[0].graph
    by_producer = {x.producer(): x for x in values if x.producer() is not None}
    if len(by_producer) < len(values) or graph is None:
        return None
    if len(values) == 1:
        return values[0]
    return next((by_producer[node] for node in reversed(graph) if node in by_producer), None)


def _row_inputs(node: ir.Node) -> list[ir.Value] | None:
    """Return the inputs that rows of the output are computed from; ``None`` if rows are mixed."""
    inputs = [x for x in node.inputs if x is not None]
    if len(node.outputs) != 1 or not inputs:
        return None
    if node.op_type in _UNARY:
        return inputs
    if node.op_type in _MATMULS:
        is_2d = node.op_type == "MatMulNBits" or len(S.dims_of(inputs[1]) or ()) == 2
        return inputs[:1] if is_2d and _is_weight(inputs[1]) else None
    if node.op_type in _BINARY:
        rank = len(S.dims_of(node.outputs[0]) or ())
        rows = [x for x in inputs if len(S.dims_of(x) or ()) == rank]
        others = [x for x in inputs if x not in rows]
        same = all((S.dims_of(x) or ())[:-1] == (S.dims_of(inputs[0]) or ())[:-1] for x in rows)
        vectors = all(S.dims_of(x) is not None and len(S.dims_of(x) or ()) <= 1 for x in others)
        if rows and vectors and (same or len(rows) == 1) and rank > 1:
            return rows
    return None


def _is_weight(x: ir.Value) -> bool:
    """Return whether a value is an initializer, or one in another layout or type."""
    source: ir.Value | None = x
    while source is not None and source.producer() is not None:
        node = source.producer()
        assert node is not None
        if node.op_type not in ("Cast", "DequantizeLinear", "Identity", "Reshape", "Transpose"):
            return False
        source = node.inputs[0]
    return source is not None and source.is_initializer()


_LOWEST = float(np.finfo(np.float32).min)
_MIN_CHUNK_WORDS = 256  # with fewer words per iteration, the loop costs more than it saves


@dataclasses.dataclass(frozen=True)
class PackedHead:
    """A quantized last layer without bias: ``x = h W^T``, with ``W`` [words, width] in 4 or 8 bits.

    The loop handles ``chunk`` words per iteration.
    """

    hidden: ir.Value
    bits: ir.Value
    scales: ir.Value
    words: int
    width: int
    attributes: dict[str, int]
    chunk: int

    def rows(self, op: OpBuilder, indices: ir.Value) -> ir.Value:
        """Return dequantized rows of the weights, ``[indices, width]``."""
        block = self.attributes["block_size"]
        blocks = self.width // block
        dims = [*(S.dims_of(indices) or (None,)), blocks, block]
        scales = op.Reshape(self.scales, [self.words, blocks, 1])
        dequantized = op.emit_contrib(
            "GatherBlockQuantized",
            [self.bits, indices, scales],
            self.scales.dtype,
            dims,
            gather_axis=0,
            quantize_axis=2,
            **self.attributes,
        )
        rows = op.Reshape(dequantized, [-1, self.width])
        S.set_dims(rows, [dims[0], self.width])
        return rows

    def packed_matmul(self, op: OpBuilder) -> PackedMatMul | None:
        """Return the matmul that unpacks a chunk of words with bitwise operators, if preferred."""
        block, bits = self.attributes["block_size"], self.attributes["bits"]
        matmul = PackedMatMul(self.chunk, self.width, block, bits, self.scales.dtype)
        return select_variant(op, matmul, UNPACK_VARIANTS, UNPACK_CHOICES)(matmul)

    def chunk_weights(
        self, op: OpBuilder, first: ir.Value, matmul: PackedMatMul | None
    ) -> list[ir.Value]:
        """Return the weights of ``chunk`` words from ``first``, as one matrix or in parts."""
        if matmul is None:
            return [self.rows(op, op.Add(first, op.iota(self.chunk)))]
        start = op.Unsqueeze(first, [0])
        end = op.Add(start, self.chunk)
        scales = op.Reshape(self.scales, [self.words, self.width // matmul.block])
        b, scales = (op.Slice(x, start, end, [0]) for x in (self.bits, scales))
        return matmul.weights(op, b, scales)


def _unpack_whole(matmul: PackedMatMul) -> None:
    return None


def _unpack_in_parts(matmul: PackedMatMul) -> PackedMatMul:
    return matmul


UNPACK_VARIANTS: Variants[PackedMatMul] = {
    "whole": Variant(_unpack_whole),
    "parts": Variant(_unpack_in_parts, PackedMatMul.fits),
}
UNPACK_CHOICES: Choices[PackedMatMul] = [
    Choice("parts", prefers="unpack-nbits-weights"),
    Choice("whole"),
]


def find_packed_head(head: Head) -> PackedHead | None:
    """Return the last layer if it is a single MatMulNBits that the loop supports."""
    if len(head.nodes) != 1 or head.nodes[0].op_type != "MatMulNBits":
        return None
    node = head.nodes[0]
    a, bits, scales, *others = node.inputs
    named = S.attributes_of(node, 1)
    words, width, block = named["N"], named["K"], named["block_size"]
    has_zero_points = any(x is not None for x in others)
    if a is None or bits is None or scales is None or has_zero_points or width % block:
        return None
    if scales.dtype != ir.DataType.FLOAT or S.constant_of(bits) is None:
        return None
    chunk = max((n for n in range(1, T.LOSS_CHUNK_CLASSES + 1) if words % n == 0), default=1)
    if chunk < _MIN_CHUNK_WORDS or words == chunk:
        return None
    attributes = {"bits": named.get("bits", 4), "block_size": block}
    return PackedHead(head.hidden, bits, scales, words, width, attributes, chunk)


def chunked_cross_entropy(
    op: OpBuilder, head: PackedHead, labels: ir.Value, ignored: int
) -> ir.Value:
    """Emit the sum of the losses of all positions whose label is not ignored."""
    labels = op.Reshape(labels, [-1])
    rows = op.reshape(head.hidden, [-1, head.width])
    counts = op.Not(op.Equal(labels, ignored))
    label_weights = head.rows(op, op.Where(counts, labels, op.const(0, labels.dtype)))
    matmul = head.packed_matmul(op)
    if matmul is not None:  # it permutes columns, which does not change dot products
        rows, label_weights = (
            matmul.group_columns(op, rows),
            matmul.group_columns(op, label_weights),
        )
    column = [op.size(rows, 0), 1]
    start = [op.full(column, _LOWEST, ir.DataType.FLOAT), op.full(column, 0.0, ir.DataType.FLOAT)]
    firsts = op.const(np.arange(0, head.words, head.chunk, dtype=np.int64))
    if not op.differentiated:
        maximum, total, rows_copy = _loop(op, head, [*start, rows], firsts)
        score = op.ReduceSum(op.Mul(rows_copy, label_weights), [1], keepdims=1)
        each = op.Sub(op.Add(op.Log(total), maximum), score)
        return op.ReduceSum(op.Where(op.Unsqueeze(counts, [1]), each, 0.0), keepdims=0)
    start += [rows, op.zeros_like(rows), label_weights]
    maximum, total, rows_copy, weighted, label_weights = _loop(op, head, start, firsts)
    score = op.ReduceSum(op.Mul(rows_copy, label_weights), [1], keepdims=1)
    losses = op.Sub(op.Add(op.Log(total), maximum), score)
    gradient = op.Sub(op.Div(weighted, total), label_weights)
    gradient_term = op.ReduceSum(op.Mul(op.Sub(rows, rows_copy), gradient), [1], keepdims=1)
    each = op.Where(op.Unsqueeze(counts, [1]), op.Add(losses, gradient_term), 0.0)
    return op.ReduceSum(each, keepdims=0)


def _loop(
    op: OpBuilder, head: PackedHead, start: list[ir.Value], firsts: ir.Value
) -> tuple[ir.Value, ...]:
    """Emit the Scan over chunks of words; return the final values of its carried tensors.

    ``start`` is the maximum, the sum of exponentials and the rows; for the gradient also the
    weighted sum of weights and the weights of the labels.
    """
    step = op.body(start)
    first = ir.Value(name=op.names.fresh(f"{op.prefix}first"), type=firsts.type)
    first.shape = ir.Shape([])
    step.graph.inputs.append(first)
    maximum, total, rows, *rest = step.graph.inputs[: len(start)]
    matmul = head.packed_matmul(op)
    weights = head.chunk_weights(step, first, matmul)
    if matmul is None:
        x = step.MatMul(rows, step.mT(weights[0]))
    else:
        x = matmul.product(step, rows, weights)
    new_maximum = step.Max(maximum, step.ReduceMax(x, [1], keepdims=1))
    e, rescale = step.Exp(step.Sub(x, new_maximum)), step.Exp(step.Sub(maximum, new_maximum))
    new_total = step.Add(step.Mul(total, rescale), step.ReduceSum(e, [1], keepdims=1))
    step.graph.outputs.extend([new_maximum, new_total, step.Identity(rows)])
    if rest:
        weighted, label_weights = rest
        if matmul is None:
            chunk_sum = step.MatMul(e, weights[0])
        else:
            chunk_sum = matmul.matmul_transposed_weight(step, e, weights)
        new_weighted = step.Add(step.Mul(weighted, rescale), chunk_sum)
        step.graph.outputs.extend([new_weighted, step.Identity(label_weights)])
    results = op.Scan(*start, firsts, body=step.graph, num_scan_inputs=1, _outputs=len(start))
    mark_stop_gradient(results[0].producer())
    for y, x in zip(results, start, strict=True):
        y.type, y.shape = x.type, x.shape
    return tuple(results)


_LAYOUT = "[batch, sequence, vocabulary]"


def next_labels(op: OpBuilder, labels: ir.Value, ignored: int) -> ir.Value:
    """Return for each position the label of the next one; the last position is ignored."""
    last = op.full([op.size(labels, 0), 1], ignored, labels.dtype or INT64)
    following = op.Concat(op.Slice(labels, [1], [2**31 - 1], [1]), last, axis=1)
    S.set_dims(following, S.dims_of(labels))
    return following


@LOSSES.named("causal_lm")
@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalLM(Loss):
    """Cross entropy of ``logits [batch, sequence, vocabulary]`` with the next token.

    Labels have the shape of the input ids and usually are a copy of them: the graph compares
    position ``i`` with label ``i + 1``. The mean is over all labels that are not ignored; a batch
    without any has the loss 0. For a large vocabulary, and targets that prefer it, the last layer,
    the loss and its gradient are computed in chunks of rows, so that no tensor of the size of all
    logits exists.

    Args:
        ignore_index: label to ignore, for prompts and padding.
        rows: positions per chunk; ``None`` chooses by the size of the vocabulary, 0 disables
            chunks.
        reduction: ``"mean"`` or ``"sum"``.
    """

    ignore_index: int = -100
    rows: int | None = None

    reductions = ("mean", "sum")
    reads = Reads.SOFTMAX_LOGITS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows is not None and self.rows < 0:
            raise PrepareError(f"rows must not be negative: {self.rows}")

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return one label per position."""
        check_rank(self, prediction, [3], _LAYOUT)
        if (S.dims_of(prediction) or ())[1:2] == (1,):
            raise ShapeError(
                f"CausalLM: {S.describe_value(prediction)} has the scores of one position only\n"
                "hint: export the model with logits for the whole sequence"
            )
        return [labels_for("labels", prediction, 2)]

    def normalized_axis(self, prediction: ir.Value) -> int | None:
        """Return the axis of the vocabulary."""
        return 2

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the loss."""
        (labels,) = targets
        check_rank(self, prediction, [3], _LAYOUT)
        following = next_labels(op, labels, self.ignore_index)
        emit = select_variant(op, self._rows(prediction), CAUSAL_VARIANTS, CAUSAL_CHOICES)
        packed = find_packed_head(find_head(prediction)) if self.rows is None else None
        if packed is not None and emit is CausalLM._by_rows:
            labels = in_range_labels(op, following, self.ignore_index)
            total = chunked_cross_entropy(op, packed, labels, self.ignore_index)
        else:
            total = emit(self, op, prediction, following)
        if self.reduction == "sum":
            return total
        counted = op.Where(op.Equal(following, self.ignore_index), 0.0, 1.0)
        count = op.ReduceSum(counted, keepdims=0)
        return op.Div(total, op.cast(op.Where(op.Less(count, 1.0), 1.0, count), total.dtype))

    def _rows(self, prediction: ir.Value) -> int:
        """Return the number of positions per chunk; 0 means no chunks."""
        size = (S.dims_of(prediction) or (None,))[-1]
        if self.rows is not None or not isinstance(size, int):
            return self.rows or 0
        return 0 if size < T.CHUNKED_LOSS_CLASSES else max(1, T.LOSS_CHUNK_SCORES // size)

    def _whole(self, op: OpBuilder, logits: ir.Value, labels: ir.Value) -> ir.Value:
        """Emit the sum over all positions as one cross entropy."""
        cross_entropy = CrossEntropy(axis=-1, reduction="sum", ignore_index=self.ignore_index)
        return cross_entropy.build(op, logits, labels)

    def _by_rows(self, op: OpBuilder, logits: ir.Value, labels: ir.Value) -> ir.Value:
        """Emit the same sum as a Scan over chunks of positions."""
        head = find_head(logits)
        labels = op.Reshape(in_range_labels(op, labels, self.ignore_index), [-1])
        rows = op.reshape(head.hidden, [-1, op.size(head.hidden, -1)])
        chunks = _row_chunks(op, labels, self._rows(logits))
        zero = op.const([0.0], logits.dtype)
        step = op.body(
            [
                zero,
                _chunk_like(chunks.cut(op, rows, 0), op),
                _chunk_like(chunks.cut(op, labels, self.ignore_index), op),
            ]
        )
        total, chunk, chunk_labels = step.graph.inputs
        x = head.apply(step, chunk)
        z = step.Sub(x, step.Ceil(step.ReduceMax(x, [1], keepdims=1)))
        lse = step.Squeeze(step.Log(step.ReduceSum(step.Exp(z), [1], keepdims=1)), [1])
        ignored = step.Equal(chunk_labels, self.ignore_index)
        zero_label = step.const(0, chunk_labels.dtype)
        index = step.Unsqueeze(step.Where(ignored, zero_label, chunk_labels), [1])
        each = step.Sub(lse, step.Squeeze(step.GatherElements(z, index, axis=1), [1]))
        counted = step.Where(ignored, step.const(0.0, each.dtype), each)
        step.graph.outputs.append(step.Add(total, step.ReduceSum(counted, keepdims=0)))
        result = op.Scan(zero, *chunks.cuts, body=step.graph, num_scan_inputs=2)
        mark_sum_scan(result.producer())
        result.type = ir.TensorType(logits.dtype or ir.DataType.FLOAT)
        S.set_dims(result, [1])
        return op.Reshape(result, op.const([]))


CAUSAL_VARIANTS: Variants[int] = {
    "rows": Variant(CausalLM._by_rows, lambda rows: rows > 0),
    "whole": Variant(CausalLM._whole),
}
CAUSAL_CHOICES: Choices[int] = [
    Choice("whole", lacks="GatherElements"),
    Choice("rows", prefers="chunked-loss"),
    Choice("whole"),
]


class _RowChunks:
    """Rows in chunks of one size; the last chunk is padded."""

    def __init__(self, count: ir.Value, size: ir.Value, padding: ir.Value) -> None:
        self.count, self.size, self.padding = count, size, padding
        self.cuts: list[ir.Value] = []

    def cut(self, op: OpBuilder, x: ir.Value, fill: float) -> ir.Value:
        """Return ``[count, size, ...]``, and append it to ``cuts``."""
        zeros = [0] * (op.rank(x) - 1)
        pads = op.Concat(
            op.const([0, *zeros]), self.padding, *([op.const(zeros)] if zeros else []), axis=0
        )
        padded = op.Pad(x, pads, op.const(fill, x.dtype))
        inner = op.dims(x)[1:]
        cut = op.reshape(padded, [self.count, self.size, *(d for d in inner if isinstance(d, int))])
        S.set_dims(cut, ["loss_groups", "loss_rows", *inner])
        self.cuts.append(cut)
        return cut


def _row_chunks(op: OpBuilder, labels: ir.Value, max_rows: int) -> _RowChunks:
    """Return chunks of at most ``max_rows`` rows and of nearly equal size."""
    static = op.static(labels)
    if static is not None:
        rows = math.prod(static)
        count = max(1, -(-rows // max_rows))
        size = -(-rows // count)
        return _RowChunks(op.const([count]), op.const([size]), op.const([count * size - rows]))
    rows = op.Shape(labels)
    count = op.Max(op.Div(op.Add(rows, max_rows - 1), op.const([max_rows])), op.const([1]))
    size = op.Div(op.Sub(op.Add(rows, count), op.const([1])), count)
    return _RowChunks(count, size, op.Sub(op.Mul(count, size), rows))


def _chunk_like(cut: ir.Value, op: OpBuilder) -> ir.Value:
    """Return a new value with the type and shape of one chunk."""
    chunk = ir.Value(name=op.names.fresh(f"{op.prefix}group"), type=cut.type)
    S.set_dims(chunk, op.dims(cut)[1:])
    return chunk
