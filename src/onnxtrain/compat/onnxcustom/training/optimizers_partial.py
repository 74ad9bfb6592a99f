"""SGD on a model without a loss; loss, penalty and update are separate graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from onnxtrain.compat.onnxcustom.training.base_estimator import (
    BaseEstimator,
    noise_like,
    validation_interval,
)
from onnxtrain.compat.onnxcustom.training.gradient import penalty_gradient
from onnxtrain.compat.onnxcustom.training.ortgradient import OrtGradientForwardBackward
from onnxtrain.compat.onnxcustom.training.sgd_learning_loss import BaseLearningLoss
from onnxtrain.compat.onnxcustom.training.sgd_learning_penalty import BaseLearningPenalty
from onnxtrain.compat.onnxcustom.utils.onnx_helper import float_initializers
from onnxtrain.compat.onnxcustom.utils.onnxruntime_helper import (
    device_to_providers,
    numpy_to_ort_value,
    runtime_device,
    to_numpy,
)
from onnxtrain.runtime import session as runtime


class OrtGradientForwardBackwardOptimizer(BaseEstimator):
    """Trains weights of a model of features.

    Args:
        model_onnx: gives predictions, ``[N, 1]`` or more columns.
        weights_to_train: names of initializers, in their order, which must be alphabetical (see
            ``onnx_rename_weights``); all floats unless given.
        loss_output_name: taken for old programs: the loss is not in the model.
        max_iter: number of epochs.
        training_optimizer_name: ``"SGDOptimizer"``.
        batch_size: rows of a step.
        learning_rate: a number, a name or a learning rate.
        device: ``"cpu"`` or ``"cuda"``.
        warm_start: go on from the last ``fit``, or from the model's weights; else from noise.
        verbose: above 0 prints the loss of every epoch.
        validation_every: epochs between two validations; below 1, a part of ``max_iter``.
        learning_loss: a name or a loss.
        enable_logging: log iterations and batches under the name ``onnxcustom``.
        weight_name: the name of the input for weights of rows, if there are any.
        learning_penalty: a name or a penalty.
        exc: whether a loss that is not finite is an error; else a warning ends the training.
    """

    def __init__(
        self,
        model_onnx: onnx.ModelProto,
        weights_to_train: Sequence[str] | None = None,
        loss_output_name: str = "loss",
        max_iter: int = 100,
        training_optimizer_name: str = "SGDOptimizer",
        batch_size: int = 10,
        learning_rate: Any = "SGD",
        device: Any = "cpu",
        warm_start: bool = False,
        verbose: int = 0,
        validation_every: float = 0.1,
        learning_loss: Any = "square_error",
        enable_logging: bool = False,
        weight_name: str | None = None,
        learning_penalty: Any = None,
        exc: bool = True,
    ) -> None:
        super().__init__(model_onnx, learning_rate, device)
        if weights_to_train is None:
            weights_to_train = float_initializers(model_onnx)
        self.weights_to_train = weights_to_train
        self.loss_output_name = loss_output_name
        self.training_optimizer_name = training_optimizer_name
        self.max_iter, self.batch_size = max_iter, batch_size
        self.warm_start, self.verbose = warm_start, verbose
        self.validation_every = validation_interval(validation_every, max_iter)
        self.learning_loss = BaseLearningLoss.select(learning_loss)
        self.learning_penalty = BaseLearningPenalty.select(learning_penalty)
        self.enable_logging, self.weight_name, self.exc = enable_logging, weight_name, exc
        self._velocity: dict[str, np.ndarray | None] = {}
        self._gradients: dict[str, np.ndarray] = {}
        self.build_onnx_function()

    @property
    def needs_grad(self) -> bool:
        """Whether the learning rate keeps a velocity for each weight."""
        return self.learning_rate.needs_grad

    def build_onnx_function(self) -> None:
        """Build the graphs of loss, learning rate and penalty."""
        self.learning_loss.build_onnx_function(device=self.device, weight_name=self.weight_name)
        self.learning_rate.build_onnx_function(device=self.device)
        self.learning_penalty.build_onnx_function(
            device=self.device, n_tensors=len(self.weights_to_train)
        )
        self.penalty_onnx_ = penalty_gradient(
            self.learning_penalty, self.model_onnx, self.weights_to_train
        )
        self._penalty = None
        if self.penalty_onnx_ is not None:
            data = self.penalty_onnx_.SerializeToString()
            self._penalty = runtime.create(data, device=runtime_device(self.device), threads=1)

    def _start(self) -> None:
        """Create ``train_session_`` and ``train_function_``."""
        if hasattr(self, "train_session_"):
            return
        self.train_session_ = OrtGradientForwardBackward(
            self.model_onnx, self.weights_to_train, providers=device_to_providers(self.device)
        )
        self.train_function_ = self.train_session_.new_instance()
        self.input_names_ = self.train_function_.input_names
        self.output_names_ = self.train_function_.output_names

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, X_val: Any = None, y_val: Any = None
    ) -> OrtGradientForwardBackwardOptimizer:
        """Train.

        Raises:
            ValueError: if names of weights are not in alphabetical order.
        """
        self._check_optimizer()
        self._start()
        if self._values is None or not self.warm_start:
            names = self.weights_to_train
            initial = {n: self.train_session_.get_initializer(n) for n in names}
            self._values = {n: a for n, a in initial.items() if a is not None}
            self._velocity = {}
        if not self.warm_start:
            self._values = noise_like(self._values)
        self._fit(X, y, sample_weight, X_val, y_val)
        return self

    def _predict(self, X: np.ndarray, *, training: bool) -> Any:
        values = self._trained()
        state = [values[n] for n in self.weights_to_train]
        self._start()
        return self.train_function_.forward([X, *state], training=training)[0]

    def _batch(self, X: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None) -> float:
        predicted = self._predict(X, training=True)
        loss, prediction_gradient = self.learning_loss.loss_gradient(
            self.device, y, predicted, weight
        )
        total, values = float(to_numpy(loss).reshape(-1)[0]), self._trained()
        penalties: list[np.ndarray] = []
        if self._penalty is not None:
            extra, *penalties = runtime.run(self._penalty, None, dict(values))
            # The update divides by the number of rows; a penalty does not depend on it.
            total += float(extra) * len(X)
        if not np.isfinite(total):
            self.train_function_.states_.pop()
            return total
        computed = self.train_function_.backward([prediction_gradient])
        first = len(computed) - len(self.weights_to_train)
        gradients = {n: to_numpy(computed[first + i]) for i, n in enumerate(self.weights_to_train)}
        for name, penalty in zip(gradients if penalties else (), penalties, strict=True):
            gradients[name] = gradients[name] + len(X) * penalty
        self._gradients = gradients
        for name, g in gradients.items():
            new, self._velocity[name] = self.learning_rate.update_weights(
                values[name], g, len(X), self._velocity.get(name)
            )
            values = {**values, name: new}
        self._values = values
        return total

    def _evaluate(self, X: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None) -> float:
        return float(np.sum(self._scores(X, y, weight)))

    def _scores(self, X: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
        self._trained()
        predicted = self._predict(X, training=False)
        scores = self.learning_loss.loss_scores(self.device, y, predicted, weight)
        return to_numpy(scores)

    def losses(self, X: Any, y: Any, sample_weight: Any = None) -> np.ndarray:
        """Return the loss of each row."""
        return self._scores(X, np.asarray(y), sample_weight).sum(axis=1)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the negative mean loss: higher is better."""
        return -float(np.mean(self.losses(X, y, sample_weight)))

    @property
    def trained_coef_(self) -> dict[str, Any]:
        """Trained weights by name, as C++ OrtValues."""
        return dict(zip(self.weights_to_train, self.get_state(), strict=True))

    def get_full_state(self, kind: Any = "weight") -> Any:
        """Return values for features (``None``) and weights; a list of kinds gives a list."""
        if isinstance(kind, list | tuple):
            return [self.get_full_state(k) for k in kind]
        self._start()
        free = len(self.input_names_) - len(self.weights_to_train)
        return [*[None] * free, *self.get_state(kind)]

    def get_state(self, kind: str = "weight") -> list[Any]:
        """Return the weights, or the gradients of the last batch, as C++ OrtValues in order."""
        values: dict[str, Any] = self._trained()
        if kind == "grad":
            values = self._velocity if self.needs_grad else self._gradients
        elif kind != "weight":
            raise ValueError(f"unknown kind: {kind!r} (expected one of weight, grad)")
        return [numpy_to_ort_value(values[n], self.device) for n in self.weights_to_train]

    def set_state(
        self, state: Any, check_trained: bool = True, kind: str = "weight", zero: bool = False
    ) -> None:
        """Set weights, or velocities with ``kind="grad"``, by name or in order; or all to zero."""
        if check_trained:
            self._trained()
        names = self.weights_to_train
        if not isinstance(state, dict):  # a full state begins with features
            state = dict(zip(names, list(state)[-len(names) :], strict=True))
        arrays = {n: np.array(to_numpy(state[n])) for n in names}
        if zero:
            arrays = {n: np.zeros_like(a) for n, a in arrays.items()}
        if kind == "grad":
            self._velocity = dict(arrays)
        else:
            self._values = arrays

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "velocity": self._velocity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._velocity = state["velocity"]
