"""Losses with float targets, and losses of embeddings.

In order: elementwise losses (MSE, L1, Huber, SmoothL1, KLDiv, PoissonNLL, GaussianNLL), the error
of fields on a globe (WeightedRMSE), losses of pairs and triplets (MarginRanking, CosineEmbedding,
TripletMargin, InfoNCE), and losses of one batch whose rows are pairs or triplets
(MultipleNegatives, TripletRows).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
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
    as_tuples,
    check_rank,
    check_same_rank,
    class_weights,
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


@LOSSES.named("poisson_nll")
@dataclasses.dataclass(frozen=True, kw_only=True)
class PoissonNLL(Loss):
    """``e^x - t x`` for counts ``t``; ``x`` is the logarithm of the expected count.

    Args:
        log_input: whether the prediction is a logarithm; if not, ``x - t log(x + eps)``.
        full: add Stirling's approximation of ``log t!``, a constant, for targets above 1.
        eps: added to predictions before the logarithm.
    """

    log_input: bool = True
    full: bool = False
    eps: float = 1e-8

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the terms."""
        check_same_rank(self, prediction, *targets)
        x, (t,) = prediction, targets
        if self.log_input:
            each = op.Sub(op.Exp(x), op.Mul(t, x))
        else:
            each = op.Sub(x, op.Mul(t, op.Log(op.Add(x, self.eps))))
        if not self.full:
            return each
        many = op.Greater(t, 1.0)
        safe = op.Where(many, t, op.const(1.0, t.dtype))
        half_log = op.Mul(op.Log(op.Mul(safe, 2 * math.pi)), 0.5)
        stirling = op.Add(op.Sub(op.Mul(safe, op.Log(safe)), safe), half_log)
        return op.Add(each, op.Where(many, stirling, op.const(0.0, t.dtype)))


@LOSSES.named("gaussian_nll")
@dataclasses.dataclass(frozen=True, kw_only=True)
class GaussianNLL(Loss):
    """``(log v + (x - t)^2 / v) / 2`` for a predicted mean ``x`` and variance ``v``.

    The variance is another output of the model, or an input named ``variance``; it has the shape of
    the mean. A variance below ``eps`` counts as ``eps``, and its gradient passes, as in torch.

    Args:
        full: add the constant ``log(2 pi) / 2``.
        eps: smallest variance.
    """

    full: bool = False
    eps: float = 1e-6

    predictions: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eps > 0:
            raise PrepareError(f"GaussianNLL: eps must be positive: {self.eps}")

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return the variance and the target."""
        return [target_like("variance", prediction), target_like("target", prediction)]

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the terms."""
        variance, target = targets
        check_same_rank(self, prediction, variance)
        check_same_rank(self, prediction, target)
        # v - v is 0, with a derivative of 1
        smallest = op.Add(op.Sub(variance, op.stop_gradient(variance)), self.eps)
        v = op.Where(op.Less(variance, self.eps), smallest, variance)
        d = op.Sub(prediction, target)
        each = op.Mul(op.Add(op.Log(v), op.Div(op.Mul(d, d), v)), 0.5)
        return op.Add(each, 0.5 * math.log(2 * math.pi)) if self.full else each


@LOSSES.named("weighted_rmse")
@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightedRMSE(Loss):
    """Root mean squared error of fields ``[..., latitude, longitude]``, weighted by area.

    A row of the grid counts ``cos(latitude)``, divided by the mean over all rows, as in
    WeatherBench. ``mean`` is the mean of the errors of all fields, so of ``[N, C]`` for a
    prediction ``[N, C, latitude, longitude]``.

    Args:
        latitudes: latitude of each row, in degrees. By default rows are evenly spaced from pole to
            pole: an odd number includes the poles, an even number are centers of cells.
        weight: one weight per variable, on the axis before the latitudes.
    """

    latitudes: Sequence[float] | None = None
    weight: Sequence[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "latitudes", as_tuples(self.latitudes))
        object.__setattr__(self, "weight", as_tuples(self.weight))
        if self.latitudes is not None and max(map(abs, self.latitudes), default=0.0) > 90.0:
            raise PrepareError(
                "WeightedRMSE: latitudes must be in [-90, 90]\nhint: pass degrees, not radians"
            )

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the error of each field; where it is 0, so is its gradient."""
        check_same_rank(self, prediction, *targets)
        scale = op.const(np.sqrt(self._areas(prediction))[:, None], prediction.dtype)
        d = op.Mul(op.Sub(prediction, *targets), scale)
        positions = op.Sqrt(op.count(d, [op.rank(d) - 2, op.rank(d) - 1]))
        each = op.Div(op.ReduceL2(d, [-2, -1], keepdims=0), positions)
        weights = class_weights(self, op, self.weight, prediction, -3) if self.weight else None
        return each if weights is None else op.Mul(each, weights)

    def _areas(self, x: ir.Value) -> np.ndarray:
        """Return the weight of each row of the grid."""
        ranks = (3, 4, 5) if self.weight else (2, 3, 4, 5)
        check_rank(self, x, ranks, "[N, C, latitude, longitude]")
        *_, rows, _ = S.dims_of(x) or (None, None)
        if self.latitudes is not None:
            degrees = np.asarray(self.latitudes)
        elif not isinstance(rows, int):
            raise ShapeError(
                f"WeightedRMSE: the number of latitudes of {S.describe_value(x)} is not known\n"
                "hint: pass latitudes=[...] in degrees"
            )
        else:
            first = 90.0 if rows % 2 else 90.0 - 90.0 / rows
            degrees = np.linspace(first, -first, rows)
        if isinstance(rows, int) and len(degrees) != rows:
            raise ShapeError(
                f"WeightedRMSE: {len(degrees)} latitudes for {rows} rows of {S.describe_value(x)}\n"
                "hint: give one latitude per row of axis -2"
            )
        areas = np.maximum(np.cos(np.deg2rad(degrees)), 0.0)
        return areas / areas.mean()


@LOSSES.named("margin_ranking")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MarginRanking(Loss):
    """``max(0, margin - t (x1 - x2))``: where the target is 1, ``x1`` should be larger than ``x2``.

    ``x1`` is the prediction; ``x2`` is another output of the model, or an input named ``other``;
    the target is 1 or -1.
    """

    margin: float = 0.0

    predictions: ClassVar[int] = 2

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return the other score, and a target of 1 or -1."""
        return [target_like("other", prediction), target_like("target", prediction)]

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the terms."""
        other, target = targets
        check_same_rank(self, prediction, other)
        check_same_rank(self, prediction, target)
        ahead = op.Mul(target, op.Sub(prediction, other))
        return clamp(op, op.Sub(self.margin, ahead))


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


@LOSSES.named("info_nce")
@dataclasses.dataclass(frozen=True, kw_only=True)
class InfoNCE(Loss):
    """Cross entropy of each query's positive against the positives of the whole batch.

    The logits are the cosine similarities of ``query`` and ``positive`` ``[N, D]``, divided by
    ``temperature``. The query is the prediction; the positive is another output of the model, as
    in a model with two towers, or an input of this name.

    Args:
        temperature: divisor of the cosine similarities.
        symmetric: mean of this loss and the one of each positive's query, as in CLIP.
        reduction: ``"mean"`` or ``"sum"`` over the rows, or ``"none"``.
    """

    temperature: float = 0.07
    symmetric: bool = False

    predictions: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperature > 0:
            raise PrepareError(f"InfoNCE: temperature must be positive: {self.temperature}")

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return the positives."""
        check_rank(self, prediction, [2], "[N, D]")
        return [target_like("positive", prediction)]

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the loss."""
        check_rank(self, prediction, [2], "[N, D]")
        check_same_rank(self, prediction, *targets)
        scale = 1.0 / self.temperature
        a, b = (_unit(op, x) for x in (prediction, *targets))
        loss = _in_batch_cross_entropy(op, a, b, scale, self.reduction)
        if not self.symmetric:
            return loss
        return op.Mul(op.Add(loss, _in_batch_cross_entropy(op, b, a, scale, self.reduction)), 0.5)


def _unit(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return rows of length 1."""
    square = op.ReduceSum(op.Mul(x, x), [1], keepdims=1)
    return op.Div(x, op.Sqrt(op.Add(square, _EPSILON)))


def _in_batch_cross_entropy(
    op: OpBuilder, anchors: ir.Value, candidates: ir.Value, scale: float, reduction: str
) -> ir.Value:
    """Emit the cross entropy of each anchor, whose own candidate is in the row of its number."""
    scores = op.Mul(op.MatMul(anchors, op.Transpose(candidates, perm=[1, 0])), scale)
    labels = op.cast(op.iota(op.size(anchors, 0)), label_type(op))
    return CrossEntropy(reduction=reduction, ignore_index=None).build(op, scores, labels)


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
        anchors, *others = split_row_groups(op, _unit(op, prediction), self.parts)
        candidates = others[0] if len(others) == 1 else op.Concat(*others, axis=0)
        return _in_batch_cross_entropy(op, anchors, candidates, self.scale, self.reduction)


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
