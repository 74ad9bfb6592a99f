"""SGD on a model that computes its loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.compat.onnxcustom.training.base_estimator import (
    BaseEstimator,
    noise_like,
    validation_interval,
)
from onnxtrain.compat.onnxcustom.utils.onnx_helper import float_initializers
from onnxtrain.compat.onnxcustom.utils.onnxruntime_helper import device_to_providers
from onnxtrain.compat.onnxcustom.utils.orttraining_helper import LOSS_PREFIX
from onnxtrain.compat.ort.training_session import TrainingParameters, TrainingSession


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
        warm_start: go on from the last ``fit``, or from the model's weights; else from noise.
        verbose: above 0 prints the loss of every epoch.
        validation_every: epochs between two validations; below 1, a part of ``max_iter``.
        saved_gradient: a file for the gradient graph; the graph of a whole step goes to
            ``<saved_gradient>.training.onnx``.
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
        super().__init__(model_onnx, learning_rate, device)
        if self.learning_rate.needs_grad:
            raise NotImplementedError(
                "momentum is not supported here\nhint: use OrtGradientForwardBackwardOptimizer"
            )
        if weights_to_train is None:
            known = float_initializers(model_onnx)
            weights_to_train = [n for n in known if not n.startswith(LOSS_PREFIX)]
        self.weights_to_train = weights_to_train
        self.loss_output_name = loss_output_name
        self.training_optimizer_name = training_optimizer_name
        self.max_iter, self.batch_size = max_iter, batch_size
        self.warm_start, self.verbose = warm_start, verbose
        self.validation_every = validation_interval(validation_every, max_iter)
        self.saved_gradient, self.sample_weight_name = saved_gradient, sample_weight_name

    def _start(self) -> TrainingSession:
        """Create the session ``train_session_``."""
        parameters = TrainingParameters()
        parameters.loss_output_name = self.loss_output_name
        parameters.training_optimizer_name = self.training_optimizer_name
        parameters.weights_to_train = set(self.weights_to_train)
        if self.saved_gradient is not None:
            parameters.model_with_gradient_graph_path = str(self.saved_gradient)
            parameters.model_with_training_graph_path = f"{self.saved_gradient}.training.onnx"
        session = self.train_session_ = TrainingSession(
            self.model_onnx.SerializeToString(),
            parameters,
            providers=device_to_providers(self.device),
        )
        *inputs, self._rate = (x.name for x in session.get_inputs())
        self.input_names_ = [*inputs, self._rate]
        self.output_names_ = [y.name for y in session.get_outputs()]
        self._inputs = session.get_inputs()[:-1]
        return session

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
        self._check_optimizer()
        initial = {tensor.name for tensor in self.model_onnx.graph.initializer}
        inputs = [x.name for x in self.model_onnx.graph.input if x.name not in initial]
        if len(inputs) != (2 if sample_weight is None else 3):
            raise RuntimeError(
                f"the model has the inputs {', '.join(inputs)}\n"
                "hint: pass sample_weight if the third one takes weights of rows, else none"
            )
        session: TrainingSession = getattr(self, "train_session_", None) or self._start()
        if not self.warm_start:
            state = session.get_state()
            session.load_state(noise_like({n: state[n] for n in self.weights_to_train}))
        elif self._values is not None:
            session.load_state(self._values)
        try:
            self._fit(X, y, sample_weight, X_val, y_val)
        finally:
            self._values = session.get_state()
        return self

    def _run(self, batch: Sequence[np.ndarray | None], rate: float) -> float:
        rows = len(batch[0]) if batch[0] is not None else 0
        feeds = {}
        for x, given in zip(self._inputs, (*batch, None), strict=False):
            array = np.ones(rows, np.float32) if given is None else given
            array = array.reshape(-1) if len(x.shape) == 1 else array
            kind = ir.DataType[x.type.removeprefix("tensor(").removesuffix(")").upper()]
            feeds[x.name] = np.ascontiguousarray(array, dtype=kind.numpy())
        feeds[self._rate] = np.array([rate], np.float32)
        (loss,) = self.train_session_.run([self.loss_output_name], feeds)
        return float(loss.reshape(-1)[0])

    def _batch(self, X: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None) -> float:
        return self._run((X, y, weight), self.learning_rate.value / len(X))

    def _evaluate(self, X: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None) -> float:
        return self._run((X, y, weight), 0.0)

    @property
    def trained_coef_(self) -> dict[str, np.ndarray]:
        """Trained weights by name."""
        return self.get_state()

    def get_state(self) -> dict[str, np.ndarray]:
        """Return the trained weights by name."""
        return {n: np.array(a) for n, a in self._trained().items()}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Set weights by name; ``fit`` continues from them with ``warm_start``."""
        known = self._trained()
        unknown = [n for n in state if n not in known]
        if unknown:
            raise ValueError(f"unknown weights: {', '.join(unknown)}")
        self._values = {n: np.array(state.get(n, a)) for n, a in known.items()}
