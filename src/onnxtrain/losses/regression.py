"""Losses between numbers: squared, absolute, and in between; divergence of distributions."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.losses.base import LOSSES, Loss, check_same_rank


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
        """Emit the distances."""
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
            raise PrepareError(f"Huber needs delta above 0: {self.delta}")

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit ``m (d - m / 2)`` with ``m = min(d, delta)``, where no branch can overflow."""
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
            raise PrepareError(f"SmoothL1 needs beta of at least 0: {self.beta}")

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit Huber's loss over ``beta``; with ``beta=0`` it is L1."""
        if self.beta == 0:
            return L1(reduction="none").per_element(op, prediction, *targets)
        huber = Huber(delta=self.beta).per_element(op, prediction, *targets)
        return huber if self.beta == 1.0 else op.Mul(huber, 1.0 / self.beta)


@LOSSES.named("kl_div")
@dataclasses.dataclass(frozen=True, kw_only=True)
class KLDiv(Loss):
    """``t (log t - x)``: the prediction is a log-probability, the target a probability.

    With ``log_target`` the target is a log-probability, too. ``reduction="mean"`` divides by the
    number of elements, as in torch; ``"batchmean"``, which divides by the first size, is the
    divergence as it is usually defined.
    """

    log_target: bool = False

    reductions: ClassVar[tuple[str, ...]] = ("none", "mean", "sum", "batchmean")

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
