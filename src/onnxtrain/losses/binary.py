"""Losses with yes-or-no targets: binary cross entropy, hinge."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.variants import Choice, Choices, Form, Forms, chosen
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.losses.base import LOSSES, Loss, check_same_rank, frozen

_TINY = float(np.finfo(np.float32).tiny)


def softplus(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return ``log(1 + e^x)`` without overflow."""
    return chosen(op, x.dtype, SOFTPLUS_FORMS, SOFTPLUS_CHOICES)(op, x)


def _composed_softplus(op: OpBuilder, x: ir.Value) -> ir.Value:
    """``x / 2 + (|x| / 2 + log(1 + e^-|x|))``.

    The bracket is even and smooth, so its derivative at 0 is 0 whatever that of ``|x|`` is.
    """
    a = op.Abs(x)
    even = op.Add(op.Mul(a, 0.5), op.Log(op.Add(op.Exp(op.Neg(a)), 1.0)))
    return op.Add(op.Mul(x, 0.5), even)


# Runtimes without a kernel expand the operator to the plain formula, which overflows above 88; the
# CPU's kernel is for float32 only.
SOFTPLUS_FORMS: Forms[ir.DataType | None] = {
    "composed": Form(_composed_softplus),
    "operator": Form(lambda op, x: op.Softplus(x), lambda dtype: dtype == ir.DataType.FLOAT),
}
SOFTPLUS_CHOICES: Choices[ir.DataType | None] = [
    Choice("composed", lacks="Softplus"),
    Choice("operator"),
    Choice("composed"),
]


@LOSSES.named("bce")
@dataclasses.dataclass(frozen=True, kw_only=True)
class BCE(Loss):
    """``-w (t log x + (1 - t) log(1 - x))`` of probabilities.

    Logarithms are cut off at -100, as in torch; what is cut off passes no gradient. Prefer
    :class:`BCEWithLogits`.

    Args:
        weight: one number per element, broadcast against the prediction.
    """

    weight: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "weight", frozen(self.weight))

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the terms."""
        check_same_rank(self, prediction, *targets)
        (t,) = targets
        yes = op.Mul(t, _log(op, prediction))
        no = op.Mul(op.Sub(1.0, t), _log(op, op.Sub(1.0, prediction)))
        return _weigh(op, op.Neg(op.Add(yes, no)), self.weight)


def _log(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return ``max(log x, -100)`` of a probability, with a finite derivative at 0."""
    gone = op.LessOrEqual(x, _TINY)
    one, least = op.const(1.0, x.dtype), op.const(-100.0, x.dtype)
    return op.Where(gone, least, op.Log(op.Where(gone, one, x)))


def _weigh(op: OpBuilder, each: ir.Value, weight: Any) -> ir.Value:
    return each if weight is None else op.Mul(each, op.const(np.asarray(weight), each.dtype))


@LOSSES.named("bce_with_logits")
@dataclasses.dataclass(frozen=True, kw_only=True)
class BCEWithLogits(Loss):
    """Binary cross entropy of logits, stable for logits of any size.

    ``w ((1 - t) x + (1 + (pos_weight - 1) t) softplus(-x))``.

    Args:
        weight: one number per element, broadcast against the prediction.
        pos_weight: weight of the positive answer, broadcast against the prediction.
    """

    weight: Any = None
    pos_weight: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "weight", frozen(self.weight))
        object.__setattr__(self, "pos_weight", frozen(self.pos_weight))

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the terms; ``softplus(-x)`` keeps its digits where the answer is right."""
        check_same_rank(self, prediction, *targets)
        x, (t,) = prediction, targets
        miss = softplus(op, op.Neg(x))
        if self.pos_weight is not None:
            extra = op.const(np.asarray(self.pos_weight) - 1.0, x.dtype)
            miss = op.Mul(miss, op.Add(op.Mul(t, extra), 1.0))
        each = op.Add(op.Mul(op.Sub(1.0, t), x), miss)
        return _weigh(op, each, self.weight)


@LOSSES.named("hinge")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Hinge(Loss):
    """``max(0, margin - t x)`` for targets of -1 and 1, as in support vector machines."""

    margin: float = 1.0

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the terms; the derivative at the kink is that of the slope, as torch's clamp."""
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
