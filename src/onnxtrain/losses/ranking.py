"""Losses over rows that belong together: embeddings of pairs and triplets in one batch."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.losses.base import LOSSES, Loss, TargetSpec, check_rank, reduce
from onnxtrain.losses.classification import CrossEntropy
from onnxtrain.losses.context import label_type
from onnxtrain.losses.embedding import TripletMargin

_EPSILON = 1e-12  # added to squared lengths
_LAYOUT = "[rows, D], where the texts of a pair or triplet are rows behind each other"


@LOSSES.named("multiple_negatives")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MultipleNegatives(Loss):
    """Cross entropy of finding, for each anchor, its own partner among those of the whole batch.

    The prediction has the embeddings of a batch ``[rows, D]``, each group of ``parts`` rows behind
    the last: anchor, partner, and with three parts a text that must not be found. Similarity is the
    cosine times ``scale``. It adds no input: what belongs together follows from the order.

    Args:
        scale: what cosines are multiplied by before the softmax.
        parts: 2 for pairs, 3 for triplets.
        reduction: ``"mean"`` or ``"sum"`` over the anchors, or ``"none"``.
    """

    scale: float = 20.0
    parts: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parts not in (2, 3):
            raise PrepareError(f"MultipleNegatives has 2 or 3 parts, not {self.parts}")

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return nothing: there is no target."""
        check_rank(self, prediction, [2], _LAYOUT)
        return []

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the loss."""
        check_rank(self, prediction, [2], _LAYOUT)
        square = op.ReduceSum(op.Mul(prediction, prediction), [1], keepdims=1)
        unit = op.Div(prediction, op.Sqrt(op.Add(square, _EPSILON)))
        anchors, *others = columns(op, unit, self.parts)
        candidates = others[0] if len(others) == 1 else op.Concat(*others, axis=0)
        scores = op.Mul(op.MatMul(anchors, op.Transpose(candidates, perm=[1, 0])), self.scale)
        own = op.cast(op.iota(op.size(anchors, 0)), label_type(op))
        plain = CrossEntropy(reduction=self.reduction, ignore_index=None)
        return plain.build(op, scores, own)


@LOSSES.named("triplet_rows")
@dataclasses.dataclass(frozen=True, kw_only=True)
class TripletRows(TripletMargin):
    """:class:`TripletMargin` of a single output: anchor, positive and negative are rows in turn.

    It adds no input; the batch has three rows per triplet, one behind the other.
    """

    predictions = 1

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return nothing: there is no target."""
        check_rank(self, prediction, [2], _LAYOUT)
        return []

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the loss."""
        check_rank(self, prediction, [2], _LAYOUT)
        each = super().per_element(op, *columns(op, prediction, 3))
        return reduce(op, each, self.reduction)


def columns(op: OpBuilder, x: ir.Value, parts: int) -> list[ir.Value]:
    """Return the first, second ... row of each group of ``parts`` rows, ``[groups, D]`` each."""
    grouped = op.reshape(x, [-1, parts, op.size(x, 1)])
    rows = [op.Squeeze(op.Slice(grouped, [i], [i + 1], [1]), [1]) for i in range(parts)]
    for row in rows:
        S.set_dims(row, ["groups", *op.dims(x)[1:]] if op.static(row) is None else op.dims(row))
    return rows


__all__ = ["MultipleNegatives", "TripletRows", "columns"]
