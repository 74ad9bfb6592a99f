"""Cross entropy over a frozen, packed last layer: a part of the vocabulary at a time.

With scores ``x_v = <h, W_v>``, running maximum ``m`` and sum ``z`` of ``exp(x - m)``, the loss of a
row is ``log z + m - x_label`` and its gradient ``sum of exp(x_v - m) W_v / z - W_label``. Both are
sums over words, so that one loop gives both, and weights are unpacked once, some words at a time.

The loop is cut off from the sweep. ``<h - h', gradient>``, where ``h'`` is ``h`` as the loop hands
it through, is zero, and brings the gradient to ``h``. Where nobody asks for it, the loop sums the
loss only.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.autodiff.registry import mark_stopped
from onnxtrain.autodiff.rules.packed_weights import emit_contrib
from onnxtrain.autodiff.variants import Choice, Choices, Form, Forms, chosen
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.packed_parts import PackedParts
from onnxtrain.losses.head import Head

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
            op, "GatherBlockQuantized", [self.bits, places, scales], self.scales.dtype, dims,
            gather_axis=0, quantize_axis=2, **self.attributes,
        )  # fmt: skip
        rows = op.Reshape(wide, [-1, self.width])
        S.set_dims(rows, [dims[0], self.width])
        return rows

    def parts(self, op: OpBuilder) -> PackedParts | None:
        """Return how the words of one turn are unpacked by operators on bytes, if they are."""
        block, bits = self.attributes["block_size"], self.attributes["bits"]
        form = PackedParts(self.piece, self.width, block, bits, self.scales.dtype)
        return chosen(op, form, WORD_FORMS, WORD_CHOICES)(form)

    def turn(self, op: OpBuilder, first: ir.Value, form: PackedParts | None) -> list[ir.Value]:
        """Return the weights of the words from ``first`` on, as one matrix or in parts."""
        if form is None:
            return [self.rows(op, op.Add(first, op.iota(self.piece)))]
        start = op.Unsqueeze(first, [0])
        end = op.Add(start, self.piece)
        scales = op.Reshape(self.scales, [self.words, self.width // form.block])
        b, scales = (op.Slice(x, start, end, [0]) for x in (self.bits, scales))
        return form.weights(op, b, scales)


def _whole(form: PackedParts) -> None:
    return None


def _in_parts(form: PackedParts) -> PackedParts:
    return form


WORD_FORMS: Forms[PackedParts] = {
    "whole": Form(_whole),
    "parts": Form(_in_parts, PackedParts.fits),
}
WORD_CHOICES: Choices[PackedParts] = [Choice("parts", prefers="packed-parts"), Choice("whole")]


def packed_head(head: Head) -> PackedHead | None:
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
    piece = max((n for n in range(1, T.LOSS_WORDS + 1) if words % n == 0), default=1)
    if piece < _FEWEST or words == piece:
        return None
    attributes = {"bits": named.get("bits", 4), "block_size": block}
    return PackedHead(head.hidden, bits, scales, words, width, attributes, piece)


def by_vocabulary(op: OpBuilder, head: PackedHead, labels: ir.Value, ignored: int) -> ir.Value:
    """Emit the sum of the losses of all positions whose label counts."""
    labels = op.Reshape(labels, [-1])
    rows = op.reshape(head.hidden, [-1, head.width])
    counts = op.Not(op.Equal(labels, ignored))
    chosen = head.rows(op, op.Where(counts, labels, op.const(0, labels.dtype)))
    form = head.parts(op)
    if form is not None:  # a sum over columns, in whatever order
        rows, chosen = form.apart(op, rows), form.apart(op, chosen)
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
        rows = step.MatMul(e, weights[0]) if form is None else form.product_back(step, e, weights)
        weighted = step.Add(step.Mul(mean, shrink), rows)
        step.graph.outputs.extend([weighted, step.Identity(chosen)])
    results = op.Scan(*start, firsts, body=step.graph, num_scan_inputs=1, _outputs=len(start))
    mark_stopped(results[0].producer())
    for y, x in zip(results, start, strict=True):
        y.type, y.shape = x.type, x.shape
    return tuple(results)


__all__ = ["PackedHead", "by_vocabulary", "packed_head"]
