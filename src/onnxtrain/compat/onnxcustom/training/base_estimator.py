"""The base class of the two optimizers: parameters, pickling, training loop."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.compat.onnxcustom.training.data_loader import OrtDataLoader
from onnxtrain.compat.onnxcustom.training.errors import (
    ConvergenceError,
    ConvergenceWarning,
    EvaluationError,
)
from onnxtrain.compat.onnxcustom.training.sgd_learning_rate import BaseLearningRate
from onnxtrain.compat.onnxcustom.utils.onnx_helper import replace_initializers, save_onnx_graph
from onnxtrain.compat.onnxcustom.utils.onnxruntime_helper import get_ort_device, runtime_device


class BaseEstimator:
    """Settings as scikit-learn has them, pickling, and the loop over epochs.

    Args:
        model_onnx: the model to train.
        learning_rate: a name, a number or a learning rate.
        device: ``"cpu"`` or ``"cuda"``.
    """

    weights_to_train: list[str]
    max_iter: int
    batch_size: int
    warm_start: bool
    verbose: int
    validation_every: int
    exc: bool = True

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
        """Return the constructor arguments."""
        del deep
        return dict(self._given)

    def set_params(self, **params: Any) -> BaseEstimator:
        """Set constructor arguments and rebuild the graphs."""
        wrong = [n for n in params if n not in self._names()]
        if wrong:
            raise ValueError(f"unknown setting: {', '.join(wrong)}")
        self.__init__(**{**self._given, **params})
        return self

    def _keep(self, settings: dict[str, Any]) -> None:
        self._given = {n: settings[n] for n in self._names()}

    def __repr__(self) -> str:
        skip = ("model_onnx",)
        settings = ", ".join(f"{k}={v!r}" for k, v in self._given.items() if k not in skip)
        return f"{type(self).__name__}(model_onnx=..., {settings})"

    def __getstate__(self) -> dict[str, Any]:
        results = ("train_losses_", "validation_losses_")
        kept = {n: getattr(self, n) for n in results if hasattr(self, n)}
        state = getattr(self, "_values", None)
        given = {**self._given, "model_onnx": self.model_onnx.SerializeToString()}
        return {"given": given, "results": kept, "values": state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        given = dict(state["given"])
        given["model_onnx"] = onnx.load_from_string(given["model_onnx"])
        self.__init__(**given)
        vars(self).update(state["results"])
        if state["values"] is not None:
            self._values = state["values"]

    def save_onnx_graph(
        self, folder: Any, prefix: str | None = None, suffix: str | None = None
    ) -> dict[str, Any]:
        """Write every graph of this estimator and its parts."""
        return save_onnx_graph(self, folder, prefix, suffix)

    def get_trained_onnx(self, model: onnx.ModelProto | None = None) -> onnx.ModelProto:
        """Return the model, or another one with the same weights, as trained."""
        return replace_initializers(model or self.model_onnx, self._trained())

    @property
    def trained_coef_(self) -> dict[str, np.ndarray]:
        """Trained weights by name."""
        return {n: np.array(a) for n, a in self._trained().items()}

    def _trained(self) -> dict[str, np.ndarray]:
        if not hasattr(self, "_values"):
            raise AttributeError("nothing is trained yet\nhint: call fit first")
        return self._values

    def _initial(self) -> dict[str, np.ndarray]:
        """Return the weights to start from: those of the model, or noise unless ``warm_start``."""
        if self.warm_start and hasattr(self, "_values"):
            return self._values
        weights = {}
        for tensor in self.model_onnx.graph.initializer:
            if tensor.name in self.weights_to_train:
                array = np.array(ir.from_proto(tensor).numpy())
                if not self.warm_start:
                    array = np.random.randn(*array.shape).astype(array.dtype)
                weights[tensor.name] = array
        return {n: weights[n] for n in self.weights_to_train}

    def _loader(self, X: Any, y: Any, weight: Any, *, random_iter: bool) -> OrtDataLoader:
        return OrtDataLoader(
            X, y, weight, batch_size=self.batch_size, device=self.device, random_iter=random_iter
        )

    def _fit(self, X: Any, y: Any, weight: Any, X_val: Any, y_val: Any) -> None:
        """Run the epochs."""
        self._values = self._initial()
        data = self._loader(X, y, weight, random_iter=True)
        held = None
        if X_val is not None:
            held = self._loader(X_val, y_val, None, random_iter=False)
        every = self.validation_every
        self.train_losses_: list[float] = []
        self.validation_losses_: list[float] = []
        self.learning_rate.init_learning_rate()
        for i in range(self.max_iter):
            losses = [self._batch(*batch) / len(batch[0]) for batch in data.iter_numpy()]
            loss = float(np.mean(losses))
            if not np.isfinite(loss):
                self._diverged(i, loss)
                break
            self.train_losses_.append(loss)
            self.learning_rate.update_learning_rate(i)
            if self.verbose > 0:
                print(f"{i + 1}/{self.max_iter} loss: {loss:.6g}")
            if held is not None and (i + 1) % every == 0:
                self.validation_losses_.append(self._validate(held))

    def _diverged(self, i: int, loss: float) -> None:
        text = f"the loss is {loss} at iteration {i}\nhint: lower the learning rate"
        if self.exc:
            raise ConvergenceError(text)
        warnings.warn(text, ConvergenceWarning, stacklevel=4)

    def _validate(self, data: OrtDataLoader) -> float:
        total = sum(self._evaluate(*batch) for batch in data.iter_numpy())
        if not np.isfinite(total):
            raise EvaluationError(f"the validation loss is {total}\nhint: lower the learning rate")
        return float(total / len(data))

    def _batch(self, X: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None) -> float:
        """Train on one batch; return the sum of its losses."""
        raise NotImplementedError

    def _evaluate(self, X: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None) -> float:
        """Return the sum of the losses of one batch."""
        raise NotImplementedError


def validation_interval(validation_every: float, max_iter: int) -> int:
    """Return how many iterations are between two validations; a fraction is one of ``max_iter``."""
    if validation_every < 1:
        return max(int(max_iter * validation_every), 1)
    return int(validation_every)


def check_optimizer_name(name: str) -> None:
    """Raise for any optimizer other than SGD."""
    if name != "SGDOptimizer":
        raise NotImplementedError(
            f"unknown optimizer: {name!r} (expected SGDOptimizer)\n"
            "hint: onnxtrain.sklearn has other optimizers"
        )
