"""The base of regressor and classifier: input validation, training loop, early stopping, state."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from sklearn.base import BaseEstimator, clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    _check_feature_names,
    _check_n_features,
    _check_sample_weight,
    check_is_fitted,
    validate_data,
)

from onnxtrain.errors import PrepareError, expected_one_of
from onnxtrain.optim import OPTIMIZERS, Optimizer
from onnxtrain.optim import resolve as resolve_optimizer
from onnxtrain.runtime import devices
from onnxtrain.sklearn.epochs import Epochs
from onnxtrain.sklearn.nets import Net, cached, convert, dense_net, dense_weights, split_model

_SEEDS = 1 << 24
_NO_Y = object()


class OnnxEstimator(BaseEstimator):
    """Base of :class:`OnnxRegressor` and :class:`OnnxClassifier`: train a graph in mini-batches."""

    # Sessions are in the cache of nets.py: all attributes here can be pickled.
    _net: Net
    _values: dict[str, np.ndarray]
    _state: dict[str, np.ndarray]
    _random: np.random.RandomState
    _seed: float
    _classifies: bool
    t_: int
    n_iter_: int
    loss_curve_: list[float]
    best_loss_: float
    # Hyperparameters. Each estimator repeats them in its constructor: scikit-learn inspects it.
    model: Any
    hidden_layer_sizes: Any
    activation: str
    loss: Any
    optimizer: Any
    learning_rate: float
    schedule: Any
    batch_size: int
    max_iter: int
    shuffle: bool
    penalty: str | None
    alpha: float
    l1_ratio: float
    tol: float | None
    n_iter_no_change: int
    early_stopping: bool
    validation_fraction: float
    warm_start: bool
    train: Any
    freeze: Any
    output: str | None
    random_state: Any
    threads: int | None
    device: str
    verbose: bool

    def _loss(self) -> Any:
        raise NotImplementedError

    def score(self, *data: Any, **options: Any) -> float:
        """Return R^2 or the accuracy of predictions."""
        raise NotImplementedError

    def __sklearn_clone__(self) -> Any:
        """Return an unfitted copy that shares ``model``: cloning would unfit a fitted pipeline."""
        settings = self.get_params(deep=False)
        model = settings.pop("model")
        kind: Any = type(self)
        return kind(model, **{k: clone(v, safe=False) for k, v in settings.items()})

    def _is_table(self, X: Any) -> bool:
        """Return whether X is a data frame whose columns are inputs of the model."""
        return self.model is not None and hasattr(X, "columns")

    def _check(self, X: Any, y: Any = _NO_Y, *, reset: bool, **options: Any) -> Any:
        if self._is_table(X):
            _check_feature_names(self, X, reset=reset)
            _check_n_features(self, X, reset=reset)
            return X if y is _NO_Y else (X, np.asarray(y))
        options.update(dtype=[np.float32, np.float64], order="C", accept_large_sparse=False)
        if self.model is not None:
            options["allow_nd"] = True
        if y is _NO_Y:
            return validate_data(self, X, reset=reset, **options)
        if y is None:
            raise ValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is None"
            )
        return validate_data(self, X, y, reset=reset, **options)

    def _feeds(self, X: Any, inputs: Sequence[tuple[str, str]]) -> dict[str, np.ndarray]:
        if len(inputs) == 1:
            (name, kind) = inputs[0]
            array = np.asarray(X)
            if kind.startswith("float") and array.dtype.name != kind:
                with np.errstate(over="ignore"):
                    array = array.astype(kind)
                if not np.isfinite(array).all():
                    raise ValueError(f"Input X contains infinity or a value too large for {kind}.")
            return {name: np.ascontiguousarray(array.astype(kind, copy=False))}
        if not hasattr(X, "columns"):
            raise PrepareError(
                f"the model has the inputs {', '.join(n for n, _ in inputs)}\n"
                "hint: pass a data frame with these columns"
            )
        missing = [n for n, _ in inputs if n not in X.columns]
        if missing:
            raise PrepareError(f"X lacks the columns {', '.join(missing)}")
        return {n: _column(X[n], kind) for n, kind in inputs}

    def _make_net(
        self, X: Any, outputs: int, random: np.random.RandomState
    ) -> tuple[Net, dict[str, np.ndarray]]:
        """Return the net and its initial parameters."""
        if self.model is None:
            hidden = np.atleast_1d(np.asarray(self.hidden_layer_sizes, int))
            sizes = [int(n) for n in (X.shape[1], *hidden, outputs)]
            weights = dense_weights(sizes, self.activation, random)
            key = (
                "dense",
                tuple(sizes),
                self.activation,
                self._classifies,
                self.train,
                self.freeze,
            )

            def make() -> Net:
                empty = {n: np.zeros_like(a) for n, a in weights.items()}
                return self._cut(X, dense_net(self.activation, empty), key)

            hashable = all(isinstance(n, str | None) for n in (self.train, self.freeze))
            return cached(("net", *key) if hashable else None, make), weights
        model = self.model
        if hasattr(model, "get_params") and not isinstance(model, type):
            model = convert(model, X)
        net = self._cut(X, model, None)
        return net, net.initial()

    def _cut(self, X: Any, model: Any, key: tuple[Any, ...] | None) -> Net:
        def sample_rows(model: ir.Model) -> dict[str, np.ndarray]:
            inputs = [(x.name or "", _kind(x)) for x in model.graph.inputs]
            return self._feeds(X[:3] if len(X) >= 3 else _repeat_to_three(X), inputs)

        return split_model(
            model,
            sample_rows,
            classifier=self._classifies,
            output=self.output,
            from_logits=getattr(self, "from_logits", None),
            train=self.train,
            freeze=self.freeze,
            kind_key=key,
        )

    def _optimizer(self) -> Optimizer:
        if isinstance(self.optimizer, str) and self.optimizer not in OPTIMIZERS:
            raise PrepareError(
                f"unknown optimizer: {self.optimizer!r} "
                f"{expected_one_of(self.optimizer, OPTIMIZERS)}"
            )
        return resolve_optimizer(self.optimizer)

    def _check_settings(self) -> None:
        problems = [
            f"{name} must be {condition}, got {getattr(self, name)!r}"
            for name, condition, valid in (
                ("learning_rate", "positive", lambda v: v > 0),
                ("batch_size", "at least 1", lambda v: v >= 1),
                ("max_iter", "at least 1", lambda v: v >= 1),
                ("n_iter_no_change", "at least 1", lambda v: v >= 1),
                ("validation_fraction", "between 0 and 1", lambda v: 0 < v < 1),
            )
            if not valid(getattr(self, name))
        ]
        if problems:
            raise PrepareError("; ".join(problems))
        devices.check(self.device)

    def _start(self, X: Any, outputs: int) -> None:
        """Create the net, its initial parameters and an empty optimizer state."""
        # Draw in the order of scikit-learn's MLP: the same random_state gives the same parameters.
        self._random = check_random_state(self.random_state)
        self._net, self._values = self._make_net(X, outputs, self._random)
        self._seed = 0.0 if self.model is None else float(self._random.randint(0, _SEEDS))
        self._state = {}
        self.t_ = 0
        self.n_iter_ = 0
        self.loss_curve_ = []
        self.best_loss_ = np.inf

    def _train(
        self,
        X: Any,
        y: np.ndarray,
        weight: np.ndarray | None,
        epochs: int,
        *,
        stopping: bool,
    ) -> None:
        """Train for at most ``epochs`` epochs on validated data; ``stopping`` allows fewer."""
        validation = None
        if stopping and self.early_stopping:
            X, y, weight, validation = self._hold_out(X, y, weight)
        session = Epochs(self, X, y, weight)
        best, stale_epochs = -np.inf, 0
        best_values: dict[str, np.ndarray] | None = None
        scores: list[float] = []
        self.validation_scores_ = scores if validation is not None else None
        self.best_validation_score_ = None
        for _ in range(epochs):
            loss = session.run()
            self.n_iter_ += 1
            self.loss_curve_.append(loss)
            if not np.isfinite(loss):
                raise ValueError(
                    f"the loss is {loss} after {self.n_iter_} epochs\n"
                    "hint: lower learning_rate, or scale the data"
                )
            if self.verbose:
                print(f"epoch {self.n_iter_}: loss {loss:.6g}")
            if not stopping:
                continue
            score = -loss
            if validation is not None:
                session.store()
                score = self.score(*validation)
                scores.append(score)
            if score > best + (self.tol or 0.0) or best == -np.inf:
                stale_epochs = 0
            else:
                stale_epochs += 1
            if score > best:
                best = score
                best_values = dict(self._values) if validation is not None else None
            if self.tol is not None and stale_epochs >= self.n_iter_no_change:
                break
        else:
            if stopping and self.tol is not None:
                warnings.warn(
                    f"max_iter={epochs} reached before convergence; "
                    "raise max_iter, or set tol=None to train for a fixed number of epochs",
                    ConvergenceWarning,
                    stacklevel=3,
                )
        session.store()
        if best_values is not None:
            self._values, self.best_validation_score_ = best_values, best
        self.loss_ = self.loss_curve_[-1]
        self.best_loss_ = min(self.best_loss_, *self.loss_curve_)

    def _hold_out(self, X: Any, y: np.ndarray, weight: np.ndarray | None) -> Any:
        stratify = self._classifies and len(np.unique(y)) > 1
        columns = [X, y] if weight is None else [X, y, weight]
        parts: list[Any] = train_test_split(
            *columns,
            random_state=self._random,
            test_size=self.validation_fraction,
            stratify=y if stratify else None,
        )
        validation = [parts[1], self._decode(parts[3]), *(parts[5:6])]
        return parts[0], parts[2], None if weight is None else parts[4], validation

    def _decode(self, y: np.ndarray) -> np.ndarray:
        return y

    def _run(self, X: Any) -> np.ndarray:
        """Return raw predictions for validated data."""
        feeds = self._net.preprocess(self._feeds(X, self._net.inputs))
        threads = self._net.threads(self.threads, min(len(X), 64), self._values)
        return self._net.run(self._values, feeds, device=self.device, threads=threads)

    def _ready(self, X: Any) -> Any:
        check_is_fitted(self, "_net")
        return self._check(X, reset=False)

    def _weights_of(self, weight: Any, X: Any, *, normalize: bool) -> np.ndarray | None:
        if weight is None:
            return None
        if self._is_table(X):
            checked = np.asarray(weight, np.float64)
        else:
            checked = _check_sample_weight(weight, X, dtype=np.float64)
        if normalize:
            total = checked.sum()
            if not total > 0:
                raise ValueError("the sum of sample_weight must be positive")
            checked = checked * (len(checked) / total)
        return checked.astype(np.float32)

    @property
    def parameters_(self) -> dict[str, np.ndarray]:
        """Copies of the trained parameters, by name."""
        check_is_fitted(self, "_net")
        return {n: np.array(self._values[n]) for n in self._net.parameters}

    def to_onnx(self) -> onnx.ModelProto:
        """Return the trained model, including preprocessing."""
        check_is_fitted(self, "_net")
        return self._net.trained(self._values)

    def __sklearn_is_fitted__(self) -> bool:
        """Return whether ``fit`` or ``partial_fit`` has run."""
        return hasattr(self, "_net")


def _kind(x: ir.Value) -> str:
    if x.dtype is None:
        return "float32"
    return "str" if x.dtype == ir.DataType.STRING else x.dtype.numpy().name


def _column(values: Any, kind: str) -> np.ndarray:
    array = np.asarray(values).reshape(-1, 1)
    return array.astype(object if kind == "str" else kind)


def _repeat_to_three(X: Any) -> Any:
    rows = np.resize(np.arange(len(X)), 3)
    return X.iloc[rows] if hasattr(X, "iloc") else X[rows]
