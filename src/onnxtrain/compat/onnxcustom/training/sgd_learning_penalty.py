"""Penalties on weights; they are part of the loss, hence scaled by the learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.compat.onnxcustom.training.parts import Part
from onnxtrain.compat.onnxcustom.utils.onnxruntime_helper import (
    create_session,
    numpy_to_ort_value,
    to_numpy,
)
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.importer.opset import IR_VERSION, OPSET
from onnxtrain.runtime import session as runtime


class BaseLearningPenalty(Part):
    """Base of all penalties."""

    def build(self, op: OpBuilder, weights: Sequence[ir.Value]) -> ir.Value | None:
        """Emit the penalty, a scalar, or nothing."""
        raise NotImplementedError

    def build_onnx_function(
        self, opset: int | None = None, device: Any = "cpu", n_tensors: int = 1
    ) -> None:
        """Build the graphs of this penalty for a number of weights."""

    def penalty_loss(self, device: Any, loss: Any, *weights: Any) -> Any:
        """Return the loss with the penalty of some weights added to it."""
        del weights, device
        return loss

    def update_weights(self, n_bind: int, device: Any, statei: Any) -> Any:
        """Return a weight after a step of size 1 against the gradient of the penalty."""
        del n_bind, device
        return statei

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

    def build_onnx_function(
        self, opset: int | None = None, device: Any = "cpu", n_tensors: int = 1
    ) -> None:
        """Build ``penalty_onnx_``, the loss with the penalty, and ``penalty_grad_onnx_``."""
        self.opset_, self.device_ = opset or OPSET, device
        op = OpBuilder(ir.Graph([], [], nodes=[], opset_imports={"": self.opset_}, name="penalty"))
        total = op.input("loss", ir.DataType.FLOAT, None)
        l1, l2 = (op.const(np.array([v], np.float32)) for v in (self.l1, self.l2))
        for i in range(n_tensors):
            w = op.input(f"W{i}", ir.DataType.FLOAT, None)
            sums = (op.ReduceSum(x, keepdims=0) for x in (op.Abs(w), op.Mul(w, w)))
            for factor, term in zip((l1, l2), sums, strict=True):
                total = op.Add(total, op.Mul(term, factor))
        self.penalty_onnx_ = _finished(op, total)
        op = OpBuilder(ir.Graph([], [], nodes=[], opset_imports={"": self.opset_}, name="update"))
        w = op.input("X", ir.DataType.FLOAT, None)
        keep, l1 = (op.const(np.array([v], np.float32)) for v in (1 - 2 * self.l2, self.l1))
        self.penalty_grad_onnx_ = _finished(op, op.Sub(op.Mul(w, keep), op.Mul(op.Sign(w), l1)))
        self._sessions: dict[str, Any] = {}

    def penalty_loss(self, device: Any, loss: Any, *weights: Any) -> Any:
        """Return the loss with the penalty added."""
        if len(weights) != len(getattr(self, "penalty_onnx_", onnx.ModelProto()).graph.input) - 1:
            self.build_onnx_function(device=device, n_tensors=len(weights))
        feeds = {f"W{i}": to_numpy(w) for i, w in enumerate(weights)}
        return self._run("penalty_onnx_", device, {"loss": to_numpy(loss), **feeds})

    def update_weights(self, n_bind: int, device: Any, statei: Any) -> Any:
        """Return a weight after a step of size 1 against the gradient of the penalty."""
        del n_bind
        if not hasattr(self, "penalty_grad_onnx_"):
            self.build_onnx_function(device=device)
        return self._run("penalty_grad_onnx_", device, {"X": to_numpy(statei)})

    def _run(self, kind: str, device: Any, feeds: dict[str, np.ndarray]) -> Any:
        if kind not in self._sessions:
            self._sessions[kind] = create_session(getattr(self, kind), self.device_)
        (result,) = runtime.run(self._sessions[kind], None, feeds)
        return numpy_to_ort_value(result, device)


def _finished(op: OpBuilder, result: ir.Value) -> onnx.ModelProto:
    """Return a model with one output; programs read its constants as ``float_data``."""
    y = op.Identity(result)
    y.name = "Y"
    op.graph.outputs.append(y)
    model = ir.to_proto(ir.Model(op.graph, ir_version=IR_VERSION))
    for tensor in model.graph.initializer:
        values = np.frombuffer(tensor.raw_data, np.float32)
        tensor.ClearField("raw_data")
        tensor.float_data.extend(values.tolist())
    return model
