"""Losses with float targets, and losses of embeddings.

In order: elementwise losses (MSE, L1, Huber, SmoothL1, KLDiv), losses of pairs and triplets of
vectors (CosineEmbedding, TripletMargin), and losses of one batch whose rows are pairs or triplets
(MultipleNegatives, TripletRows).
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import onnx_ir as ir

from onnxtrain.errors import PrepareError, ShapeError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.losses.attach import label_type
from onnxtrain.losses.classification import CrossEntropy, clamp
from onnxtrain.losses.logits import Reads
from onnxtrain.losses.loss import (
    LOSSES,
    Loss,
    TargetSpec,
    check_rank,
    check_same_rank,
    reduce,
    rows_of,
    target_like,
)


@LOSSES.named("mse")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MSE(Loss):
    """``(x - t)^2``."""

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the squares."""
        check_same_rank(self, prediction, *targets)
        d = op.Sub(prediction, *targets)
        return op.Mul(d, d)


@LOSSES.named("l1")
@dataclasses.dataclass(frozen=True, kw_only=True)
class L1(Loss):
    """``|x - t|``; the derivative at 0 is 0."""

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the absolute differences."""
        check_same_rank(self, prediction, *targets)
        return op.Abs(op.Sub(prediction, *targets))


@LOSSES.named("huber")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Huber(Loss):
    """``d^2 / 2`` for ``d = |x - t|`` below ``delta``, then ``delta (d - delta / 2)``."""

    delta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.delta > 0:
            raise PrepareError(f"Huber: delta must be positive: {self.delta}")

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit ``m (d - m / 2)`` with ``m = min(d, delta)``, which does not overflow."""
        check_same_rank(self, prediction, *targets)
        d = op.Abs(op.Sub(prediction, *targets))
        m = op.Clip(d, None, op.const(self.delta, d.dtype))
        return op.Mul(m, op.Sub(d, op.Mul(m, 0.5)))


@LOSSES.named("smooth_l1")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SmoothL1(Loss):
    """``d^2 / (2 beta)`` for ``d = |x - t|`` below ``beta``, then ``d - beta / 2``."""

    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta >= 0:
            raise PrepareError(f"SmoothL1: beta must not be negative: {self.beta}")

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the Huber loss divided by ``beta``; ``beta=0`` is L1."""
        if self.beta == 0:
            return L1(reduction="none").per_element(op, prediction, *targets)
        huber = Huber(delta=self.beta).per_element(op, prediction, *targets)
        return huber if self.beta == 1.0 else op.Mul(huber, 1.0 / self.beta)


@LOSSES.named("kl_div")
@dataclasses.dataclass(frozen=True, kw_only=True)
class KLDiv(Loss):
    """``t (log t - x)``: the prediction is a log-probability, the target a probability.

    With ``log_target`` the target is a log-probability, too. As in torch, ``reduction="mean"``
    divides by the number of elements; ``"batchmean"`` divides by the batch size, which gives the
    mathematical definition.
    """

    log_target: bool = False

    reductions: ClassVar[tuple[str, ...]] = ("none", "mean", "sum", "batchmean")
    reads = Reads.LOG_PROBABILITIES

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the terms; a target of 0 contributes 0."""
        check_same_rank(self, prediction, *targets)
        (t,) = targets
        if self.log_target:
            return op.Mul(op.Exp(t), op.Sub(t, prediction))
        one = op.const(1.0, t.dtype)
        log = op.Log(op.Where(op.Greater(t, 0.0), t, one))
        return op.Sub(op.Mul(t, log), op.Mul(t, prediction))

    def reduce(self, op: OpBuilder, each: ir.Value) -> ir.Value:
        """Emit the mean or the sum."""
        if self.reduction != "batchmean":
            return super().reduce(op, each)
        total = op.ReduceSum(each, keepdims=0)
        return op.Div(total, op.count(each, [0])) if op.rank(each) else total


_EPSILON = 1e-12  # added to squared norms, as in torch


@LOSSES.named("cosine_embedding")
@dataclasses.dataclass(frozen=True, kw_only=True)
class CosineEmbedding(Loss):
    """``1 - cos(x1, x2)`` where the target is 1, ``max(0, cos(x1, x2) - margin)`` where it is -1.

    ``x1`` is the prediction; ``x2`` is another output of the model, or an input named ``other``;
    ``target`` has one value per row.
    """

    margin: float = 0.0

    predictions: ClassVar[int] = 2

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return the vectors to compare with, and a target of 1 or -1 per row."""
        _check_rows(self, prediction)
        return [target_like("other", prediction), rows_of("target", prediction)]

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit one loss per row."""
        other, target = targets
        _check_rows(self, prediction)
        check_same_rank(self, prediction, other)
        dot = _row_sum(op, op.Mul(prediction, other))
        square = op.Mul(_square(op, prediction), _square(op, other))
        cosine = op.Div(dot, op.Sqrt(square))
        zero = op.const(0.0, cosine.dtype)
        near = op.Where(op.Equal(target, 1.0), op.Sub(1.0, cosine), zero)
        far = clamp(op, op.Sub(cosine, self.margin) if self.margin else cosine)
        return op.Add(near, op.Where(op.Equal(target, -1.0), far, zero))


def _row_sum(op: OpBuilder, x: ir.Value) -> ir.Value:
    return op.ReduceSum(x, [-1], keepdims=0)


def _square(op: OpBuilder, x: ir.Value) -> ir.Value:
    return op.Add(_row_sum(op, op.Mul(x, x)), _EPSILON)


def _check_rows(loss: Loss, x: ir.Value) -> None:
    if S.rank_of(x) == 0:
        raise ShapeError(
            f"{type(loss).__name__} does not accept {S.describe_value(x)}\n"
            "hint: it expects [N, D] or [D]"
        )


@LOSSES.named("triplet_margin")
@dataclasses.dataclass(frozen=True, kw_only=True)
class TripletMargin(Loss):
    """``max(0, margin + d(anchor, positive) - d(anchor, negative))``, ``d`` the ``p``-norm of rows.

    The anchor is the prediction; positive and negative are other outputs of the model, or inputs
    of these names. ``swap`` uses the distance of positive and negative if that is smaller.
    """

    margin: float = 1.0
    p: float = 2.0
    eps: float = 1e-6
    swap: bool = False

    predictions: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.p > 0:
            raise PrepareError(f"TripletMargin: p must be positive: {self.p}")

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return the positive and the negative vectors."""
        _check_rows(self, prediction)
        return [target_like("positive", prediction), target_like("negative", prediction)]

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit one loss per row."""
        positive, negative = targets
        _check_rows(self, prediction)
        check_same_rank(self, prediction, positive)
        check_same_rank(self, prediction, negative)
        near = self._distance(op, prediction, positive)
        far = self._distance(op, prediction, negative)
        if self.swap:
            other = self._distance(op, positive, negative)
            far = op.Where(op.Less(other, far), other, far)
        return clamp(op, op.Sub(op.Add(near, self.margin), far))

    def _distance(self, op: OpBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
        """Emit ``norm(a - b + eps)`` of every row, as torch's ``pairwise_distance``."""
        d = op.Add(op.Sub(a, b), self.eps)
        if self.p == 2.0:
            return op.ReduceL2(d, [-1], keepdims=0)
        if self.p == 1.0:
            return op.ReduceL1(d, [-1], keepdims=0)
        if math.isinf(self.p):
            return op.ReduceMax(op.Abs(d), [-1], keepdims=0)
        powers = _row_sum(op, op.Pow(op.Abs(d), op.const(self.p, d.dtype)))
        return op.Pow(powers, op.const(1.0 / self.p, d.dtype))


_LAYOUT = "[rows, D], with the rows of a pair or triplet one after another"


@LOSSES.named("multiple_negatives")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MultipleNegatives(Loss):
    """Cross entropy of each anchor's positive against the positives of the whole batch (InfoNCE).

    The prediction ``[rows, D]`` has the embeddings of a batch, ``parts`` rows per group: anchor,
    positive, and with three parts a hard negative. The logits are cosine similarities times
    ``scale``, as in MultipleNegativesRankingLoss of sentence-transformers. The loss adds no input.

    Args:
        scale: factor of the cosine similarities.
        parts: rows per group: 2 for pairs, 3 for triplets.
        reduction: ``"mean"`` or ``"sum"`` over the anchors, or ``"none"``.
    """

    scale: float = 20.0
    parts: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parts not in (2, 3):
            raise PrepareError(f"MultipleNegatives: parts must be 2 or 3: {self.parts}")

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return no targets."""
        check_rank(self, prediction, [2], _LAYOUT)
        return []

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the loss."""
        check_rank(self, prediction, [2], _LAYOUT)
        square = op.ReduceSum(op.Mul(prediction, prediction), [1], keepdims=1)
        unit = op.Div(prediction, op.Sqrt(op.Add(square, _EPSILON)))
        anchors, *others = split_row_groups(op, unit, self.parts)
        candidates = others[0] if len(others) == 1 else op.Concat(*others, axis=0)
        scores = op.Mul(op.MatMul(anchors, op.Transpose(candidates, perm=[1, 0])), self.scale)
        labels = op.cast(op.iota(op.size(anchors, 0)), label_type(op))
        cross_entropy = CrossEntropy(reduction=self.reduction, ignore_index=None)
        return cross_entropy.build(op, scores, labels)


@LOSSES.named("triplet_rows")
@dataclasses.dataclass(frozen=True, kw_only=True)
class TripletRows(TripletMargin):
    """:class:`TripletMargin` of one output with three rows per triplet: anchor, positive, negative.

    The loss adds no input.
    """

    predictions = 1

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return no targets."""
        check_rank(self, prediction, [2], _LAYOUT)
        return []

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the loss."""
        check_rank(self, prediction, [2], _LAYOUT)
        each = super().per_element(op, *split_row_groups(op, prediction, 3))
        return reduce(op, each, self.reduction)


def split_row_groups(op: OpBuilder, x: ir.Value, parts: int) -> list[ir.Value]:
    """Return the i-th row of each group of ``parts`` rows, ``[groups, D]``, for each i."""
    grouped = op.reshape(x, [-1, parts, op.size(x, 1)])
    rows = [op.Squeeze(op.Slice(grouped, [i], [i + 1], [1]), [1]) for i in range(parts)]
    for row in rows:
        S.set_dims(row, ["groups", *op.dims(x)[1:]] if op.static(row) is None else op.dims(row))
    return rows
