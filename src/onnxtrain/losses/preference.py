"""Losses of preference tuning: DPO, IPO, ORPO and KTO, as TRL computes them.

The prediction is the logits ``[rows, sequence, vocabulary]`` of a language model. Two rows after
each other belong together: the chosen and the rejected answer to a prompt, or for KTO an example
and the same prompt with the answer of another one. ``labels`` have the shape of the input ids; the
tokens of the prompt are ``ignore_index``, and position ``i`` is compared with label ``i + 1``.

DPO, IPO and KTO compare the model with a reference: its logits are a second output of the model, or
the summed log-probabilities of each row are the input ``reference_logps``.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.losses.causal_lm import next_labels
from onnxtrain.losses.classification import CrossEntropy, clamp, softplus
from onnxtrain.losses.logits import Reads
from onnxtrain.losses.loss import (
    FLOAT,
    INT64,
    LOSSES,
    Loss,
    TargetSpec,
    check_rank,
    labels_for,
)
from onnxtrain.losses.metrics import METRICS, Metric
from onnxtrain.losses.regression import split_row_groups

_LAYOUT = "[rows, sequence, vocabulary], chosen and rejected answers in turn"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PreferenceLoss(Loss):
    beta: float = 0.1
    ignore_index: int = -100

    reads = Reads.SOFTMAX_LOGITS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta > 0:
            raise PrepareError(f"{type(self).__name__}: beta must be positive: {self.beta}")

    def normalized_axis(self, prediction: ir.Value) -> int | None:
        """Return the axis of the vocabulary."""
        return 2

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return the reference, where there is one, and one label per position."""
        check_rank(self, prediction, [3], _LAYOUT)
        rows = labels_for("labels", prediction, 2).dims[:1]
        reference = [TargetSpec("reference_logps", FLOAT, rows)] if self.predictions > 1 else []
        return [*reference, labels_for("labels", prediction, 2)]

    def log_probabilities(
        self, op: OpBuilder, logits: ir.Value, labels: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """Return the summed log-probabilities of each row's labels, and the number of labels."""
        following = next_labels(op, labels, self.ignore_index)
        loss = CrossEntropy(axis=-1, reduction="none", ignore_index=self.ignore_index)
        total = op.Neg(op.ReduceSum(loss.build(op, logits, following), [1], keepdims=0))
        counted = op.Where(op.Equal(following, self.ignore_index), 0.0, 1.0)
        count = op.ReduceSum(counted, [1], keepdims=0)
        return total, op.cast(op.Where(op.Less(count, 1.0), 1.0, count), total.dtype)

    def rewards(
        self, op: OpBuilder, logits: ir.Value, *others: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """Return the rewards of chosen and rejected answers: ``beta`` times their values."""
        reference, labels = others
        logps, _ = self.log_probabilities(op, logits, labels)
        value = op.Mul(op.Sub(logps, self.reference(op, reference, labels)), self.beta)
        chosen, rejected = _pairs(op, value)
        return chosen, rejected

    def reference(self, op: OpBuilder, reference: ir.Value, labels: ir.Value) -> ir.Value:
        """Return the reference's log-probabilities of each row, without a gradient."""
        if op.rank(reference) == 3:
            reference, _ = self.log_probabilities(op, reference, labels)
        return op.stop_gradient(reference)


def _pairs(op: OpBuilder, rows: ir.Value) -> list[ir.Value]:
    """Return the first and the second row of each pair, ``[pairs]`` each, from ``[rows]``."""
    return [op.Squeeze(x, [1]) for x in split_row_groups(op, op.Unsqueeze(rows, [1]), 2)]


@LOSSES.named("dpo")
@dataclasses.dataclass(frozen=True, kw_only=True)
class DPO(_PreferenceLoss):
    """``-log sigmoid(beta m)``, ``m`` the margin of the chosen over the rejected answer.

    An answer's value is its log-probability minus that of the reference; ``m`` is the difference of
    the two values.

    Args:
        beta: how much a margin counts.
        label_smoothing: probability that a pair is labeled the wrong way around.
        ignore_index: label of prompts and padding.
        reduction: ``"mean"`` or ``"sum"`` over the pairs, or ``"none"``.
    """

    label_smoothing: float = 0.0

    predictions: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.label_smoothing < 0.5:
            raise PrepareError(f"DPO: label_smoothing must be in [0, 0.5): {self.label_smoothing}")

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit one loss per pair."""
        reference, labels = targets
        logps, _ = self.log_probabilities(op, prediction, labels)
        chosen, rejected = _pairs(op, op.Sub(logps, self.reference(op, reference, labels)))
        margin = op.Mul(op.Sub(chosen, rejected), self.beta)
        loss = softplus(op, op.Neg(margin))
        if not self.label_smoothing:
            return loss
        # log sigmoid(-x) = log sigmoid(x) - x
        return op.Add(loss, op.Mul(margin, self.label_smoothing))


@LOSSES.named("ipo")
@dataclasses.dataclass(frozen=True, kw_only=True)
class IPO(_PreferenceLoss):
    """``(m - 1 / (2 beta))^2``: the margin gets a target, so that it does not grow without bound.

    As :class:`DPO`, with mean log-probabilities per token.
    """

    predictions: ClassVar[int] = 2

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit one loss per pair."""
        reference, labels = targets
        logps, count = self.log_probabilities(op, prediction, labels)
        value = op.Div(op.Sub(logps, self.reference(op, reference, labels)), count)
        chosen, rejected = _pairs(op, value)
        difference = op.Sub(op.Sub(chosen, rejected), 1.0 / (2.0 * self.beta))
        return op.Mul(difference, difference)


@LOSSES.named("orpo")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ORPO(_PreferenceLoss):
    """Cross entropy of the chosen answer, plus ``-beta log sigmoid`` of the log odds ratio.

    Without a reference. The odds are those of the mean log-probability per token.
    """

    reductions = ("mean",)

    def rewards(
        self, op: OpBuilder, logits: ir.Value, *others: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """Return ``beta`` times the mean log-probabilities of chosen and rejected answers."""
        total, count = self.log_probabilities(op, logits, *others)
        chosen, rejected = _pairs(op, op.Mul(op.Div(total, count), self.beta))
        return chosen, rejected

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the loss."""
        (labels,) = targets
        total, count = self.log_probabilities(op, prediction, labels)
        chosen, rejected = _pairs(op, op.Div(total, count))
        odds = op.Sub(
            op.Sub(chosen, rejected), op.Sub(_log1mexp(op, chosen), _log1mexp(op, rejected))
        )
        chosen_total, _ = _pairs(op, total)
        tokens, _ = _pairs(op, count)
        cross_entropy = op.Div(
            op.Neg(op.ReduceSum(chosen_total, keepdims=0)), op.ReduceSum(tokens, keepdims=0)
        )
        ratio = op.ReduceMean(softplus(op, op.Neg(odds)), keepdims=0)
        return op.Add(cross_entropy, op.Mul(ratio, self.beta))


def _log1mexp(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return ``log(1 - exp(x))`` of negative values, without cancellation.

    With ``t = tanh(-x / 2)`` it is ``log(2 t / (1 + t))``.
    """
    t = op.Tanh(op.Mul(x, -0.5))
    return op.Log(op.Div(op.Mul(t, 2.0), op.Add(t, 1.0)))


@LOSSES.named("kto")
@dataclasses.dataclass(frozen=True, kw_only=True)
class KTO(_PreferenceLoss):
    """``1 - sigmoid(beta (r - z))`` of desirable answers, ``1 - sigmoid(beta (z - r))`` of others.

    ``r`` is an answer's log-probability minus that of the reference, and ``z`` the mean of the same
    for answers that belong to other prompts, at least 0 and without a gradient. The second row of
    each pair has such an answer; the input ``desirable`` has one value per row, of which the first
    of each pair counts.

    Args:
        beta: how much a value counts.
        desirable_weight: factor of the loss of desirable answers.
        undesirable_weight: factor of the loss of the others.
        ignore_index: label of prompts and padding.
        reduction: ``"mean"`` or ``"sum"`` over the pairs, or ``"none"``.
    """

    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    predictions: ClassVar[int] = 2

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return the reference, one label per position, and whether an answer is desirable."""
        reference, labels = super().targets(prediction)
        return [reference, labels, TargetSpec("desirable", INT64, reference.dims)]

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit one loss per pair."""
        reference, labels, desirable = targets
        logps, _ = self.log_probabilities(op, prediction, labels)
        value, other = _pairs(op, op.Sub(logps, self.reference(op, reference, labels)))
        z = op.stop_gradient(clamp(op, op.ReduceMean(other, keepdims=0)))
        wanted, _ = _pairs(op, op.cast(op.Not(op.Equal(desirable, 0)), value.dtype))
        sign = op.Sub(op.Mul(wanted, 2.0), 1.0)
        weight = op.Add(
            op.Mul(wanted, self.desirable_weight - self.undesirable_weight),
            self.undesirable_weight,
        )
        margin = op.Mul(op.Mul(op.Sub(value, z), sign), self.beta)
        return op.Mul(op.Sigmoid(op.Neg(margin)), weight)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RewardMetric(Metric):
    loss: _PreferenceLoss | None = None

    reads_all: ClassVar[bool] = True

    @property
    def reads_scores(self) -> bool:
        """Whether the metric reads what the loss reads."""
        return True

    def beside(self, loss: Loss | None) -> Metric:
        """Return the metric of this loss."""
        if not isinstance(loss, _PreferenceLoss) or isinstance(loss, KTO):
            raise PrepareError(
                f"metric {self.label!r} belongs to pairs of answers\n"
                "hint: use it with loss='dpo', 'ipo' or 'orpo'"
            )
        return dataclasses.replace(self, loss=loss)

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the mean over the pairs."""
        assert self.loss is not None
        chosen, rejected = self.loss.rewards(op, prediction, *targets)
        return op.ReduceMean(self.of_pair(op, chosen, rejected), keepdims=0)

    def of_pair(self, op: OpBuilder, chosen: ir.Value, rejected: ir.Value) -> ir.Value:
        """Emit the metric of each pair."""
        raise NotImplementedError


@METRICS.named("rewards/accuracies")
class RewardAccuracy(_RewardMetric):
    """Share of pairs whose chosen answer has the larger reward."""

    def of_pair(self, op: OpBuilder, chosen: ir.Value, rejected: ir.Value) -> ir.Value:
        """Emit 1 where the chosen answer has the larger reward."""
        return op.Where(op.Greater(chosen, rejected), 1.0, 0.0)


@METRICS.named("rewards/margins")
class RewardMargin(_RewardMetric):
    """Mean difference of the rewards of chosen and rejected answers."""

    def of_pair(self, op: OpBuilder, chosen: ir.Value, rejected: ir.Value) -> ir.Value:
        """Emit the difference."""
        return op.Sub(chosen, rejected)
