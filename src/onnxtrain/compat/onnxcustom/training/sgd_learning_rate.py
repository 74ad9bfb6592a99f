"""Learning rates, and the update that goes with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.compat.onnxcustom.training.parts import Part
from onnxtrain.compat.onnxcustom.utils.onnxruntime_helper import runtime_device
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.io.writer import finalize
from onnxtrain.importer.opset import IR_VERSION, OPSET
from onnxtrain.runtime import session as runtime


class BaseLearningRate(Part):
    """Base of all learning rates: a value that changes with each iteration."""

    eta0: float
    value_: float | None = None

    def __repr__(self) -> str:
        value = "" if self.value_ is None else f", value={self.value_!r}"
        return f"{super().__repr__()}{value}"

    @property
    def value(self) -> float:
        """The current learning rate."""
        if self.value_ is None:
            raise RuntimeError("the schedule has no value yet\nhint: call init_learning_rate()")
        return self.value_

    @property
    def needs_grad(self) -> bool:
        """Whether there is a velocity for each weight."""
        return False

    def init_learning_rate(self) -> BaseLearningRate:
        """Reset to the initial state."""
        raise NotImplementedError

    def update_learning_rate(self, t: int) -> BaseLearningRate:
        """Update the value for iteration ``t``."""
        raise NotImplementedError

    def loop(self, n: int = 1000) -> Iterator[float]:
        """Return the first ``n`` values."""
        self.init_learning_rate()
        for i in range(n):
            yield self.value
            self.update_learning_rate(i + 1)

    def build_onnx_function(
        self, opset: Any = None, device: Any = "cpu", n_tensors: int = 1
    ) -> None:
        """Build the graph of the update."""
        raise NotImplementedError

    def update_weights(
        self, weight: np.ndarray, gradient: np.ndarray, batch_size: int, velocity: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the new weight, and the new velocity."""
        raise NotImplementedError

    @classmethod
    def select(cls, class_name: Any, **kwargs: Any) -> BaseLearningRate:
        """Return the learning rate object for a name or a number."""
        if isinstance(class_name, BaseLearningRate):
            return class_name
        if isinstance(class_name, float | int):
            return LearningRateSGD(float(class_name), **kwargs)
        if class_name == "SGD":
            return LearningRateSGD(**kwargs)
        if class_name in ("SGDNesterov", "Nesterov"):
            return LearningRateSGDNesterov(**kwargs)
        raise ValueError(
            f"unknown learning rate: {class_name!r} (expected SGD, SGDNesterov or a number)"
        )


class LearningRateSGD(BaseLearningRate):
    """``w -= eta / batch_size * g``.

    Args:
        eta0: at the start.
        alpha: of the ``"optimal"`` schedule.
        power_t: of the ``"invscaling"`` schedule.
        learning_rate: ``"constant"``, ``"invscaling"`` (``eta0 / (t + 1)^power_t``) or
            ``"optimal"`` (``eta0 t0 / (t0 + t)``, where ``t0`` follows from ``alpha``).
    """

    def __init__(
        self,
        eta0: float = 0.01,
        alpha: float = 0.0001,
        power_t: float = 0.25,
        learning_rate: str = "invscaling",
    ) -> None:
        if learning_rate not in ("constant", "invscaling", "optimal"):
            raise ValueError(
                f"unknown schedule: {learning_rate!r} "
                "(expected one of constant, invscaling, optimal)"
            )
        self.eta0, self.alpha, self.power_t = eta0, alpha, power_t
        self.learning_rate = learning_rate.lower()

    def init_learning_rate(self) -> LearningRateSGD:
        """Reset to the initial state."""
        if self.learning_rate == "optimal":
            typical = np.sqrt(1.0 / np.sqrt(self.alpha))
            first = typical / max(1.0, (1 + typical) * 2)
            self.optimal_init_ = 1.0 / (first * self.alpha)
        self.value_ = float(self.eta0)
        return self

    def update_learning_rate(self, t: int) -> LearningRateSGD:
        """Update the value for iteration ``t``."""
        if self.learning_rate == "optimal":
            self.value_ = self.eta0 * self.optimal_init_ / (self.optimal_init_ + t)
        elif self.learning_rate == "invscaling":
            self.value_ = self.eta0 / (t + 1) ** self.power_t
        return self

    def build_onnx_function(
        self, opset: Any = None, device: Any = "cpu", n_tensors: int = 1
    ) -> None:
        """Build the graph of the update."""
        del opset, n_tensors
        graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="axpy")
        op = OpBuilder(graph)
        self._update(op)
        self.axpy_onnx_ = finalize(ir.Model(graph, ir_version=IR_VERSION))
        data = self.axpy_onnx_.SerializeToString()
        self._sessions = {"axpy": runtime.create(data, device=runtime_device(device), threads=1)}

    def _update(self, op: OpBuilder) -> None:
        g, w = (op.input(n, ir.DataType.FLOAT, ["n"]) for n in ("X1", "X2"))
        alpha = op.input("alpha", ir.DataType.FLOAT, [1])
        new = op.Sub(w, op.Mul(g, alpha))
        new.name = "Y"
        op.graph.outputs.append(new)

    def update_weights(
        self, weight: np.ndarray, gradient: np.ndarray, batch_size: int, velocity: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the new weight."""
        feeds = self._feeds(weight, gradient, batch_size)
        (new,) = runtime.run(self._sessions["axpy"], None, feeds)
        return new.reshape(weight.shape).astype(weight.dtype), None

    def _feeds(
        self, weight: np.ndarray, gradient: np.ndarray, batch_size: int
    ) -> dict[str, np.ndarray]:
        if "_sessions" not in vars(self):
            self.build_onnx_function()
        return {
            "X1": np.ravel(gradient).astype(np.float32, copy=False),
            "X2": np.ravel(weight).astype(np.float32, copy=False),
            "alpha": np.array([self.value / batch_size], np.float32),
        }


class LearningRateSGDNesterov(LearningRateSGD):
    """With a velocity: ``z = momentum v - eta / batch_size g``, then ``v = z``.

    ``w += momentum z - eta / batch_size g`` with ``nesterov``, else ``w += z``.
    """

    def __init__(
        self,
        eta0: float = 0.01,
        alpha: float = 0.0001,
        power_t: float = 0.25,
        learning_rate: str = "invscaling",
        momentum: float = 0.9,
        nesterov: bool = True,
    ) -> None:
        super().__init__(eta0, alpha, power_t, learning_rate)
        self.momentum, self.nesterov = momentum, nesterov

    @property
    def needs_grad(self) -> bool:
        """Whether there is a velocity for each weight."""
        return True

    def _update(self, op: OpBuilder) -> None:
        g, w, v = (op.input(n, ir.DataType.FLOAT, ["n"]) for n in ("X1", "X2", "Z1"))
        alpha = op.input("alpha", ir.DataType.FLOAT, [1])
        down = op.Mul(g, alpha)
        z = op.Sub(op.Mul(v, float(self.momentum)), down)
        ahead = op.Sub(op.Mul(z, float(self.momentum)), down) if self.nesterov else z
        new, speed = op.Add(w, ahead), op.Identity(z)
        new.name, speed.name = "Y", "Z"
        op.graph.outputs.extend([new, speed])

    def update_weights(
        self, weight: np.ndarray, gradient: np.ndarray, batch_size: int, velocity: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the new weight and the new velocity."""
        feeds = self._feeds(weight, gradient, batch_size)
        start = np.zeros(weight.size, np.float32) if velocity is None else np.ravel(velocity)
        new, z = runtime.run(self._sessions["axpy"], None, {**feeds, "Z1": start})
        return new.reshape(weight.shape).astype(weight.dtype), z.reshape(weight.shape)
