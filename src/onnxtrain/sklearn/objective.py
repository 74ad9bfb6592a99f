"""What is minimised: a weighted mean of row losses plus a penalty on the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.losses import (
    BCE,
    L1,
    LOSSES,
    MSE,
    NLL,
    BCEWithLogits,
    CrossEntropy,
    Hinge,
    Huber,
    Loss,
    MultiMargin,
    resolve,
)
from onnxtrain.losses.base import check_same_rank
from onnxtrain.named import unknown

PENALTIES = ("l1", "l2", "elasticnet", "elastic")
_FLOAT, _INT64 = ir.DataType.FLOAT, ir.DataType.INT64
_LEAST = 1e-10  # a probability of 0 would have an infinite loss
WEIGHT = "sample_weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SquaredError(MSE):
    """``(x - t)^2 / 2``: scikit-learn's squared error has this factor."""

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit half the mean; the sum of squares is one node, and so is its gradient."""
        if self.reduction != "mean":
            return op.Mul(super().build(op, prediction, *targets), 0.5)
        check_same_rank(self, prediction, *targets)
        total = op.ReduceSumSquare(op.Sub(prediction, *targets), keepdims=0)
        sizes = op.static(prediction)
        if sizes is not None:
            return op.Mul(total, 0.5 / float(np.prod(sizes)))
        return op.Div(op.Mul(total, 0.5), op.count(prediction))


REGRESSION = {"squared_error": SquaredError, "absolute_error": L1, "huber": Huber}
MARGINS = ("hinge", "multi_margin")


@dataclasses.dataclass(frozen=True)
class Penalty:
    """``alpha (l1_ratio |w|_1 + (1 - l1_ratio) |w|^2 / 2)`` over all weights, biases left out.

    It is part of the loss, so its gradient is scaled by the learning rate like any other.
    """

    alpha: float
    l1_ratio: float

    @classmethod
    def of(cls, name: str | None, alpha: float, l1_ratio: float) -> Penalty | None:
        """Return the penalty that a name stands for."""
        if name is None:
            return None
        if name not in PENALTIES:
            raise PrepareError(f"no such penalty: {name!r}\nhint: one of {', '.join(PENALTIES)}")
        if not alpha >= 0 or not 0 <= l1_ratio <= 1:
            raise PrepareError(
                f"a penalty needs alpha >= 0 and l1_ratio in [0, 1]: {alpha}, {l1_ratio}"
            )
        ratio = {"l1": 1.0, "l2": 0.0}.get(name, float(l1_ratio))
        return cls(float(alpha), ratio) if alpha else None

    def build(self, op: OpBuilder, weights: Sequence[ir.Value]) -> ir.Value:
        """Emit the sum over all weights, a float32 scalar."""
        terms = []
        for w in weights:
            if self.l1_ratio:
                size = op.ReduceSum(op.Abs(w), keepdims=0)
                terms.append(op.Mul(size, self.alpha * self.l1_ratio))
            if self.l1_ratio < 1:
                square = op.ReduceSum(op.Mul(w, w), keepdims=0)
                terms.append(op.Mul(square, self.alpha * (1 - self.l1_ratio) / 2))
        total = op.cast(terms[0], _FLOAT)
        for term in terms[1:]:
            total = op.Add(total, op.cast(term, _FLOAT))
        return total


def regression_loss(loss: Any) -> Any:
    """Return the loss object or function that the parameter ``loss`` of a regressor means."""
    if isinstance(loss, str):
        if loss in REGRESSION:
            return REGRESSION[loss]()
        if loss.split(":")[0] not in LOSSES:
            raise unknown(loss, [*REGRESSION, *LOSSES], "loss")
    if isinstance(loss, str | Loss) or (isinstance(loss, type) and issubclass(loss, Loss)):
        return resolve(loss)[0].loss
    if callable(loss):
        return loss
    raise PrepareError(f"not a loss: {loss!r}\nhint: a name, a loss object or a function")


def classification_loss(loss: Any, columns: int, kind: str) -> Any:
    """Return the loss object or function of a classifier whose net has so many columns."""
    single = columns == 1
    if loss == "log_loss":
        if kind == "logits":
            return BCEWithLogits() if single else CrossEntropy(ignore_index=None)
        return BCE() if single else _LogLikelihood(ignore_index=None)
    if loss in MARGINS:
        return _SignedHinge() if single else MultiMargin()
    if isinstance(loss, str) and loss.split(":")[0] not in LOSSES:
        raise unknown(loss, ["log_loss", *MARGINS, *LOSSES], "loss")
    return regression_loss(loss)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LogLikelihood(NLL):
    """``-log(p[label])`` of probabilities."""

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        floor = op.const(_LEAST, prediction.dtype)
        return super().build(op, op.Log(op.Max(prediction, floor)), *targets)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SignedHinge(Hinge):
    """Hinge for targets of 0 and 1."""

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        return super().per_element(op, prediction, op.Sub(op.Mul(targets[0], 2.0), 1.0))


def objective(
    loss: Any, *, weighted: bool, penalty: Penalty | None, weights: Sequence[str]
) -> Callable[..., ir.Value]:
    """Return the loss function for a net with one output.

    Args:
        loss: a loss object, or a function ``(op, prediction, target)`` of one number per element.
        weighted: whether there is an input with one weight per row.
        penalty: on the weights, or ``None``.
        weights: names of the weights that a penalty looks at.
    """

    def build(op: OpBuilder, prediction: ir.Value) -> ir.Value:
        how = "none" if weighted else "mean"
        one = dataclasses.replace(loss, reduction=how) if isinstance(loss, Loss) else loss
        dims = op.dims(prediction)
        if isinstance(one, Loss):
            (target,) = one.targets(prediction)
            t = op.input("target", target.dtype, list(target.dims))
            value = one.build(op, prediction, t)
        else:
            t = op.input("target", prediction.dtype or _FLOAT, list(dims))
            value = one(op, prediction, t)
        if weighted:
            if op.rank(value) > 1:
                value = op.ReduceMean(value, list(range(1, op.rank(value))), keepdims=0)
            w = op.input(WEIGHT, _FLOAT, [dims[0]])
            value = op.Mul(value, op.cast(w, value.dtype))
        if op.rank(value):
            value = op.ReduceMean(value, keepdims=0)
        value = op.cast(value, _FLOAT)
        if penalty is not None and weights:
            known = op.root.initializers
            value = op.Add(value, penalty.build(op, [known[n] for n in weights]))
        return value

    return build
