"""Losses of class scores: cross entropy, focal, NLL, binary cross entropy, hinge and margin losses.

Several losses have variants: ``SoftmaxCrossEntropyLoss`` and gathering by class where the target
has kernels for them, and a comparison with all class indices (one-hot) elsewhere. ``*_CHOICES``
lists, in order, which variant is used for which target.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.rule_registry import Choice, Choices, Variant, Variants, select_variant
from onnxtrain.errors import PrepareError, ShapeError
from onnxtrain.expand.activations import shifted_log_sum_exp, smooth_softplus
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.losses.logits import Reads
from onnxtrain.losses.loss import (
    FLOAT,
    INT64,
    LOSSES,
    Loss,
    TargetSpec,
    as_tuples,
    check_rank,
    check_same_rank,
    class_weights,
    labels_for,
    reduce,
    target_like,
)

_INVALID_LABEL = 2**31 - 1  # larger than any number of classes, and fits int32


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores ``[N, C, ...]`` with the classes on axis 1, and one label per row."""

    x: ir.Value
    labels: ir.Value
    original_labels: ir.Value
    """The labels before reshaping; the unreduced loss has their shape."""

    def restore(self, op: OpBuilder, each: ir.Value) -> ir.Value:
        """Return one loss per label in the shape of the original labels."""
        return op.reshape_like(each, self.original_labels)


def class_axis(loss: Any, x: ir.Value, axis: int) -> int:
    """Return the class axis as a non-negative index; for a single row ``[C]`` it is 0."""
    rank = S.rank_of(x)
    if rank == 1:
        return 0
    if rank == 0 or not -rank <= axis < rank:
        raise ShapeError(
            f"{type(loss).__name__}(axis={axis}) does not accept {S.describe_value(x)}\n"
            "hint: it expects [N, C], [N, C, d1, ...], [C], or with axis=-1 [..., C]"
        )
    return axis % rank


def to_rows(loss: Loss, op: OpBuilder, x: ir.Value, labels: ir.Value, axis: int) -> Scores:
    """Return scores with the class axis moved to position 1."""
    rank = op.rank(x)
    if op.rank(labels) != rank - 1:
        raise ShapeError(
            f"{type(loss).__name__}: labels {S.describe_value(labels)} do not match "
            f"{S.describe_value(x)} with classes on axis {axis}\n"
            "hint: labels have the shape of the prediction without the class axis; "
            "pass axis=-1 if the classes are last"
        )
    if rank == 1:
        return Scores(op.Unsqueeze(x, [0]), op.Unsqueeze(labels, [0]), labels)
    if rank > 2 and axis == rank - 1:
        flat = op.reshape(x, [-1, op.size(x, axis)])
        return Scores(flat, op.Reshape(labels, [-1]), labels)
    return Scores(op.move_axis(x, axis, 1), labels, labels)


def is_label(op: OpBuilder, x: ir.Value, labels: ir.Value) -> ir.Value:
    """Return the one-hot mask of the labels, a bool tensor ``[N, C, ...]``."""
    indices = op.reshape(class_indices(op, x, labels.dtype), [-1, *[1] * (op.rank(x) - 2)])
    return op.Equal(op.Unsqueeze(labels, [1]), indices)


def class_indices(op: OpBuilder, x: ir.Value, dtype: ir.DataType | None) -> ir.Value:
    """Return 0, 1, ... up to the number of classes, which are on axis 1."""
    classes = op.size(x, 1)
    if isinstance(classes, int):
        return op.const(np.arange(classes), dtype or INT64)
    return op.cast(op.iota(classes), dtype)


def in_range_labels(op: OpBuilder, labels: ir.Value, ignore_index: int | None = None) -> ir.Value:
    """Replace negative labels by one that onnxruntime rejects.

    Gather reads a negative index from the end, which would train on the wrong class silently.
    """
    invalid = op.const(_INVALID_LABEL, labels.dtype)
    if ignore_index is not None and ignore_index < 0:
        invalid = op.Where(op.Equal(labels, ignore_index), labels, invalid)
    return op.Where(op.Less(labels, 0), invalid, labels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LabelLoss(Loss):
    """Base of CrossEntropy and NLL: class weights and ignored labels."""

    weight: Sequence[float] | None = None
    ignore_index: int | None = -100
    axis: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "weight", as_tuples(self.weight))

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return class indices in the shape of the prediction without the class axis."""
        axis = class_axis(self, prediction, self.axis)
        return [labels_for("labels", prediction, axis)]

    def normalized_axis(self, prediction: ir.Value) -> int | None:
        """Return the class axis."""
        return class_axis(self, prediction, self.axis)

    def reduce_weighted(
        self, op: OpBuilder, rows: Scores, each: ir.Value, weights: OptionalValue
    ) -> ir.Value:
        """Emit the weighted sum or mean of the losses of all labels."""
        each, w = self.weighted(op, rows, each, weights)
        if self.reduction != "mean" or w is None:
            return reduce(op, each, self.reduction)
        return op.Div(op.ReduceSum(each, keepdims=0), op.ReduceSum(w, keepdims=0))

    def weighted(
        self, op: OpBuilder, rows: Scores, each: ir.Value, weights: OptionalValue
    ) -> tuple[ir.Value, OptionalValue]:
        """Return the weighted losses, and the weight of each label: 0 for ignored ones."""
        ignored = self.ignored(op, rows.labels)
        w = self.label_weights(op, rows.labels, ignored, weights, each.dtype)
        if weights is not None:
            each = op.Mul(each, w)
        if ignored is not None:
            each = op.Where(ignored, op.const(0.0, each.dtype), each)
        return each, w

    def ignored(self, op: OpBuilder, labels: ir.Value) -> OptionalValue:
        """Return the mask of ignored labels."""
        return None if self.ignore_index is None else op.Equal(labels, self.ignore_index)

    def label_weights(
        self,
        op: OpBuilder,
        labels: ir.Value,
        ignored: OptionalValue,
        weights: OptionalValue,
        dtype: ir.DataType | None,
    ) -> OptionalValue:
        """Return the weight of each label; ``None`` if all weights are 1."""
        if ignored is None:
            return None if weights is None else op.Gather(weights, labels)
        zero, one = op.const(0.0, dtype), op.const(1.0, dtype)
        if weights is None:
            return op.Where(ignored, zero, one)
        index = op.Where(ignored, op.const(0, labels.dtype), labels)
        return op.Where(ignored, zero, op.Gather(weights, index))


OptionalValue = ir.Value | None


@LOSSES.named("cross_entropy")
@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossEntropy(_LabelLoss):
    """Cross entropy of logits with class indices, or with class probabilities.

    ``mean`` divides by the sum of the weights of the labels. If all labels are ignored, the loss is
    NaN and its gradient 0, as in torch.

    Args:
        weight: one weight per class.
        ignore_index: label to ignore; ``None`` ignores none, which is slightly faster.
        label_smoothing: fraction of each target that is spread over all classes.
        axis: class axis: 1 as in torch, -1 for ``[batch, sequence, vocabulary]``.
        probabilities: the target is a float tensor of the prediction's shape.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
    """

    label_smoothing: float = 0.0
    probabilities: bool = False

    reads = Reads.SOFTMAX_LOGITS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise PrepareError(f"label_smoothing must be in [0, 1]: {self.label_smoothing}")

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return class indices, or probabilities in the shape of the prediction."""
        if not self.probabilities:
            return super().targets(prediction)
        class_axis(self, prediction, self.axis)
        return [target_like("target", prediction)]

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the loss."""
        (target,) = targets
        axis = class_axis(self, prediction, self.axis)
        if S.is_float(target):
            return self._soft(op, prediction, target, axis)
        rows = to_rows(self, op, prediction, target, axis)
        weights = class_weights(self, op, self.weight, rows.x, 1)
        unweighted = self._is_unweighted_mean(op, rows.x, weights)
        emit = select_variant(op, unweighted, CROSS_ENTROPY_VARIANTS, CROSS_ENTROPY_CHOICES)
        loss = emit(self, op, rows, weights)
        return rows.restore(op, loss) if self.reduction == "none" else loss

    def _by_operator(self, op: OpBuilder, rows: Scores, weights: OptionalValue) -> ir.Value:
        """Emit SoftmaxCrossEntropyLoss, whose gradient needs no one-hot tensor."""
        rows = dataclasses.replace(rows, labels=in_range_labels(op, rows.labels, self.ignore_index))
        smooth = self.label_smoothing
        outputs = op.SoftmaxCrossEntropyLoss(
            *(rows.x, rows.labels, weights),
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            _outputs=2 if smooth else 1,
        )
        if not smooth:
            return outputs
        loss, logp = outputs
        uniform = self._uniform_loss(op, rows, op.Neg(logp), weights)
        return self._smooth(op, loss, uniform, rows.x)

    def _by_comparison(self, op: OpBuilder, rows: Scores, weights: OptionalValue) -> ir.Value:
        """Emit ``log(sum(e^z)) - sum(z * onehot(label))``.

        For runtimes without GatherElements, or where it is slow.
        """
        x = rows.x
        z, lse = shifted_log_sum_exp(op, x, 1)
        label_scores = op.Where(is_label(op, x, rows.labels), z, op.const(0.0, x.dtype))
        each = op.Sub(op.Squeeze(lse, [1]), op.ReduceSum(label_scores, [1], keepdims=0))
        loss = self.reduce_weighted(op, rows, each, weights)
        if not self.label_smoothing:
            return loss
        return self._smooth(op, loss, self._uniform_loss(op, rows, op.Sub(lse, z), weights), x)

    def _is_unweighted_mean(self, op: OpBuilder, x: ir.Value, weights: OptionalValue) -> bool:
        """Return whether the loss is a plain mean, and an ignored label matches no class."""
        classes = op.size(x, 1)
        ignored = self.ignore_index
        outside = ignored is not None and isinstance(classes, int) and not 0 <= ignored < classes
        plain = weights is None and not self.label_smoothing and self.reduction == "mean"
        return outside and plain

    def _by_one_hot_mean(self, op: OpBuilder, rows: Scores, weights: OptionalValue) -> ir.Value:
        """Emit ``sum(log p * onehot) / sum(-onehot)``: an ignored label has no one-hot row."""
        assert weights is None
        x = rows.x
        z = op.Sub(x, op.Ceil(op.ReduceMax(x, [1], keepdims=1)))
        log_p = op.Sub(z, op.ReduceLogSumExp(z, [1], keepdims=1))
        one_hot, zero = is_label(op, x, rows.labels), op.const(0.0, x.dtype)
        minus_one_hot = op.Where(one_hot, op.const(-1.0, x.dtype), zero)
        total = op.ReduceSum(op.Where(one_hot, log_p, zero), keepdims=0)
        return op.Div(total, op.ReduceSum(minus_one_hot, keepdims=0))

    def _uniform_loss(
        self, op: OpBuilder, rows: Scores, cost: ir.Value, weights: OptionalValue
    ) -> ir.Value:
        """Emit the reduced loss of a uniform target: the sum of ``cost = -log p`` over classes."""
        if weights is not None:
            cost = op.Mul(cost, op.reshape(weights, [-1, *[1] * (op.rank(cost) - 2)]))
        each = op.ReduceSum(cost, [1], keepdims=0)
        ignored = self.ignored(op, rows.labels)
        if ignored is not None:
            each = op.Where(ignored, op.const(0.0, each.dtype), each)
        w = self.label_weights(op, rows.labels, ignored, weights, each.dtype)
        if self.reduction != "mean" or w is None:
            return reduce(op, each, self.reduction)
        return op.Div(op.ReduceSum(each, keepdims=0), op.ReduceSum(w, keepdims=0))

    def _smooth(self, op: OpBuilder, loss: ir.Value, uniform: ir.Value, x: ir.Value) -> ir.Value:
        """Emit ``(1 - s) * loss + s / classes * uniform``."""
        classes = op.size(x, 1)
        if isinstance(classes, int):
            smoothing = op.Mul(uniform, self.label_smoothing / classes)
        else:
            smoothing = op.Div(op.Mul(uniform, self.label_smoothing), op.count(x, [1]))
        return op.Add(op.Mul(loss, 1.0 - self.label_smoothing), smoothing)

    def _soft(self, op: OpBuilder, x: ir.Value, target: ir.Value, axis: int) -> ir.Value:
        if op.rank(target) != op.rank(x):
            raise ShapeError(
                f"CrossEntropy: probabilities {S.describe_value(target)} do not have the shape of "
                f"{S.describe_value(x)}"
            )
        cost = select_variant(op, None, COST_VARIANTS, COST_CHOICES)(op, x, axis)
        if self.label_smoothing:
            classes = op.count(x, [axis])
            uniform = op.Div(op.const(self.label_smoothing, x.dtype), classes)
            target = op.Add(op.Mul(target, 1.0 - self.label_smoothing), uniform)
        weights = class_weights(self, op, self.weight, x, axis)
        if weights is not None:
            target = op.Mul(target, op.reshape(weights, [-1, *[1] * (op.rank(x) - 1 - axis)]))
        return self.reduce(op, op.ReduceSum(op.Mul(cost, target), [axis], keepdims=0))


CROSS_ENTROPY_VARIANTS: Variants[bool] = {
    "one-hot mean": Variant(CrossEntropy._by_one_hot_mean, lambda unweighted: unweighted),
    "comparison": Variant(CrossEntropy._by_comparison),
    "operator": Variant(CrossEntropy._by_operator),
}
# SoftmaxCrossEntropyLoss is expanded to LogSoftmax and GatherElements after differentiation.
CROSS_ENTROPY_CHOICES: Choices[bool] = [
    Choice("one-hot mean", prefers="few-operators"),
    Choice("comparison", lacks="SoftmaxCrossEntropyLoss"),
    Choice("comparison", lacks="LogSoftmax"),
    Choice("comparison", lacks="GatherElements"),
    Choice("operator"),
]


def _decomposed_cost(op: OpBuilder, x: ir.Value, axis: int) -> ir.Value:
    """Return ``-log p = log(sum(e^z)) - z`` of all classes."""
    z, lse = shifted_log_sum_exp(op, x, axis)
    return op.Sub(lse, z)


COST_VARIANTS: Variants[None] = {
    "decomposed": Variant(_decomposed_cost),
    "operator": Variant(lambda op, x, axis: op.Neg(op.LogSoftmax(x, axis=axis))),
}
COST_CHOICES: Choices[None] = [Choice("decomposed", lacks="LogSoftmax"), Choice("operator")]


@LOSSES.named("nll")
@dataclasses.dataclass(frozen=True, kw_only=True)
class NLL(_LabelLoss):
    """Negative log-likelihood: ``-w x[label]`` of log-probabilities.

    Args:
        weight: one weight per class.
        ignore_index: label to ignore; ``None`` ignores none.
        axis: class axis: 1 as in torch, or -1.
        reduction: ``"mean"`` (divided by the sum of the weights), ``"sum"`` or ``"none"``.
    """

    reads = Reads.LOG_PROBABILITIES

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the loss."""
        (labels,) = targets
        axis = class_axis(self, prediction, self.axis)
        rows = to_rows(self, op, prediction, labels, axis)
        weights = class_weights(self, op, self.weight, rows.x, 1)
        loss = select_variant(op, None, NLL_VARIANTS, NLL_CHOICES)(self, op, rows, weights)
        return rows.restore(op, loss) if self.reduction == "none" else loss

    def _by_comparison(self, op: OpBuilder, rows: Scores, weights: OptionalValue) -> ir.Value:
        """Emit ``-sum(x * onehot(label))``."""
        zero = op.const(0.0, rows.x.dtype)
        label_scores = op.Where(is_label(op, rows.x, rows.labels), rows.x, zero)
        each = op.Neg(op.ReduceSum(label_scores, [1], keepdims=0))
        return self.reduce_weighted(op, rows, each, weights)

    def _by_operator(self, op: OpBuilder, rows: Scores, weights: OptionalValue) -> ir.Value:
        """Emit NegativeLogLikelihoodLoss."""
        return op.NegativeLogLikelihoodLoss(
            *(rows.x, in_range_labels(op, rows.labels, self.ignore_index), weights),
            ignore_index=self.ignore_index,
            reduction=self.reduction,
        )


NLL_VARIANTS: Variants[None] = {
    "comparison": Variant(NLL._by_comparison),
    "operator": Variant(NLL._by_operator),
}
NLL_CHOICES: Choices[None] = [
    Choice("comparison", lacks="NegativeLogLikelihoodLoss"),
    Choice("comparison", lacks="GatherElements"),
    Choice("operator"),
]


@LOSSES.named("focal")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Focal(_LabelLoss):
    """Cross entropy in which easy examples count less: ``-w (1 - p[label])^gamma log p[label]``.

    ``p`` is the softmax of the logits. ``mean`` divides by the sum of the weights of the labels, as
    :class:`CrossEntropy` does, which this loss equals for ``gamma=0``.

    Args:
        gamma: how fast the weight of an example falls with its probability.
        weight: one weight per class.
        ignore_index: label to ignore; ``None`` ignores none.
        axis: class axis: 1 as in torch, or -1.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
    """

    gamma: float = 2.0

    reads = Reads.SOFTMAX_LOGITS

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_gamma(self, self.gamma)

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the loss."""
        (labels,) = targets
        axis = class_axis(self, prediction, self.axis)
        rows = to_rows(self, op, prediction, labels, axis)
        weights = class_weights(self, op, self.weight, rows.x, 1)
        z, lse = shifted_log_sum_exp(op, rows.x, 1)
        ignored = self.ignored(op, rows.labels)
        known = rows.labels
        if ignored is not None:
            known = op.Where(ignored, op.const(0, known.dtype), known)
        select = select_variant(op, None, LABEL_SCORE_VARIANTS, LABEL_SCORE_CHOICES)
        scores = select(
            *(op, Scores(z, known, labels), is_label(op, z, known), op.const(0.0, z.dtype))
        )
        logp = op.Squeeze(op.Sub(scores, lse), [1])
        each = op.Neg(op.Mul(_power(op, op.Sub(1.0, op.Exp(logp)), self.gamma), logp))
        loss = self.reduce_weighted(op, rows, each, weights)
        return rows.restore(op, loss) if self.reduction == "none" else loss


def _check_gamma(loss: Loss, gamma: float) -> None:
    if not gamma >= 0:
        raise PrepareError(f"{type(loss).__name__}: gamma must not be negative: {gamma}")


def _power(op: OpBuilder, x: ir.Value, exponent: float) -> ir.Value:
    """Return ``x^exponent`` of a probability, with a finite derivative at 0."""
    if exponent == 0.0:
        return op.ones_like(x)
    # Rounding may put 1 - p below 0, where the power is NaN.
    x = op.Clip(x, op.const(_TINY, x.dtype))
    if exponent == 1.0:
        return x
    return op.Mul(x, x) if exponent == 2.0 else op.Pow(x, op.const(exponent, x.dtype))


_TINY = float(np.finfo(np.float32).tiny)


def softplus(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return ``log(1 + e^x)`` without overflow."""
    return select_variant(op, x.dtype, SOFTPLUS_VARIANTS, SOFTPLUS_CHOICES)(op, x)


# Runtimes without a Softplus kernel expand it to log(1 + e^x), which overflows above 88. The CPU
# kernel is for float32 only.
SOFTPLUS_VARIANTS: Variants[ir.DataType | None] = {
    "decomposed": Variant(smooth_softplus),
    "operator": Variant(lambda op, x: op.Softplus(x), lambda dtype: dtype == ir.DataType.FLOAT),
}
SOFTPLUS_CHOICES: Choices[ir.DataType | None] = [
    Choice("decomposed", lacks="Softplus"),
    Choice("operator"),
    Choice("decomposed"),
]


@LOSSES.named("bce")
@dataclasses.dataclass(frozen=True, kw_only=True)
class BCE(Loss):
    """``-w (t log x + (1 - t) log(1 - x))`` of probabilities.

    Logarithms are clamped to -100, as in torch; clamped ones pass no gradient. Prefer
    :class:`BCEWithLogits`.

    Args:
        weight: weights that broadcast against the prediction.
    """

    weight: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "weight", as_tuples(self.weight))

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the terms."""
        check_same_rank(self, prediction, *targets)
        (t,) = targets
        positive = op.Mul(t, _log(op, prediction))
        negative = op.Mul(op.Sub(1.0, t), _log(op, op.Sub(1.0, prediction)))
        return _weight(op, op.Neg(op.Add(positive, negative)), self.weight)


def _log(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return ``max(log x, -100)`` of a probability, with a finite derivative at 0."""
    is_zero = op.LessOrEqual(x, _TINY)
    one, minimum = op.const(1.0, x.dtype), op.const(-100.0, x.dtype)
    return op.Where(is_zero, minimum, op.Log(op.Where(is_zero, one, x)))


def _weight(op: OpBuilder, each: ir.Value, weight: Any) -> ir.Value:
    return each if weight is None else op.Mul(each, op.const(np.asarray(weight), each.dtype))


@LOSSES.named("bce_with_logits")
@dataclasses.dataclass(frozen=True, kw_only=True)
class BCEWithLogits(Loss):
    """Binary cross entropy of logits, stable for logits of any size.

    ``w ((1 - t) x + (1 + (pos_weight - 1) t) softplus(-x))``.

    Args:
        weight: weights that broadcast against the prediction.
        pos_weight: weights of the positive class that broadcast against the prediction.
    """

    weight: Any = None
    pos_weight: Any = None

    reads = Reads.SIGMOID_LOGITS

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "weight", as_tuples(self.weight))
        object.__setattr__(self, "pos_weight", as_tuples(self.pos_weight))

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the terms; ``softplus(-x)`` is accurate for large correct logits."""
        check_same_rank(self, prediction, *targets)
        x, (t,) = prediction, targets
        log_likelihood = softplus(op, op.Neg(x))
        if self.pos_weight is not None:
            extra = op.const(np.asarray(self.pos_weight) - 1.0, x.dtype)
            log_likelihood = op.Mul(log_likelihood, op.Add(op.Mul(t, extra), 1.0))
        each = op.Add(op.Mul(op.Sub(1.0, t), x), log_likelihood)
        return _weight(op, each, self.weight)


@LOSSES.named("sigmoid_focal")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SigmoidFocal(Loss):
    """Binary cross entropy of logits in which easy examples count less, as ``sigmoid_focal_loss``.

    ``a (1 - q)^gamma bce`` with ``q`` the probability of the target, ``a = alpha`` for targets of 1
    and ``1 - alpha`` for targets of 0. torchvision has the formula.

    Args:
        alpha: weight of the positive class; ``None`` weighs both alike.
        gamma: how fast the weight of an example falls with its probability.
    """

    alpha: float | None = 0.25
    gamma: float = 2.0

    reads = Reads.SIGMOID_LOGITS

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_gamma(self, self.gamma)
        if self.alpha is not None and not 0.0 <= self.alpha <= 1.0:
            raise PrepareError(f"SigmoidFocal: alpha must be in [0, 1] or None: {self.alpha}")

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the terms."""
        (t,) = targets
        each = BCEWithLogits(reduction="none").per_element(op, prediction, t)
        p, negative = op.Sigmoid(prediction), op.Sub(1.0, t)
        missed = op.Add(op.Mul(p, negative), op.Mul(op.Sub(1.0, p), t))
        each = op.Mul(each, _power(op, missed, self.gamma))
        if self.alpha is None:
            return each
        alpha = op.Add(op.Mul(t, 2.0 * self.alpha - 1.0), 1.0 - self.alpha)
        return op.Mul(each, alpha)


@LOSSES.named("soft_margin")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftMargin(Loss):
    """``log(1 + e^(-t x))`` for targets of -1 and 1."""

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the terms."""
        check_same_rank(self, prediction, *targets)
        return softplus(op, op.Neg(op.Mul(prediction, *targets)))


@LOSSES.named("multilabel_soft_margin")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiLabelSoftMargin(Loss):
    """Mean over the classes, the last axis, of the binary cross entropy of logits.

    Args:
        weight: one weight per class; ``mean`` does not divide by them, as in torch.
    """

    weight: Sequence[float] | None = None

    reads = Reads.SIGMOID_LOGITS

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "weight", as_tuples(self.weight))

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit one loss per row."""
        each = BCEWithLogits(reduction="none").per_element(op, prediction, *targets)
        weights = class_weights(self, op, self.weight, prediction, -1)
        if weights is not None:
            each = op.Mul(each, weights)
        return op.ReduceMean(each, [-1], keepdims=0)


@LOSSES.named("hinge")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Hinge(Loss):
    """``max(0, margin - t x)`` for targets of -1 and 1, as in support vector machines."""

    margin: float = 1.0

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the terms; at the kink the gradient passes, as through torch's ``clamp``."""
        check_same_rank(self, prediction, *targets)
        return clamp(op, op.Sub(self.margin, op.Mul(prediction, *targets)))


@LOSSES.named("hinge_embedding")
@dataclasses.dataclass(frozen=True, kw_only=True)
class HingeEmbedding(Loss):
    """``x`` where the target is 1, ``max(0, margin - x)`` where it is -1."""

    margin: float = 1.0

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the terms."""
        check_same_rank(self, prediction, *targets)
        x, (t,) = prediction, targets
        zero = op.const(0.0, x.dtype)
        near = op.Where(op.Equal(t, -1.0), zero, x)
        far = op.Where(op.Equal(t, 1.0), zero, clamp(op, op.Sub(self.margin, x)))
        return op.Add(near, far)


def clamp(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return ``max(x, 0)``; at 0 the gradient passes, as through torch's ``clamp``."""
    return op.Clip(x, op.const(0.0, x.dtype))


@LOSSES.named("multi_margin")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiMargin(Loss):
    """``sum over i != label of max(0, margin - x[label] + x[i])^p / classes`` for ``x`` of [N, C].

    Args:
        p: 1 or 2.
        margin: margin that the score of the label must have over the others.
        weight: one weight per class; ``mean`` does not divide by them, as in torch.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
    """

    p: int = 1
    margin: float = 1.0
    weight: Sequence[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "weight", as_tuples(self.weight))
        if self.p not in (1, 2):
            raise PrepareError(f"MultiMargin: p must be 1 or 2: {self.p}")

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return class indices."""
        rank = check_rank(self, prediction, (1, 2), "[N, C] or [C]")
        return [labels_for("labels", prediction, rank - 1)]

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit one loss per row."""
        rank = check_rank(self, prediction, (1, 2), "[N, C] or [C]")
        rows = to_rows(self, op, prediction, targets[0], rank - 1)
        x, zero = rows.x, op.const(0.0, rows.x.dtype)
        one_hot = is_label(op, x, rows.labels)
        select = select_variant(op, None, LABEL_SCORE_VARIANTS, LABEL_SCORE_CHOICES)
        label_scores = select(op, rows, one_hot, zero)
        violation = clamp(op, op.Sub(op.Add(x, self.margin), label_scores))
        if self.p == 2:
            violation = op.Mul(violation, violation)
        each = op.ReduceMean(op.Where(one_hot, zero, violation), [1], keepdims=0)
        weights = class_weights(self, op, self.weight, x, 1)
        if weights is not None:
            each = op.Mul(each, op.Gather(weights, rows.labels))
        return rows.restore(op, each)


@LOSSES.named("multilabel_margin")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiLabelMargin(Loss):
    """``max(0, 1 - x[label] + x[i]) / classes``, summed over labels and classes ``i`` without one.

    The labels ``[N, C]`` of a row are the classes that it has, then -1; what follows the first
    negative label is not read, as in torch.
    """

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return class indices in the shape of the prediction."""
        check_rank(self, prediction, (1, 2), "[N, C] or [C]")
        return [dataclasses.replace(target_like("labels", prediction), dtype=INT64)]

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit one loss per row."""
        x, (labels,) = prediction, targets
        single = check_rank(self, x, (1, 2), "[N, C] or [C]") == 1
        check_same_rank(self, x, labels)
        if single:
            x, labels = op.Unsqueeze(x, [0]), op.Unsqueeze(labels, [0])
        zero, one = op.const(0.0, x.dtype), op.const(1.0, x.dtype)
        places = op.cast(op.iota(op.size(labels, 1)), FLOAT)
        ends = op.Where(op.Less(labels, 0), places, float(2**24))
        given = op.Less(places, op.ReduceMin(ends, [1], keepdims=1))
        labels = op.Where(given, labels, op.const(-1, labels.dtype))
        one_hot = op.Equal(op.Unsqueeze(labels, [2]), class_indices(op, x, labels.dtype))
        one_hot = op.Where(one_hot, one, zero)  # [N, label, class]
        scores = op.ReduceSum(op.Mul(one_hot, op.Unsqueeze(x, [1])), [2], keepdims=1)
        violation = clamp(op, op.Add(op.Sub(1.0, scores), op.Unsqueeze(x, [1])))
        counts = op.Mul(
            op.Unsqueeze(op.Where(given, one, zero), [2]),
            op.Sub(1.0, op.Clip(op.ReduceSum(one_hot, [1], keepdims=1), None, one)),
        )
        each = op.ReduceSum(op.Mul(violation, counts), [1, 2], keepdims=0)
        each = op.Div(each, op.count(x, [1]))
        return op.Squeeze(each, [0]) if single else each


def _label_scores_by_comparison(
    op: OpBuilder, rows: Scores, one_hot: ir.Value, zero: ir.Value
) -> ir.Value:
    """Return ``x[label]`` as ``sum(x * onehot(label))``."""
    return op.ReduceSum(op.Where(one_hot, rows.x, zero), [1], keepdims=1)


def _label_scores_by_gathering(
    op: OpBuilder, rows: Scores, one_hot: ir.Value, zero: ir.Value
) -> ir.Value:
    return op.GatherElements(rows.x, op.Unsqueeze(in_range_labels(op, rows.labels), [1]), axis=1)


LABEL_SCORE_VARIANTS: Variants[None] = {
    "comparison": Variant(_label_scores_by_comparison),
    "gathering": Variant(_label_scores_by_gathering),
}
LABEL_SCORE_CHOICES: Choices[None] = [
    Choice("comparison", lacks="GatherElements"),
    Choice("gathering"),
]
