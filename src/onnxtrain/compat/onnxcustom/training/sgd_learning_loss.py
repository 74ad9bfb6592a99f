"""Losses: each as a graph ``X1 (expected), X2 (predicted)[, weight] -> Y, Y_grad``.

The gradient is derived from the loss, so that it cannot have another sign.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.autodiff.gradients import GradientModel
from onnxtrain.compat.onnxcustom.training.parts import Part
from onnxtrain.compat.onnxcustom.utils.onnxruntime_helper import (
    create_session,
    numpy_to_ort_value,
    runtime_device,
    to_numpy,
)
from onnxtrain.errors import CompatError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io.writer import finalize
from onnxtrain.graph.simplify import simplify
from onnxtrain.importer import Prepared
from onnxtrain.importer.opset import IR_VERSION, OPSET
from onnxtrain.losses.classification import softplus
from onnxtrain.runtime import session as runtime


class BaseLearningLoss(Part):
    """Base of all losses."""

    label_type = ir.DataType.FLOAT

    def score(self, op: OpBuilder, expected: ir.Value, predicted: ir.Value) -> ir.Value:
        """Emit the loss of every observation."""
        raise NotImplementedError

    def build_onnx_function(
        self, opset: Any = None, device: Any = "cpu", weight_name: str | None = None
    ) -> None:
        """Build the graphs, with an input for weights if it has a name."""
        del opset
        self.weight_name = weight_name
        self.device_ = runtime_device(device)
        self.loss_grad_onnx_ = self._graph(weight_name, gradient=True)
        self.loss_score_onnx_ = self._graph(weight_name, gradient=False)
        self._sessions = {}

    def _graph(self, weight_name: str | None, *, gradient: bool) -> onnx.ModelProto:
        graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=type(self).__name__)
        op = OpBuilder(graph)
        expected = op.input("X1", self.label_type, ["N", "C"])
        predicted = op.input("X2", ir.DataType.FLOAT, ["N", "C"])
        weight = None
        if weight_name is not None:
            weight = op.input(weight_name, ir.DataType.FLOAT, ["N"])
        each = self.score(op, expected, predicted)
        if weight is not None:
            each = op.Mul(each, op.Unsqueeze(weight, [1]))
        if not gradient:
            each = op.Identity(each)
            each.name = "Y"
            graph.outputs.append(each)
            return finalize(simplify(ir.Model(graph, ir_version=IR_VERSION)))
        total = op.ReduceSum(each, keepdims=1)
        made = GradientModel(Prepared.of(ir.Model(graph, ir_version=IR_VERSION)))
        prediction_gradient = made.differentiate({total: made.op.const([[1.0]])}, [predicted])[
            predicted
        ]
        made.output("Y", total, total)
        made.output("Y_grad", prediction_gradient, predicted)
        return made.finish()

    def _run(self, kind: str, expected: Any, predicted: Any, weight: Any) -> list[np.ndarray]:
        if not hasattr(self, "loss_grad_onnx_"):
            self.build_onnx_function()
        if kind not in self._sessions:
            model = getattr(self, kind)
            self._sessions[kind] = create_session(model, self.device_)
        x2 = to_numpy(predicted)
        x2 = x2.reshape(len(x2), -1)
        x1 = to_numpy(expected).reshape(x2.shape).astype(self.label_type.numpy())
        feeds: dict[str, np.ndarray] = {"X1": x1, "X2": x2}
        if self.weight_name is not None:
            ones = np.ones(len(x2), np.float32)
            feeds[self.weight_name] = (
                ones if weight is None else to_numpy(weight).reshape(-1).astype(np.float32)
            )
        elif weight is not None:
            raise CompatError(
                "this loss was built without weights\nhint: build_onnx_function(weight_name=...)"
            )
        return runtime.run(self._sessions[kind], None, feeds)

    def loss_gradient(
        self, device: Any, expected: Any, predicted: Any, weight: Any = None
    ) -> tuple[Any, Any]:
        """Return the loss ``[1, 1]`` and its gradient with respect to the prediction."""
        outputs = self._run("loss_grad_onnx_", expected, predicted, weight)
        loss, prediction_gradient = outputs
        prediction_gradient = prediction_gradient.reshape(to_numpy(predicted).shape)
        return numpy_to_ort_value(loss, "cpu"), numpy_to_ort_value(prediction_gradient, device)

    def loss_scores(self, device: Any, expected: Any, predicted: Any, weight: Any = None) -> Any:
        """Return the loss of each observation."""
        (scores,) = self._run("loss_score_onnx_", expected, predicted, weight)
        return numpy_to_ort_value(scores, device)

    @classmethod
    def select(cls, class_name: Any, **kwargs: Any) -> BaseLearningLoss:
        """Return the loss with this name; return loss objects unchanged."""
        if isinstance(class_name, BaseLearningLoss):
            return class_name
        for names, kind in _NAMES.items():
            if class_name in names:
                return kind(**kwargs)
        known = ", ".join(n for names in _NAMES for n in names)
        raise ValueError(f"unknown loss: {class_name!r} (expected one of {known})")


class SquareLearningLoss(BaseLearningLoss):
    """``sum (x2 - x1)^2 / 2``."""

    def score(self, op: OpBuilder, expected: ir.Value, predicted: ir.Value) -> ir.Value:
        """Emit half the squares."""
        d = op.Sub(predicted, expected)
        return op.Mul(op.Mul(d, d), 0.5)


class AbsoluteLearningLoss(BaseLearningLoss):
    """``sum |x2 - x1|``; its gradient is ``sign(x2 - x1)``."""

    def score(self, op: OpBuilder, expected: ir.Value, predicted: ir.Value) -> ir.Value:
        """Emit the distances."""
        return op.Abs(op.Sub(predicted, expected))


class ElasticLearningLoss(BaseLearningLoss):
    """``sum l1_weight |d| + l2_weight d^2`` for ``d = x2 - x1``."""

    def __init__(self, l1_weight: float = 0.5, l2_weight: float = 0.5) -> None:
        self.l1_weight, self.l2_weight = l1_weight, l2_weight

    def score(self, op: OpBuilder, expected: ir.Value, predicted: ir.Value) -> ir.Value:
        """Emit the mixture."""
        d = op.Sub(predicted, expected)
        return op.Add(op.Mul(op.Abs(d), self.l1_weight), op.Mul(op.Mul(d, d), self.l2_weight))


class NegLogLearningLoss(BaseLearningLoss):
    """Log loss of raw scores for labels of 0 and 1; the gradient is ``sigmoid(x2) - x1``.

    ``eps`` is kept for old programs: this form needs no bound, it does not overflow.
    """

    label_type = ir.DataType.INT64

    def __init__(self, eps: float = 1e-5, probability_function: str = "sigmoid") -> None:
        if probability_function != "sigmoid":
            raise CompatError(
                f"unknown probability_function: {probability_function!r} (expected sigmoid)"
            )
        self.eps, self.probability_function = eps, probability_function

    def score(self, op: OpBuilder, expected: ir.Value, predicted: ir.Value) -> ir.Value:
        """Emit ``softplus(s) - y s``."""
        y = op.cast(expected, predicted.dtype)
        return op.Sub(softplus(op, predicted), op.Mul(y, predicted))


_NAMES: dict[tuple[str, ...], type[BaseLearningLoss]] = {
    ("square_error", "square"): SquareLearningLoss,
    ("absolute_error", "absolute"): AbsoluteLearningLoss,
    ("elastic_error", "elastic"): ElasticLearningLoss,
    ("log", "neglog", "logloss"): NegLogLearningLoss,
}
