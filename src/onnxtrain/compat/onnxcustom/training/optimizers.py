"""SGD on a model that computes its loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from onnxtrain.autodiff.gradients import vjp
from onnxtrain.compat.onnxcustom.training.base_estimator import (
    BaseEstimator,
    check_optimizer_name,
    validation_interval,
)
from onnxtrain.compat.onnxcustom.utils.onnx_helper import float_initializers
from onnxtrain.compat.onnxcustom.utils.onnxruntime_helper import create_session, runtime_device
from onnxtrain.compat.onnxcustom.utils.orttraining_helper import LOSS_PREFIX
from onnxtrain.runtime import session as runtime


class OrtGradientOptimizer(BaseEstimator):
    """Trains weights of a model with a loss among its outputs, see ``add_loss_output``.

    Args:
        model_onnx: takes features, labels and, if it has them, weights of rows.
        weights_to_train: names of initializers, in any order; all floats unless given.
        loss_output_name: the output to minimise.
        max_iter: number of epochs.
        training_optimizer_name: ``"SGDOptimizer"``.
        batch_size: rows of a step.
        learning_rate: a number, a name or a learning rate without momentum.
        device: ``"cpu"`` or ``"cuda"``.
        warm_start: go on from the model's weights; else they start as noise.
        verbose: above 0 prints the loss of every epoch.
        validation_every: epochs between two validations; below 1, a part of ``max_iter``.
        saved_gradient: a file for the gradient graph.
        sample_weight_name: the input that takes weights of rows.
    """

    def __init__(
        self,
        model_onnx: onnx.ModelProto,
        weights_to_train: Sequence[str] | None,
        loss_output_name: str = "loss",
        max_iter: int = 100,
        training_optimizer_name: str = "SGDOptimizer",
        batch_size: int = 10,
        learning_rate: Any = "SGD",
        device: Any = "cpu",
        warm_start: bool = False,
        verbose: int = 0,
        validation_every: float = 0.1,
        saved_gradient: Any = None,
        sample_weight_name: str = "weight",
    ) -> None:
        self._keep(locals())
        super().__init__(model_onnx, learning_rate, device)
        check_optimizer_name(training_optimizer_name)
        if self.learning_rate.needs_grad:
            raise NotImplementedError(
                "momentum is not supported here\nhint: use OrtGradientForwardBackwardOptimizer"
            )
        floats = [n for n in float_initializers(model_onnx) if not n.startswith(LOSS_PREFIX)]
        self.weights_to_train = floats if weights_to_train is None else list(weights_to_train)
        self.loss_output_name = loss_output_name
        self.training_optimizer_name = training_optimizer_name
        self.max_iter, self.batch_size = max_iter, batch_size
        self.warm_start, self.verbose = warm_start, verbose
        self.validation_every = validation_interval(validation_every, max_iter)
        self.saved_gradient, self.sample_weight_name = saved_gradient, sample_weight_name
        self._build()

    def _build(self) -> None:
        self.gradient_onnx_ = vjp(self.model_onnx, self.weights_to_train, self.loss_output_name)
        if self.saved_gradient is not None:
            onnx.save(self.gradient_onnx_, self.saved_gradient)
        self.train_session_ = create_session(self.gradient_onnx_, runtime_device(self.device))
        self.learning_rate.build_onnx_function(device=self.device)
        initial = {t.name for t in self.model_onnx.graph.initializer}
        self.input_names_ = [x.name for x in self.model_onnx.graph.input if x.name not in initial]
        own = len(list(self.model_onnx.graph.output))
        names = [y.name for y in self.gradient_onnx_.graph.output]
        self._results = [self.loss_output_name, *names[own:]]
        self._cotangent = self.gradient_onnx_.graph.input[-1].name
        shape = next(y for y in self.gradient_onnx_.graph.output if y.name == self._results[0])
        dims = shape.type.tensor_type.shape.dim
        self._seed = np.ones([d.dim_value or 1 for d in dims], np.float32)

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        X_val: Any = None,
        y_val: Any = None,
        use_numpy: bool = False,
    ) -> OrtGradientOptimizer:
        """Train; ``use_numpy`` is accepted for compatibility."""
        del use_numpy
        if sample_weight is None and self.sample_weight_name in self.input_names_:
            sample_weight = np.ones(len(X), np.float32)
        self._fit(X, y, sample_weight, X_val, y_val)
        return self

    def _feeds(self, batch: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        kinds = {x.name: x for x in self.train_session_.get_inputs()}
        feeds = {}
        for name, array in zip(self.input_names_, batch, strict=False):
            rank = len(kinds[name].shape)
            array = array.reshape(-1) if rank == 1 else array
            kind = np.int64 if kinds[name].type == "tensor(int64)" else np.float32
            feeds[name] = np.ascontiguousarray(array, dtype=kind)
        for name in self.input_names_[len(feeds) :]:
            feeds[name] = np.ones(len(batch[0]), np.float32)
        return {**feeds, **self._values, self._cotangent: self._seed}

    def _batch(self, X: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None) -> float:
        batch = [a for a in (X, y, weight) if a is not None]
        loss, *gradients = runtime.run(self.train_session_, self._results, self._feeds(batch))
        for name, gradient in zip(self.weights_to_train, gradients, strict=True):
            new, _ = self.learning_rate.update_weights(self._values[name], gradient, len(X), None)
            self._values = {**self._values, name: new}
        return float(loss.reshape(-1)[0])

    def _evaluate(self, X: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None) -> float:
        batch = [a for a in (X, y, weight) if a is not None]
        (loss,) = runtime.run(self.train_session_, self._results[:1], self._feeds(batch))
        return float(loss.reshape(-1)[0])

    def get_state(self) -> dict[str, np.ndarray]:
        """Return the trained weights by name."""
        return self.trained_coef_

    def set_state(self, state_dict: dict[str, np.ndarray]) -> None:
        """Set weights by name."""
        values = dict(getattr(self, "_values", None) or self._initial())
        strange = [n for n in state_dict if n not in values]
        if strange:
            raise ValueError(f"unknown weights: {', '.join(strange)}")
        self._values = {n: np.array(state_dict.get(n, a)) for n, a in values.items()}
