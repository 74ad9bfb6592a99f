"""Metrics that a step reports besides the loss: accuracy, top-k, perplexity, MAE."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.rule_registry import Choice, Choices, Variant, Variants, select_variant
from onnxtrain.errors import PrepareError, by_caller
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.losses.classification import BCE, NLL, BCEWithLogits, CrossEntropy, class_axis
from onnxtrain.losses.loss import FLOAT, Loss, check_same_rank, reduce
from onnxtrain.registry import Registry


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """Base of all metrics.

    Args:
        name: name of the graph output; by default the name of the metric.
        output: the model output to evaluate; by default the one that the loss uses.
        target: the input to compare with; by default the target of the loss.
    """

    name: str | None = None
    output: str | None = None
    target: str | None = None

    default_name: ClassVar[str]
    reads_all: ClassVar[bool] = False
    """Whether the metric reads all predictions and targets of a loss."""

    @property
    def label(self) -> str:
        """The name of the output."""
        return self.name or self.default_name

    @property
    def reads_scores(self) -> bool:
        """Whether the metric reads what the loss reads, which may be logits behind the output."""
        return False

    def beside(self, loss: Loss | None) -> Metric:
        """Return the metric with unset fields copied from the loss."""
        changes = {
            f.name: getattr(loss, f.name)
            for f in dataclasses.fields(self)
            if f.name in ("axis", "ignore_index")
            and getattr(self, f.name) is None
            and hasattr(loss, f.name)
        }
        return dataclasses.replace(self, **changes)

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the metric; return a float32 scalar."""
        raise NotImplementedError


METRICS: Registry[Metric] = Registry("metric", attribute="default_name")
"""Metrics by name; ``@METRICS.named("mae")`` adds one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ClassMetric(Metric):
    """A metric of class predictions; ``axis`` and ``ignore_index`` default to those of the loss."""

    axis: int | None = None
    ignore_index: int | None = None

    @property
    def reads_scores(self) -> bool:
        """Whether the metric reads what the loss reads: the order of classes is the same."""
        return True

    def class_axis(self, x: ir.Value) -> int:
        """Return the class axis as a position."""
        return class_axis(self, x, 1 if self.axis is None else self.axis)

    def mean(self, op: OpBuilder, hit: ir.Value, labels: ir.Value | None) -> ir.Value:
        """Return the fraction of hits among the labels that are not ignored; NaN without any."""
        hits = op.cast(hit, FLOAT)
        if labels is None or self.ignore_index is None:
            return reduce(op, hits, "mean")
        counts = op.cast(op.Not(op.Equal(labels, self.ignore_index)), FLOAT)
        total = reduce(op, op.Mul(hits, counts), "sum")
        return op.Div(total, reduce(op, counts, "sum"))


@METRICS.named("accuracy")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Accuracy(_ClassMetric):
    """The fraction of rows in which the label has the largest score.

    With a binary cross entropy, or with ``threshold``: the fraction of elements on the correct side
    of the threshold.
    """

    threshold: float | None = None

    @property
    def reads_scores(self) -> bool:
        """Whether the metric reads what the loss reads; ``threshold`` is one of the output."""
        return self.threshold is None

    def beside(self, loss: Loss | None) -> Metric:
        """Copy unset fields, and the threshold of binary losses."""
        metric: Any = super().beside(loss)
        if self.threshold is None and isinstance(loss, BCEWithLogits | BCE):
            threshold = 0.5 if isinstance(loss, BCE) else 0.0
            return dataclasses.replace(metric, threshold=threshold)
        return metric

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the comparison."""
        (target,) = targets
        if self.threshold is not None:
            target = op.cast(target, prediction.dtype)
            check_same_rank(self, prediction, target)
            predicted, actual = op.Greater(prediction, self.threshold), op.Greater(target, 0.5)
            return self.mean(op, op.Equal(predicted, actual), None)
        axis = self.class_axis(prediction)
        if S.is_float(target):
            best = (op.ArgMax(v, axis=axis, keepdims=0) for v in (prediction, target))
            return self.mean(op, op.Equal(*best), None)
        classes = op.dims(prediction)[axis]
        hit = select_variant(op, classes, HIT_VARIANTS, HIT_CHOICES)(op, prediction, target, axis)
        return self.mean(op, hit, target)


def _hit_by_argmax(op: OpBuilder, x: ir.Value, labels: ir.Value, axis: int) -> ir.Value:
    """Return whether the label has the largest score."""
    return op.Equal(op.cast(op.ArgMax(x, axis=axis, keepdims=0), labels.dtype), labels)


def _hit_by_class_index(op: OpBuilder, x: ir.Value, labels: ir.Value, axis: int) -> ir.Value:
    """Return the same without ArgMax, whose int64 result WebGPU cannot cast."""
    classes = op.dims(x)[axis]
    assert isinstance(classes, int)
    top = op.Equal(x, op.ReduceMax(x, [axis], keepdims=1))
    sizes = [classes if i == axis else 1 for i in range(S.rank_of(x) or 1)]
    indices = op.const(np.arange(classes, dtype=np.float32).reshape(sizes))
    largest = op.ReduceMin(op.Where(top, indices, float(classes)), [axis], keepdims=0)
    return op.Equal(largest, op.cast(labels, FLOAT))


HIT_VARIANTS: Variants[Dim] = {
    "argmax": Variant(_hit_by_argmax),
    "class index": Variant(_hit_by_class_index, lambda classes: isinstance(classes, int)),
}
HIT_CHOICES: Choices[Dim] = [Choice("class index", lacks="ArgMax"), Choice("argmax")]


@METRICS.named("top_k")
@dataclasses.dataclass(frozen=True)
class TopK(_ClassMetric):
    """The fraction of rows in which the label is among the ``k`` largest scores."""

    k: int = 5

    def __post_init__(self) -> None:
        if self.k < 1:
            raise PrepareError(f"top_k: k must be at least 1: {self.k}")

    @property
    def label(self) -> str:
        """The name of the output, for example ``top_5``."""
        return self.name or f"top_{self.k}"

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the comparison."""
        (target,) = targets
        axis = self.class_axis(prediction)
        classes = S.dims_of(prediction)[axis]  # pyright: ignore[reportOptionalSubscript]
        if isinstance(classes, int) and self.k > classes:
            raise PrepareError(f"top_{self.k} of {classes} classes: {S.describe_value(prediction)}")
        _, best = op.TopK(prediction, [self.k], axis=axis, _outputs=2)
        same = op.Equal(op.cast(best, target.dtype), op.Unsqueeze(target, [axis]))
        hit = op.ReduceSum(op.cast(same, FLOAT), [axis], keepdims=0)
        return self.mean(op, hit, target)


@METRICS.named("perplexity")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Perplexity(_ClassMetric):
    """``e^mean(-log p[label])``, without class weights and label smoothing.

    Args:
        log_probabilities: the prediction is a log-probability, as for the NLL loss.
    """

    log_probabilities: bool | None = None

    def beside(self, loss: Loss | None) -> Metric:
        """Copy unset fields, and whether the prediction is a log-probability."""
        metric: Any = super().beside(loss)
        if self.log_probabilities is None:
            return dataclasses.replace(metric, log_probabilities=isinstance(loss, NLL))
        return metric

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the exponential of the mean loss."""
        kind = NLL if self.log_probabilities else CrossEntropy
        axis = self.class_axis(prediction)
        loss = kind(axis=axis, ignore_index=self.ignore_index).build(op, prediction, *targets)
        return op.cast(op.Exp(loss), FLOAT)


@METRICS.named("mae")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MAE(Metric):
    """The mean absolute error of the prediction."""

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the mean."""
        (target,) = targets
        check_same_rank(self, prediction, target)
        return op.cast(reduce(op, op.Abs(op.Sub(prediction, target)), "mean"), FLOAT)


DATA_SET_METRICS = (
    *("precision", "recall", "f1", "auc", "map", "confusion_matrix", "r2"),
    *("miou", "dice", "coco_map", "cer", "wer"),
)
"""Metrics that are not means over batches: ``fit`` and ``evaluate`` compute them outside the graph,
from all predictions of a data set."""


def metric_by_name(name: str) -> Metric:
    """Return the metric of a name, or of a name with options.

    >>> metric_by_name("top_3") == metric_by_name("top_k:k=3") == TopK(3)
    True
    """
    number = re.fullmatch(r"top_(\d+)", name)
    if name.partition(":")[0] in DATA_SET_METRICS:
        raise PrepareError(
            f"{name!r} is not a mean over batches, which metrics of a graph are\nhint: "
            + by_caller(
                f"fit(..., metrics=[{name!r}]) computes it on the validation data",
                f"onnxtrain train ... --metric {name} computes it on the validation data",
            )
        )
    return TopK(int(number[1])) if number else METRICS.make(name)


__all__ = [
    "MAE",
    "METRICS",
    "Accuracy",
    "Metric",
    "Perplexity",
    "TopK",
    "metric_by_name",
]
