"""Penalties on weights; they are part of the loss, hence scaled by the learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.compat.onnxcustom.training.parts import Part
from onnxtrain.compat.onnxcustom.utils.onnxruntime_helper import numpy_to_ort_value, to_numpy
from onnxtrain.graph.builder import OpBuilder


class BaseLearningPenalty(Part):
    """Base of all penalties."""

    def build(self, op: OpBuilder, weights: Sequence[ir.Value]) -> ir.Value | None:
        """Emit the penalty, a scalar, or nothing."""
        raise NotImplementedError

    def penalty_loss(self, device: Any, loss: Any, *weights: Any) -> Any:
        """Return the loss with the penalty of some weights added to it."""
        del weights, device
        return loss

    @classmethod
    def select(cls, class_name: Any, **kwargs: Any) -> BaseLearningPenalty:
        """Return the penalty with this name; return penalty objects unchanged."""
        if isinstance(class_name, BaseLearningPenalty):
            return class_name
        if class_name in (None, ""):
            return NoLearningPenalty()
        if class_name in ("elastic", "l1l2"):
            return ElasticLearningPenalty(**kwargs)
        raise ValueError(f"unknown penalty: {class_name!r} (expected one of elastic, l1l2, None)")


class NoLearningPenalty(BaseLearningPenalty):
    """Nothing."""

    def build(self, op: OpBuilder, weights: Sequence[ir.Value]) -> ir.Value | None:
        """Emit nothing."""
        return None


class ElasticLearningPenalty(BaseLearningPenalty):
    """``l1 |w|_1 + l2 |w|^2`` over all weights."""

    def __init__(self, l1: float = 0.5, l2: float = 0.5) -> None:
        self.l1, self.l2 = l1, l2

    def build(self, op: OpBuilder, weights: Sequence[ir.Value]) -> ir.Value | None:
        """Emit the sum."""
        total: ir.Value | None = None
        for w in weights:
            for factor, each in ((self.l1, op.Abs), (self.l2, lambda x: op.Mul(x, x))):
                if not factor:
                    continue
                term = op.Mul(op.ReduceSum(each(w), keepdims=0), float(factor))
                total = term if total is None else op.Add(total, term)
        return total

    def penalty_loss(self, device: Any, loss: Any, *weights: Any) -> Any:
        """Return the loss with the penalty added."""
        arrays = [to_numpy(w) for w in weights]
        extra = sum(self.l1 * np.abs(w).sum() + self.l2 * np.square(w).sum() for w in arrays)
        return numpy_to_ort_value((to_numpy(loss) + extra).astype(np.float32), device)
