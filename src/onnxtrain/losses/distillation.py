"""Distillation: a student learns the outputs of a teacher, another model that does not train."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import onnx_ir as ir

from onnxtrain.errors import PrepareError, ShapeError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes import dims as D
from onnxtrain.losses.from_model import insert_frozen
from onnxtrain.losses.logits import Reads
from onnxtrain.losses.loss import LOSSES, Loss, TargetSpec, check_same_rank, target_like


@LOSSES.named("distillation")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Distillation(Loss):
    """``T^2 KL(softmax(t / T), softmax(s / T))`` of the logits ``t`` of a teacher and ``s``.

    The mean is over rows: over all positions that have logits.

    Args:
        teacher: the teacher, a file or a model; it becomes part of the training graph, reads the
            inputs of the model with its names, and does not train. Without it, its logits are
            another output of the model or the input ``teacher_logits``.
        temperature: ``T``; above 1, small probabilities count more.
        axis: the axis of the classes.
        output: the output of the teacher with its logits; needed if it has several.
        features: values of the student and of the teacher that are to be equal, by name; their mean
            squared error is added. Select the student's values by ``LossTerm(output=[...])``, after
            the logits.
        feature_weight: factor of these errors.
        classes: number of classes of the teacher, if the student has learned more since; its first
            ones are compared.
        reduction: ``"mean"`` or ``"sum"`` over rows, or ``"none"``.
    """

    teacher: Any = dataclasses.field(default=None, repr=False)
    temperature: float = 2.0
    axis: int = -1
    output: str | None = None
    features: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    feature_weight: float = 1.0
    classes: int | None = None

    predictions: ClassVar[int] = 2
    reads = Reads.SOFTMAX_LOGITS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperature > 0:
            raise PrepareError(f"Distillation: temperature must be positive: {self.temperature}")
        if self.features and (self.teacher is None or self.reduction == "none"):
            raise PrepareError("Distillation: features need teacher= and reduction='mean' or 'sum'")
        if self.teacher is not None:
            object.__setattr__(self, "predictions", 1 + len(self.features))

    def normalized_axis(self, prediction: ir.Value) -> int | None:
        """Return the axis of the classes."""
        return self.axis % S.rank_of(prediction)

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return the logits of the teacher, unless the loss computes them."""
        if self.teacher is not None:
            return []
        target = target_like("teacher_logits", prediction)
        if self.classes is None:
            return [target]
        dims = list(target.dims)
        dims[self.axis] = self.classes
        return [dataclasses.replace(target, dims=tuple(dims))]

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the loss."""
        if self.teacher is None:
            return super().build(op, prediction, *targets)
        names = [self.output, *self.features.values()]
        logits, *theirs = insert_frozen(op, self.teacher, names)
        loss = super().build(op, prediction, op.cast(logits, prediction.dtype))
        for ours, their in zip(targets, theirs, strict=True):
            error = op.Sub(ours, op.cast(_same_shape(ours, their), ours.dtype))
            squares = self.reduce(op, op.Mul(error, error))
            loss = op.Add(loss, op.Mul(squares, self.feature_weight))
        return loss

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the divergence of every row."""
        (teacher,) = targets
        if self.classes is not None:
            axis = self.axis % S.rank_of(prediction)
            prediction = op.Slice(prediction, [0], [self.classes], [axis])
        check_same_rank(self, prediction, teacher)
        scale = 1.0 / self.temperature
        axis = self.axis % S.rank_of(prediction)
        theirs = op.LogSoftmax(op.Mul(teacher, scale), axis=axis)
        ours = op.LogSoftmax(op.Mul(prediction, scale), axis=axis)
        each = op.Mul(op.Exp(theirs), op.Sub(theirs, ours))
        return op.Mul(op.ReduceSum(each, [axis], keepdims=0), self.temperature**2)


def _same_shape(ours: ir.Value, theirs: ir.Value) -> ir.Value:
    have, want = S.dims_of(theirs), S.dims_of(ours)
    if have is not None and want is not None and D.shapes_differ(have, want):
        raise ShapeError(
            "Distillation: values of student and teacher have different shapes: "
            f"{S.describe_value(ours)} and {S.describe_value(theirs)}\n"
            "hint: choose values of equal shapes, or project one of them in the student"
        )
    return theirs
