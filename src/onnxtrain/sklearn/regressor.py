"""``OnnxRegressor``: train an ONNX graph for regression."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import MultiOutputMixin, RegressorMixin

from onnxtrain.errors import PrepareError
from onnxtrain.sklearn.epochs import regression_loss
from onnxtrain.sklearn.estimator import OnnxEstimator


class OnnxRegressor(MultiOutputMixin, RegressorMixin, OnnxEstimator):
    """Train a linear model, a multi-layer perceptron or any ONNX graph for regression.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; a fitted scikit-learn estimator or
            pipeline, whose last step is trained; ``None`` builds a multi-layer perceptron.
        hidden_layer_sizes: hidden layers of that perceptron; none for a linear model.
        activation: its activation: ``"relu"``, ``"tanh"``, ``"logistic"`` or ``"identity"``.
        loss: ``"squared_error"`` (half the mean square, as in scikit-learn), ``"absolute_error"``,
            ``"huber"``, a name or object of ``onnxtrain.losses``, or a function
            ``(op, prediction, target)`` that returns one value per element.
        optimizer: a name or an object of ``onnxtrain.optim``; ``learning_rate`` replaces its own.
        learning_rate: base learning rate, before the schedule.
        schedule: a name or object of ``onnxtrain.optim.schedules``; each batch is one step.
        batch_size: rows per step.
        max_iter: maximum number of epochs.
        shuffle: shuffle the rows in each epoch.
        penalty: ``"l1"``, ``"l2"``, ``"elasticnet"`` or ``None``; added to the loss.
        alpha: factor of the penalty.
        l1_ratio: share of l1 in ``"elasticnet"``.
        tol: minimum improvement of the loss, or of the validation score with ``early_stopping``;
            ``None`` trains for exactly ``max_iter`` epochs.
        n_iter_no_change: stop after this many epochs without improvement.
        early_stopping: hold out validation rows and restore the parameters with the best score.
        validation_fraction: fraction of the rows to hold out.
        warm_start: continue from the previous ``fit``.
        train: names or globs of the parameters to train; all by default.
        freeze: names or globs of the parameters to freeze.
        output: the output to train on; by default the first float output.
        random_state: random seed for initialization, shuffling and dropout.
        threads: threads of onnxruntime; ``None`` uses one for small nets and all cores for others.
        device: as in :class:`~onnxtrain.Trainer`.
        verbose: print the loss of every epoch.

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
        """Train, from scratch unless ``warm_start``."""
        self._check_settings()
        resume = self.warm_start and self.__sklearn_is_fitted__()
        X, y = self._check(X, y, reset=not resume, multi_output=True, y_numeric=True)
        if not resume:
            self._begin(X, y)
        weight = self._weights_of(sample_weight, X, normalize=True)
        self._train(X, self._targets(y), weight, int(self.max_iter), stopping=True)
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> OnnxRegressor:
        """Train for one epoch on these rows, from the current parameters."""
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
                f"y has {columns} column(s), the model's output has {self._net.columns}\n"
                "hint: select another output with output=..."
            )
        return y

    def _loss(self) -> Any:
        return regression_loss(self.loss)
