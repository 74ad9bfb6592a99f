"""``OnnxClassifier``: train an ONNX graph for classification."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from sklearn.base import ClassifierMixin
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d

from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.sklearn.epochs import MARGIN_LOSSES, classification_loss
from onnxtrain.sklearn.estimator import OnnxEstimator


def _gives_probabilities(estimator: OnnxClassifier) -> bool:
    if estimator.loss in MARGIN_LOSSES:
        raise AttributeError(
            f"loss={estimator.loss!r} has no probabilities\nhint: use loss='log_loss'"
        )
    return True


class OnnxClassifier(ClassifierMixin, OnnxEstimator):
    """Train a linear model, a multi-layer perceptron or any ONNX graph for classification.

    The graph's output has one column per class, or one column for two classes. If it ends in a
    Softmax or Sigmoid, the loss uses the logits before it; ``to_onnx`` keeps it.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; a fitted scikit-learn estimator or
            pipeline, whose last step is trained; ``None`` builds a multi-layer perceptron.
        hidden_layer_sizes: hidden layers of that perceptron; none for a linear model.
        activation: its activation: ``"relu"``, ``"tanh"``, ``"logistic"`` or ``"identity"``.
        loss: ``"log_loss"``, ``"hinge"`` (no probabilities), a name or object of
            ``onnxtrain.losses``, or a function ``(op, prediction, target)``.
        optimizer: a name or an object of ``onnxtrain.optim``; ``learning_rate`` replaces its own.
        learning_rate: base learning rate, before the schedule.
        schedule: a name or object of ``onnxtrain.optim.schedules``; each batch is one step.
        batch_size: rows per step.
        max_iter: maximum number of epochs.
        shuffle: shuffle the rows in each epoch.
        penalty: ``"l1"``, ``"l2"``, ``"elasticnet"`` or ``None``; added to the loss.
        alpha: factor of the penalty.
        l1_ratio: share of l1 in ``"elasticnet"``.
        class_weight: ``"balanced"``, or weights by class.
        tol: minimum improvement of the loss, or of the validation score with ``early_stopping``;
            ``None`` trains for exactly ``max_iter`` epochs.
        n_iter_no_change: stop after this many epochs without improvement.
        early_stopping: hold out validation rows and restore the parameters with the best score.
        validation_fraction: fraction of the rows to hold out.
        warm_start: continue from the previous ``fit``.
        train: names or globs of the parameters to train; all by default.
        freeze: names or globs of the parameters to freeze.
        output: the output to train on; by default the first float output.
        from_logits: whether that output has logits; ``None`` infers it from the graph.
        random_state: random seed for initialization, shuffling and dropout.
        threads: threads of onnxruntime; ``None`` uses one for small nets and all cores for others.
        device: as in :class:`~onnxtrain.Trainer`.
        verbose: print the loss of every epoch.

    Attributes:
        classes_: class labels, in column order.
        loss_curve_: mean loss of each epoch.
        n_iter_: number of epochs.
        parameters_: the trained parameters by name.
    """

    _classifies = True

    def __init__(
        self,
        model: Any = None,
        *,
        hidden_layer_sizes: tuple[int, ...] = (),
        activation: str = "relu",
        loss: Any = "log_loss",
        optimizer: Any = "adam",
        learning_rate: float = 1e-3,
        schedule: Any = None,
        batch_size: int = 64,
        max_iter: int = 200,
        shuffle: bool = True,
        penalty: str | None = None,
        alpha: float = 1e-4,
        l1_ratio: float = 0.15,
        class_weight: Any = None,
        tol: float | None = 1e-4,
        n_iter_no_change: int = 10,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        warm_start: bool = False,
        train: Any = None,
        freeze: Any = None,
        output: str | None = None,
        from_logits: bool | None = None,
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
        self.class_weight = class_weight
        self.tol = tol
        self.n_iter_no_change = n_iter_no_change
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.warm_start = warm_start
        self.train = train
        self.freeze = freeze
        self.output = output
        self.from_logits = from_logits
        self.random_state = random_state
        self.threads = threads
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> OnnxClassifier:
        """Train, from scratch unless ``warm_start``."""
        self._check_settings()
        resume = self.warm_start and self.__sklearn_is_fitted__()
        X, y = self._check(X, y, reset=not resume)
        y = self._labels(y)
        if not resume:
            self._begin(X, np.unique(y))
        codes = self._encode(y)
        weight = self._weights_of(self._weigh(sample_weight, y), X, normalize=True)
        self._train(X, codes, weight, int(self.max_iter), stopping=True)
        return self

    def partial_fit(
        self,
        X: Any,
        y: Any,
        classes: Any = None,
        sample_weight: Any = None,
    ) -> OnnxClassifier:
        """Train for one epoch on these rows, from the current parameters.

        Args:
            X: features.
            y: class labels.
            classes: all class labels; required in the first call only.
            sample_weight: weights of the rows, used without normalization.
        """
        self._check_settings()
        first = not self.__sklearn_is_fitted__()
        if self.class_weight == "balanced":
            raise ValueError(
                "class_weight='balanced' needs all data, partial_fit has one batch\n"
                "hint: pass a dict of class weights"
            )
        X, y = self._check(X, y, reset=first)
        y = self._labels(y)
        if first:
            if classes is None and self._model_classes() is None:
                raise ValueError("classes must be passed on the first call to partial_fit.")
            self._begin(X, np.unique(y if classes is None else classes))
        elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise ValueError(f"classes={classes!r} differs from the first call: {self.classes_!r}")
        codes = self._encode(y)
        weight = self._weights_of(self._weigh(sample_weight, y), X, normalize=False)
        self._train(X, codes, weight, 1, stopping=False)
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Return raw scores, ``[rows, classes]``, or ``[rows]`` for two classes."""
        raw = self._run(self._ready(X)).reshape(-1, self._net.columns)
        if self._net.kind == "probabilities":
            raw = np.log(np.maximum(raw, np.finfo(np.float32).tiny))
            if raw.shape[1] == 1:
                raw = raw - np.log1p(-np.exp(np.minimum(raw, -1e-7)))
        if raw.shape[1] == 1:
            return raw[:, 0]
        return raw[:, 1] - raw[:, 0] if len(self.classes_) == 2 else raw

    @available_if(_gives_probabilities)
    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class."""
        raw = self._run(self._ready(X)).reshape(-1, self._net.columns).astype(np.float64)
        if self._net.columns == 1:
            p = raw if self._net.kind == "probabilities" else _sigmoid(raw)
            return np.hstack([1 - p, p])
        if self._net.kind == "probabilities":
            return raw / raw.sum(1, keepdims=True)
        e = np.exp(raw - raw.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """Return the most likely class of each row."""
        scores = self.decision_function(X)
        codes = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(1)
        return self.classes_[codes]

    def to_onnx(self) -> onnx.ModelProto:
        """Return the trained model, including preprocessing.

        With ``model=None`` its outputs are ``label`` and ``probabilities``; any other model keeps
        its own outputs.
        """
        check_is_fitted(self, "_net")
        model = super().to_onnx()
        return model if self.model is not None else self._with_labels(model)

    def _with_labels(self, model: onnx.ModelProto) -> onnx.ModelProto:
        work = ir.from_proto(model)
        op = OpBuilder(work.graph)
        (raw,) = work.graph.outputs
        if self._net.columns == 1:
            positive = op.Sigmoid(raw)
            p = op.Concat(op.Sub(1.0, positive), positive, axis=1)
        else:
            p = op.Softmax(raw, axis=1)
        p.name = "probabilities"
        kind = self.classes_.dtype.kind
        names = self.classes_.astype(str) if kind in "OU" else self.classes_.astype(np.int64)
        tensor = (
            ir.StringTensor([str(n).encode() for n in names], shape=ir.Shape([len(names)]))
            if kind in "OU"
            else ir.Tensor(names)
        )
        labels = ir.Value(
            name="classes",
            type=ir.TensorType(tensor.dtype),
            shape=ir.Shape([len(names)]),
            const_value=tensor,
        )
        work.graph.register_initializer(labels)
        tensor.name = "classes"
        label = op.Gather(
            labels, op.ArgMax(p if self._net.columns == 1 else raw, axis=1, keepdims=0)
        )
        label.name = "label"
        work.graph.outputs.clear()
        work.graph.outputs.extend([label, p])
        return ir.to_proto(work)

    def _labels(self, y: Any) -> np.ndarray:
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        return y

    def _model_classes(self) -> np.ndarray | None:
        known = getattr(self.model, "classes_", None)
        return None if known is None else np.asarray(known)

    def _begin(self, X: Any, classes: np.ndarray) -> None:
        model_classes = self._model_classes()
        self.classes_ = classes if model_classes is None else model_classes
        if len(self.classes_) < 2:
            raise ValueError(
                f"a classifier needs at least two classes, got one class: {self.classes_!r}"
            )
        self._start(X, 1 if len(self.classes_) == 2 else len(self.classes_))
        columns = self._net.columns
        if columns != len(self.classes_) and not (columns == 1 and len(self.classes_) == 2):
            raise PrepareError(
                f"the model's output has {columns} column(s) for {len(self.classes_)} classes\n"
                "hint: select an output with one column per class (or one for two) with output=..."
            )

    def _encode(self, y: np.ndarray) -> np.ndarray:
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise ValueError(f"y has unknown classes {unknown!r} (expected {self.classes_!r})")
        order = np.argsort(self.classes_)
        return order[np.searchsorted(self.classes_[order], y)]

    def _decode(self, y: np.ndarray) -> np.ndarray:
        return self.classes_[y]

    def _weigh(self, weight: Any, y: np.ndarray) -> Any:
        if self.class_weight is None:
            return weight
        present = np.unique(y)
        if isinstance(self.class_weight, dict):
            table = np.array([float(self.class_weight.get(c, 1.0)) for c in present])
        else:
            table = compute_class_weight(self.class_weight, classes=present, y=y)
        by_row = table[np.searchsorted(present, y)]
        return by_row if weight is None else by_row * np.asarray(weight, np.float64)

    def _loss(self) -> Any:
        return classification_loss(self.loss, self._net.columns, self._net.kind)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * x))
