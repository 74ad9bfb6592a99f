"""The margin of a label's score over those of all other classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.autodiff.variants import Choice, Choices, Form, Forms, chosen
from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.losses.base import (
    LOSSES,
    Loss,
    TargetSpec,
    check_rank,
    class_weights,
    frozen,
    labels_for,
)
from onnxtrain.losses.binary import clamp
from onnxtrain.losses.classification import Scores, guarded, is_label, to_rows


@LOSSES.named("multi_margin")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiMargin(Loss):
    """``sum over i != label of max(0, margin - x[label] + x[i])^p / classes`` for ``x`` of [N, C].

    Args:
        p: 1 or 2.
        margin: how far the label's score must lead.
        weight: one number per class; ``mean`` does not divide by them, as in torch.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
    """

    p: int = 1
    margin: float = 1.0
    weight: Sequence[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "weight", frozen(self.weight))
        if self.p not in (1, 2):
            raise PrepareError(f"MultiMargin takes p=1 or p=2, not {self.p}")

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return class indices."""
        rank = check_rank(self, prediction, (1, 2), "[N, C] or [C]")
        return [labels_for("labels", prediction, rank - 1)]

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit one loss per row."""
        rank = check_rank(self, prediction, (1, 2), "[N, C] or [C]")
        rows = to_rows(self, op, prediction, targets[0], rank - 1)
        x, zero = rows.x, op.const(0.0, rows.x.dtype)
        mine = is_label(op, x, rows.labels)
        lead = chosen(op, None, LEAD_FORMS, LEAD_CHOICES)(op, rows, mine, zero)
        miss = clamp(op, op.Sub(op.Add(x, self.margin), lead))
        if self.p == 2:
            miss = op.Mul(miss, miss)
        each = op.ReduceMean(op.Where(mine, zero, miss), [1], keepdims=0)
        weights = class_weights(self, op, self.weight, x, 1)
        if weights is not None:
            each = op.Mul(each, op.Gather(weights, rows.labels))
        return rows.restore(op, each)


def _lead_by_comparison(op: OpBuilder, rows: Scores, mine: ir.Value, zero: ir.Value) -> ir.Value:
    """Return ``x[label]`` as a sum over ``x * onehot(label)``."""
    return op.ReduceSum(op.Where(mine, rows.x, zero), [1], keepdims=1)


def _lead_by_gathering(op: OpBuilder, rows: Scores, mine: ir.Value, zero: ir.Value) -> ir.Value:
    return op.GatherElements(rows.x, op.Unsqueeze(guarded(op, rows.labels), [1]), axis=1)


LEAD_FORMS: Forms[None] = {
    "comparison": Form(_lead_by_comparison),
    "gathering": Form(_lead_by_gathering),
}
LEAD_CHOICES: Choices[None] = [Choice("comparison", lacks="GatherElements"), Choice("gathering")]
