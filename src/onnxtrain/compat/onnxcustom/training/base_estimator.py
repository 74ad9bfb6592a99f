"""The base class of the two optimizers: parameters, pickling, training loop."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from onnxtrain.compat.onnxcustom.training.data_loader import OrtDataLoader
from onnxtrain.compat.onnxcustom.training.excs import (
    ConvergenceError,
    ConvergenceWarning,
    EvaluationError,
)
from onnxtrain.compat.onnxcustom.training.sgd_learning_rate import BaseLearningRate
from onnxtrain.compat.onnxcustom.utils.onnx_helper import (
    replace_initializers_into_onnx,
    save_onnx_graph,
)
from onnxtrain.compat.onnxcustom.utils.onnxruntime_helper import (
    get_ort_device,
    ort_device_to_string,
    runtime_device,
)

LOGGER = logging.getLogger("onnxcustom")
"""The name that programs configure."""


class BaseEstimator:
    """Settings as scikit-learn has them, pickling, and the loop over epochs.

    Args:
        model_onnx: the model to train.
        learning_rate: a name, a number or a learning rate.
        device: ``"cpu"`` or ``"cuda"``.
    """

    weights_to_train: Sequence[str]
    training_optimizer_name: str
    max_iter: int
    batch_size: int
    warm_start: bool
    verbose: int
    validation_every: int
    exc: bool = True
    enable_logging: bool = False

    def __init__(self, model_onnx: onnx.ModelProto, learning_rate: Any, device: Any) -> None:
        self.model_onnx = model_onnx
        self.learning_rate = BaseLearningRate.select(learning_rate)
        self.device = get_ort_device(device)
        runtime_device(device)

    def __sklearn_tags__(self) -> Any:
        """Return scikit-learn's description of an estimator: nothing special."""
        from sklearn.base import BaseEstimator as SklearnEstimator

        return SklearnEstimator().__sklearn_tags__()

    @classmethod
    def _names(cls) -> list[str]:
        return [n for n in inspect.signature(cls.__init__).parameters if n != "self"]

    def get_params(self, deep: bool = False) -> dict[str, Any]:
        """Return the settings; names of losses and schedules have become objects."""
        del deep
        settings = {n: getattr(self, n) for n in self._names()}
        return {**settings, "device": ort_device_to_string(self.device)}

    def set_params(self, **params: Any) -> BaseEstimator:
        """Set settings and rebuild the graphs; trained weights stay."""
        wrong = [n for n in params if n not in self._names()]
        if wrong:
            raise ValueError(f"unknown setting: {', '.join(wrong)}")
        self._reset()
        self.__init__(**{**self.get_params(), **params})
        return self

    def _reset(self) -> None:
        """Drop what depends on settings and is built by ``fit``."""
        vars(self).pop("train_session_", None)

    def __repr__(self) -> str:
        settings = {n: v for n, v in self.get_params().items() if n != "model_onnx"}
        text = ", ".join(f"{n}={v!r}" for n, v in settings.items())
        return f"{type(self).__name__}(model_onnx=..., {text})"

    def __getstate__(self) -> dict[str, Any]:
        results = ("train_losses_", "validation_losses_")
        kept = {n: getattr(self, n) for n in results if hasattr(self, n)}
        given = {**self.get_params(), "model_onnx": self.model_onnx.SerializeToString()}
        return {"given": given, "results": kept, "values": self._values}

    def __setstate__(self, state: dict[str, Any]) -> None:
        given = dict(state["given"])
        given["model_onnx"] = onnx.load_from_string(given["model_onnx"])
        self.__init__(**given)
        vars(self).update(state["results"])
        self._values = state["values"]

    def save_onnx_graph(
        self, folder: Any, prefix: str | None = None, suffix: str | None = None
    ) -> dict[str, Any]:
        """Write every graph of this estimator and its parts."""
        return save_onnx_graph(self, folder, prefix, suffix)

    def get_trained_onnx(self, model: onnx.ModelProto | None = None) -> onnx.ModelProto:
        """Return the model, or another one with the same weights, as trained."""
        return replace_initializers_into_onnx(model or self.model_onnx, self._trained())

    _values: dict[str, np.ndarray] | None = None
    """Trained weights by name; ``None`` before the first ``fit``."""

    def _trained(self) -> dict[str, np.ndarray]:
        if self._values is None:
            raise AttributeError("nothing is trained yet\nhint: call fit first")
        return self._values

    def _loader(self, X: Any, y: Any, weight: Any, *, size: int, random: bool) -> OrtDataLoader:
        return OrtDataLoader(X, y, weight, batch_size=size, device=self.device, random_iter=random)

    def _log(self, level: int, text: str, *arguments: Any) -> None:
        """Log under the name of this class, if the program asked for it."""
        if self.enable_logging:
            LOGGER.log(level, f"[%s.{text}", type(self).__name__, *arguments)

    def _check_optimizer(self) -> None:
        if self.training_optimizer_name != "SGDOptimizer":
            raise NotImplementedError(
                f"unknown optimizer: {self.training_optimizer_name!r} (expected SGDOptimizer)\n"
                "hint: onnxtrain.sklearn has other optimizers"
            )

    def _fit(self, X: Any, y: Any, weight: Any, X_val: Any, y_val: Any) -> None:
        """Run the epochs."""
        data = self._loader(X, y, weight, size=self.batch_size, random=True)
        held = None
        if X_val is not None:
            held = self._loader(X_val, y_val, None, size=len(X_val), random=False)
        self._log(logging.INFO, "fit] weights_to_train=%r", self.weights_to_train)
        self._log(logging.INFO, "fit] device=%s", ort_device_to_string(self.device))
        self._log(logging.INFO, "fit] warm_start=%r", self.warm_start)
        self.train_losses_: list[float] = []
        self.validation_losses_: list[float] | None = None if held is None else []
        self.learning_rate.init_learning_rate()
        for i in range(self.max_iter):
            self._log(logging.DEBUG, "_iteration] begin learning_rate=%r", self.learning_rate)
            losses = []
            for number, batch in enumerate(data.iter_numpy()):
                loss = self._batch(*batch)
                self._log(logging.DEBUG, "_iteration] batch %d loss=%g", number, loss)
                if not np.isfinite(loss):
                    self._diverged(losses)
                    self.train_losses_.append(np.nan)
                    return
                losses.append(loss / len(batch[0]))
            self.train_losses_.append(float(np.mean(losses)))
            self.learning_rate.update_learning_rate(i)
            self._log(logging.INFO, "fit] lr value=%r", self.learning_rate.value)
            if self.verbose > 0:
                print(f"{i + 1}/{self.max_iter} loss: {self.train_losses_[-1]:.6g}")
            if self.validation_losses_ is not None and (i + 1) % self.validation_every == 0:
                self.validation_losses_.append(self._validate(held))
        self._log(logging.INFO, "fit] end loss=%r", self.train_losses_[-1:])

    def _diverged(self, past: list[float]) -> None:
        text = (
            f"the loss is NaN or infinite in iteration {len(self.train_losses_)}, after {past[-5:]}"
            f"; {self.learning_rate!r}\nhint: lower the learning rate"
        )
        if self.exc:
            raise ConvergenceError(text)
        warnings.warn(text, ConvergenceWarning, stacklevel=4)

    def _validate(self, data: Any) -> float:
        total = sum(self._evaluate(*batch) for batch in data.iter_numpy())
        if not np.isfinite(total):
            raise EvaluationError(f"the validation loss is {total}\nhint: lower the learning rate")
        return float(total / len(data))

    def _batch(self, X: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None) -> float:
        """Train on one batch, unless its loss is not finite; return the sum of its losses."""
        raise NotImplementedError

    def _evaluate(self, X: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None) -> float:
        """Return the sum of the losses of one batch."""
        raise NotImplementedError


def noise_like(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return normal random numbers of the same shapes and types."""
    return {
        n: np.asarray(np.random.randn(*a.shape)).astype(a.dtype).reshape(a.shape)
        for n, a in weights.items()
    }


def validation_interval(validation_every: float, max_iter: int) -> int:
    """Return how many iterations are between two validations; a fraction is one of ``max_iter``."""
    if validation_every < 1:
        return max(int(max_iter * validation_every), 1)
    return int(validation_every)
