"""A classifier that trains an ONNX graph."""

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
        raise AttributeError(f"loss={estimator.loss!r} gives no probabilities")
    return True


class OnnxClassifier(ClassifierMixin, OnnxEstimator):
    """Fits a linear net, a multi-layer perceptron or any ONNX graph to classes.

    A graph's output has one column per class, or one column for two classes. If it ends in a
    Softmax or Sigmoid, the loss looks at what comes before, and ``to_onnx`` keeps it.

    Args:
        model: a path, bytes, ``ModelProto`` or ``ir.Model``; a fitted scikit-learn estimator or
            pipeline, whose last step is trained; ``None`` builds a net from the data.
        hidden_layer_sizes: of that net; none for a linear model.
        activation: of that net: ``"relu"``, ``"tanh"``, ``"logistic"`` or ``"identity"``.
        loss: ``"log_loss"``, ``"hinge"`` (no probabilities), a name or object of
            ``onnxtrain.losses``, or a function ``(op, prediction, target)``.
        optimizer: a name or an object of ``onnxtrain.optim``; ``learning_rate`` replaces its own.
        learning_rate: of each step, before the schedule.
        schedule: a name or object of ``onnxtrain.optim.schedules``; steps are batches.
        batch_size: rows per step.
        max_iter: the largest number of epochs.
        shuffle: whether each epoch has an order of its own.
        penalty: ``"l1"``, ``"l2"``, ``"elasticnet"`` or ``None``, a part of the loss.
        alpha: the factor of the penalty.
        l1_ratio: the part of l1 in ``"elasticnet"``.
        class_weight: ``"balanced"``, or weights by class.
        tol: what counts as an improvement of the loss, or of the score if stopping early; ``None``
            trains for exactly ``max_iter`` epochs.
        n_iter_no_change: how many epochs without improvement end the training.
        early_stopping: hold rows out, and keep the parameters with the best score on them.
        validation_fraction: how many rows that are.
        warm_start: whether ``fit`` goes on from the last one.
        train: names or globs of the parameters to train; all unless given.
        freeze: names or globs of parameters to leave as they are.
        output: the output to train on; the first float output unless given.
        from_logits: whether that output comes before a Softmax; ``None`` looks at the graph.
        random_state: of first parameters, order of rows, dropout.
        threads: of onnxruntime; ``None`` takes one for small nets.
        device: ``"cpu"`` or ``"cuda"``.
        verbose: whether to print the loss of every epoch.

    Attributes:
        classes_: labels, in the order of columns.
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
        """Train, from the start unless ``warm_start``; rows may have weights."""
        self._check_settings()
        going_on = self.warm_start and self.__sklearn_is_fitted__()
        X, y = self._check(X, y, reset=not going_on)
        y = self._labels(y)
        if not going_on:
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
        """Train for one epoch on these rows, going on from what there is.

        Args:
            X: rows.
            y: their classes.
            classes: all classes there are; needed in the first call only.
            sample_weight: weights of the rows, taken as they are.
        """
        self._check_settings()
        first = not self.__sklearn_is_fitted__()
        if self.class_weight == "balanced":
            raise ValueError("class_weight='balanced' needs all data\nhint: pass a dict")
        X, y = self._check(X, y, reset=first)
        y = self._labels(y)
        if first:
            if classes is None and self._own_classes() is None:
                raise ValueError("classes must be passed on the first call to partial_fit.")
            self._begin(X, np.unique(y if classes is None else classes))
        elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise ValueError(f"classes={classes!r} is not what it was: {self.classes_!r}")
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
        """Return the likeliest class of each row."""
        scores = self.decision_function(X)
        codes = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(1)
        return self.classes_[codes]

    def to_onnx(self) -> onnx.ModelProto:
        """Return the trained model, pre-processing included.

        A net that was built from the data gives ``label`` and ``probabilities``; any other keeps
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
            yes = op.Sigmoid(raw)
            p = op.Concat(op.Sub(1.0, yes), yes, axis=1)
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

    def _own_classes(self) -> np.ndarray | None:
        known = getattr(self.model, "classes_", None)
        return None if known is None else np.asarray(known)

    def _begin(self, X: Any, classes: np.ndarray) -> None:
        own = self._own_classes()
        self.classes_ = classes if own is None else own
        if len(self.classes_) < 2:
            raise ValueError(
                f"a classifier needs two classes or more, got one class: {self.classes_!r}"
            )
        self._start(X, 1 if len(self.classes_) == 2 else len(self.classes_))
        columns = self._net.columns
        if columns != len(self.classes_) and not (columns == 1 and len(self.classes_) == 2):
            raise PrepareError(
                f"the model's output has {columns} column(s) for {len(self.classes_)} classes\n"
                "hint: one column per class, or one for two classes; see `output`"
            )

    def _encode(self, y: np.ndarray) -> np.ndarray:
        strange = np.setdiff1d(y, self.classes_)
        if len(strange):
            raise ValueError(f"y has classes that are not known: {strange!r}")
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
