"""A regressor that trains an ONNX graph."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import MultiOutputMixin, RegressorMixin

from onnxtrain.errors import PrepareError
from onnxtrain.sklearn.epochs import regression_loss
from onnxtrain.sklearn.estimator import OnnxEstimator


class OnnxRegressor(MultiOutputMixin, RegressorMixin, OnnxEstimator):
    """Fits a linear net, a multi-layer perceptron or any ONNX graph to numbers.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; a fitted scikit-learn estimator or
            pipeline, whose last step is trained; ``None`` builds a net from the data.
        hidden_layer_sizes: of that net; none for a linear model.
        activation: of that net: ``"relu"``, ``"tanh"``, ``"logistic"`` or ``"identity"``.
        loss: ``"squared_error"`` (half the mean square, as scikit-learn), ``"absolute_error"``,
            ``"huber"``, a name or object of ``onnxtrain.losses``, or a function
            ``(op, prediction, target)`` that gives one number per element.
        optimizer: a name or an object of ``onnxtrain.optim``; ``learning_rate`` replaces its own.
        learning_rate: of each step, before the schedule.
        schedule: a name or object of ``onnxtrain.optim.schedules``; steps are batches.
        batch_size: rows per step.
        max_iter: the largest number of epochs.
        shuffle: whether each epoch has an order of its own.
        penalty: ``"l1"``, ``"l2"``, ``"elasticnet"`` or ``None``, a part of the loss.
        alpha: the factor of the penalty.
        l1_ratio: the part of l1 in ``"elasticnet"``.
        tol: what counts as an improvement of the loss, or of the score if stopping early; ``None``
            trains for exactly ``max_iter`` epochs.
        n_iter_no_change: how many epochs without improvement end the training.
        early_stopping: hold rows out, and keep the parameters with the best score on them.
        validation_fraction: how many rows that are.
        warm_start: whether ``fit`` goes on from the last one.
        train: names or globs of the parameters to train; all unless given.
        freeze: names or globs of parameters to leave as they are.
        output: the output to train on; the first float output unless given.
        random_state: of first parameters, order of rows, dropout.
        threads: of onnxruntime; ``None`` takes one for small nets.
        device: ``"cpu"`` or ``"cuda"``.
        verbose: whether to print the loss of every epoch.

    Attributes:
        loss_curve_: mean loss of each epoch.
        n_iter_: number of epochs.
        parameters_: the trained parameters by name.

    >>> X = np.random.RandomState(0).rand(200, 3)
    >>> model = OnnxRegressor(learning_rate=0.1, max_iter=50, tol=None, random_state=0)
    >>> bool(model.fit(X, X @ [1, 2, 3] + 4).score(X, X @ [1, 2, 3] + 4) > 0.99)
    True
    """

    _classifies = False

    def __init__(
        self,
        model: Any = None,
        *,
        hidden_layer_sizes: tuple[int, ...] = (),
        activation: str = "relu",
        loss: Any = "squared_error",
        optimizer: Any = "adam",
        learning_rate: float = 1e-3,
        schedule: Any = None,
        batch_size: int = 64,
        max_iter: int = 200,
        shuffle: bool = True,
        penalty: str | None = None,
        alpha: float = 1e-4,
        l1_ratio: float = 0.15,
        tol: float | None = 1e-4,
        n_iter_no_change: int = 10,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        warm_start: bool = False,
        train: Any = None,
        freeze: Any = None,
        output: str | None = None,
        random_state: Any = None,
        threads: int | None = None,
        device: str = "cpu",
        verbose: bool = False,
    ) -> None:
        self.model = model
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.loss = loss
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.schedule = schedule
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.shuffle = shuffle
        self.penalty = penalty
        self.alpha = alpha
        self.l1_ratio = l1_ratio
        self.tol = tol
        self.n_iter_no_change = n_iter_no_change
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.warm_start = warm_start
        self.train = train
        self.freeze = freeze
        self.output = output
        self.random_state = random_state
        self.threads = threads
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> OnnxRegressor:
        """Train, from the start unless ``warm_start``; rows may have weights."""
        self._check_settings()
        going_on = self.warm_start and self.__sklearn_is_fitted__()
        X, y = self._check(X, y, reset=not going_on, multi_output=True, y_numeric=True)
        if not going_on:
            self._begin(X, y)
        weight = self._weights_of(sample_weight, X, normalize=True)
        self._train(X, self._targets(y), weight, int(self.max_iter), stopping=True)
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> OnnxRegressor:
        """Train for one epoch on these rows, going on from what there is."""
        self._check_settings()
        first = not self.__sklearn_is_fitted__()
        X, y = self._check(X, y, reset=first, multi_output=True, y_numeric=True)
        if first:
            self._begin(X, y)
        weight = self._weights_of(sample_weight, X, normalize=False)
        self._train(X, self._targets(y), weight, 1, stopping=False)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return predictions, ``[rows]`` or ``[rows, targets]`` as ``y`` was."""
        X = self._ready(X)
        predictions = self._run(X)
        if getattr(X, "dtype", None) == np.float64:
            predictions = predictions.astype(np.float64)
        return predictions.reshape(len(predictions)) if self._flat else predictions

    def _begin(self, X: Any, y: np.ndarray) -> None:
        self._flat = y.ndim == 1
        self._start(X, 1 if y.ndim == 1 else y.shape[1])

    def _targets(self, y: np.ndarray) -> np.ndarray:
        columns = 1 if y.ndim == 1 else y.shape[1]
        if columns != self._net.columns:
            raise PrepareError(
                f"y has {columns} column(s), the model's output {self._net.columns}\n"
                "hint: another `output`, or another model"
            )
        return y

    def _loss(self) -> Any:
        return regression_loss(self.loss)
