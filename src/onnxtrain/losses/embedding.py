"""Losses between vectors: cosine similarity and triplets."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import onnx_ir as ir

from onnxtrain.errors import PrepareError, ShapeError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.losses.base import LOSSES, Loss, TargetSpec, check_same_rank, like, rows_of
from onnxtrain.losses.binary import clamp

_EPSILON = 1e-12  # torch's, added to squared lengths


@LOSSES.named("cosine_embedding")
@dataclasses.dataclass(frozen=True, kw_only=True)
class CosineEmbedding(Loss):
    """``1 - cos(x1, x2)`` where the target is 1, ``max(0, cos(x1, x2) - margin)`` where it is -1.

    The first argument is the prediction, the second another output of the model or an input called
    ``other``; the third, ``target``, has one number per row.
    """

    margin: float = 0.0

    predictions: ClassVar[int] = 2

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return the vectors to compare with, and 1 or -1 for each row."""
        _check_rows(self, prediction)
        return [like("other", prediction), rows_of("target", prediction)]

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
            f"{type(loss).__name__} does not take {S.describe_value(x)}\n"
            "hint: it wants [N, D] or [D]"
        )


@LOSSES.named("triplet_margin")
@dataclasses.dataclass(frozen=True, kw_only=True)
class TripletMargin(Loss):
    """``max(0, margin + d(anchor, positive) - d(anchor, negative))``, ``d`` the ``p``-norm of rows.

    The anchor is the prediction; positive and negative are other outputs of the model, or inputs of
    these names. ``swap`` takes the negative's distance to the positive if that is smaller.
    """

    margin: float = 1.0
    p: float = 2.0
    eps: float = 1e-6
    swap: bool = False

    predictions: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.p > 0:
            raise PrepareError(f"TripletMargin needs p above 0: {self.p}")

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return the vectors that are to be near and far."""
        _check_rows(self, prediction)
        return [like("positive", prediction), like("negative", prediction)]

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
