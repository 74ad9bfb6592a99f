"""The loss of language models: each token predicts the next one."""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.autodiff.rules.summed_scan import mark_summed
from onnxtrain.autodiff.variants import Choice, Choices, Form, Forms, chosen
from onnxtrain.errors import PrepareError, ShapeError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.losses.base import INT64, LOSSES, Loss, TargetSpec, check_rank, labels_for
from onnxtrain.losses.classification import CrossEntropy, guarded
from onnxtrain.losses.head import head_of
from onnxtrain.losses.vocabulary_loop import by_vocabulary, packed_head

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
        form = chosen(op, self._rows(prediction), CAUSAL_FORMS, CAUSAL_CHOICES)
        packed = packed_head(head_of(prediction)) if self.rows is None else None
        if packed is not None and form is CausalLM._by_rows:
            labels = guarded(op, following, self.ignore_index)
            total = by_vocabulary(op, packed, labels, self.ignore_index)
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
        return 0 if size < T.LOSS_VOCABULARY else max(1, T.LOSS_SCORES // size)

    def _at_once(self, op: OpBuilder, logits: ir.Value, labels: ir.Value) -> ir.Value:
        """Emit the sum over all positions as one cross entropy."""
        plain = CrossEntropy(axis=-1, reduction="sum", ignore_index=self.ignore_index)
        return plain.build(op, logits, labels)

    def _by_rows(self, op: OpBuilder, logits: ir.Value, labels: ir.Value) -> ir.Value:
        """Emit the same sum in a loop over some positions at a time."""
        head = head_of(logits)
        labels = op.Reshape(guarded(op, labels, self.ignore_index), [-1])
        rows = op.reshape(head.hidden, [-1, op.size(head.hidden, -1)])
        groups = _groups(op, labels, self._rows(logits))
        zero = op.const([0.0], logits.dtype)
        step = op.body(
            [zero, _slice_of(groups.cut(op, rows, 0), op),
             _slice_of(groups.cut(op, labels, self.ignore_index), op)]
        )  # fmt: skip
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
        mark_summed(result.producer())
        result.type = ir.TensorType(logits.dtype or ir.DataType.FLOAT)
        S.set_dims(result, [1])
        return op.Reshape(result, op.const([]))


CAUSAL_FORMS: Forms[int] = {
    "rows": Form(CausalLM._by_rows, lambda rows: rows > 0),
    "at once": Form(CausalLM._at_once),
}
CAUSAL_CHOICES: Choices[int] = [
    Choice("at once", lacks="GatherElements"),
    Choice("rows", prefers="loss-by-rows"),
    Choice("at once"),
]


class _Groups:
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


def _groups(op: OpBuilder, labels: ir.Value, most: int) -> _Groups:
    """Return groups of at most so many rows, as equal as they can be."""
    static = op.static(labels)
    if static is not None:
        rows = math.prod(static)
        count = max(1, -(-rows // most))
        size = -(-rows // count)
        return _Groups((op.const([count]), op.const([size])), op.const([count * size - rows]))
    rows = op.Shape(labels)
    count = op.Max(op.Div(op.Add(rows, most - 1), op.const([most])), op.const([1]))
    size = op.Div(op.Sub(op.Add(rows, count), op.const([1])), count)
    return _Groups((count, size), op.Sub(op.Mul(count, size), rows))


def _slice_of(cut: ir.Value, op: OpBuilder) -> ir.Value:
    """Return a value that has the type of one group."""
    one = ir.Value(name=op.names.fresh(f"{op.prefix}group"), type=cut.type)
    S.set_dims(one, op.dims(cut)[1:])
    return one


__all__ = ["CausalLM"]
