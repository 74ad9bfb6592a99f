"""Metrics of a whole data set: built-in ones, any function, objects of torchmetrics.

``fit(metrics=...)`` and ``evaluate(metrics=...)`` compute them from all targets and predictions of
a data set, outside the graph: F1 or AUC is not a mean over batches. In reading order:

- :class:`Metrics` resolves what the caller gives, collects batches and returns the values;
- :class:`Comparison` has targets and predictions in the forms that metrics read;
- the built-in metrics, in numpy, with the definitions of scikit-learn;
- metrics that read one batch at a time: masks and transcripts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain.errors import OnnxTrainError, PrepareError, ShapeError, by_caller, expected_one_of
from onnxtrain.losses.metrics import METRICS
from onnxtrain.registry import parse_options
from onnxtrain.runtime.feeds import to_array
from onnxtrain.training.detection_metrics import CocoMAP

if TYPE_CHECKING:
    from onnxtrain.training.trainer import Trainer

MetricsLike = str | Callable[..., Any] | Sequence[Any] | Mapping[str, Any]
"""Names, functions of targets and predictions, or objects with ``update`` and ``compute``."""


class Metrics:
    """The metrics of a data set.

    Args:
        trainer: predicts.
        given: a name, a function or an object, a list of these, or a dict of them by name.
    """

    def __init__(self, trainer: Trainer, given: MetricsLike) -> None:
        self._trainer = trainer
        self._objects: dict[str, Any] = {}
        self._functions: dict[str, Callable[[Comparison], Any]] = {}
        for name, metric in _by_name(given).items():
            if name in trainer.metric_names and name == metric:
                continue  # the graph reports it
            if name in ("loss", *trainer.metric_names):
                raise OnnxTrainError(
                    f"the graph already reports {name!r}\nhint: metrics={{'my_{name}': ...}}"
                )
            if isinstance(metric, str) and parse_options(metric)[0] in OBJECTS:
                self._objects[name] = _object_by_name(metric)
            elif _is_object(metric):
                self._objects[name] = metric
            elif isinstance(metric, str):
                self._functions[name] = _built_in(metric)
            else:
                self._functions[name] = functools.partial(_call, metric)
        self._targets: dict[str, list[np.ndarray]] = {}
        self._outputs: dict[str, list[np.ndarray]] = {}

    @property
    def names(self) -> list[str]:
        """Names of the metrics; one that returns a dict adds its keys to its own name."""
        return [*self._functions, *self._objects]

    def reset(self) -> None:
        """Forget all batches."""
        self._targets, self._outputs = {}, {}
        for metric in self._objects.values():
            if hasattr(metric, "reset"):
                metric.reset()

    def add(self, feeds: Mapping[str, np.ndarray]) -> None:
        """Predict a batch, and keep what the metrics read of it."""
        if not self.names:
            return
        outputs = self._trainer.predict(feeds)
        targets = {s.name: feeds[s.name] for s in self._trainer.batch_specs if s.role == "target"}
        for name, metric in self._objects.items():
            batch = self._comparison(targets, outputs)
            with _explained(name, batch):
                _update(metric, batch)
        if not self._functions:
            return
        for kept, arrays in ((self._targets, targets), (self._outputs, outputs)):
            for name, array in arrays.items():
                kept.setdefault(name, []).append(array)

    def values(self) -> dict[str, Any]:
        """Return the metrics by name: numbers, and lists for arrays."""
        values: dict[str, Any] = {}
        if self._functions:
            whole = self._comparison(_joined(self._targets), _joined(self._outputs))
            for name, function in self._functions.items():
                with _explained(name, whole):
                    values |= _plain(name, function(whole))
        for name, metric in self._objects.items():
            values |= _plain(name, metric.compute())
        return values

    def _comparison(
        self, targets: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
    ) -> Comparison:
        """Return the target and the output that the loss compares; dicts if there are several."""
        if len(targets) == 1:
            ((name, target),) = targets.items()
            pair = self._trainer.manifest.options.get("predictions", {}).get(name, {})
            output = pair.get("output")
            if output in outputs:
                activation, applied = pair["activation"], pair["applied"]
                return Comparison(target, outputs[output], activation, applied=applied)
            if len(outputs) == 1:
                return Comparison(target, next(iter(outputs.values())))
        return Comparison(targets, outputs)


@contextlib.contextmanager
def _explained(name: str, comparison: Comparison) -> Iterator[None]:
    """Name the metric in errors, and say what it got."""
    try:
        yield
    except OnnxTrainError as error:
        raise type(error)(f"metric {name!r}: {error}") from error
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error).strip()}"
        raise OnnxTrainError(f"metric {name!r} failed: {problem}\n{comparison.hint()}") from error


def _by_name(given: MetricsLike) -> dict[str, Any]:
    """Return metrics by name; a function has its own."""
    if isinstance(given, Mapping):
        named = [(str(name), metric) for name, metric in given.items()]
    else:
        items = given if isinstance(given, list | tuple) else [given]
        named = [(_name_of(metric), metric) for metric in items]
    metrics = dict(named)
    for name, metric in named:
        if not isinstance(metric, str) and not _is_object(metric) and not callable(metric):
            raise OnnxTrainError(
                f"metric {name!r} is a {type(metric).__name__}\n"
                "hint: pass a name, a function of targets and predictions, or an object with "
                "update and compute"
            )
    if len(metrics) < len(named):
        raise OnnxTrainError("two metrics have the same name\nhint: metrics={'name': function}")
    return metrics


def _object_by_name(text: str) -> Any:
    """Return a metric of a name with options, such as ``coco_map:decode=detr``."""
    name, options = parse_options(text)
    try:
        return OBJECTS[name](**options)
    except TypeError as error:
        parameters = ", ".join(inspect.signature(OBJECTS[name]).parameters)
        raise PrepareError(
            f"metric {text!r}: {str(error).rpartition('.')[2]}\n"
            f"hint: its options are {parameters}, as in {name}:option=value"
        ) from error


def _name_of(metric: Any) -> str:
    if isinstance(metric, str):
        return metric.partition(":")[0]
    inner = metric.func if isinstance(metric, functools.partial) else metric
    return getattr(inner, "__name__", type(inner).__name__)


def _is_object(metric: Any) -> bool:
    """Return whether a metric is updated batch by batch, as those of torchmetrics are."""
    return hasattr(metric, "update") and hasattr(metric, "compute")


def _update(metric: Any, comparison: Comparison) -> None:
    predictions, targets = comparison.predictions, comparison.targets
    if isinstance(metric, MeanIoU):
        return metric.add(comparison)
    if any(base.__module__.startswith("torchmetrics.") for base in type(metric).__mro__):
        predictions, targets = _tensors(predictions), _tensors(targets)
    metric.update(predictions, targets)


def _tensors(arrays: Any) -> Any:
    """Return arrays as torch tensors, for torchmetrics."""
    import torch

    if isinstance(arrays, Mapping):
        return {n: torch.from_numpy(np.array(a)) for n, a in arrays.items()}
    return torch.from_numpy(np.array(arrays))


def _joined(batches: Mapping[str, Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
    joined = {}
    for name, parts in batches.items():
        shapes = {str(list(p.shape[1:])) for p in parts}
        if len(shapes) > 1:
            raise ShapeError(
                f"metrics read a whole data set, and batches of {name!r} have rows of different "
                f"shapes: {', '.join(sorted(shapes))}\n"
                "hint: pad them to one length, or pass an object with update and compute"
            )
        joined[name] = np.concatenate(parts)
    return joined


def _plain(name: str, result: Any) -> dict[str, Any]:
    """Return the result of a metric as numbers and lists by name."""
    if isinstance(result, Mapping):
        parts = [_plain(f"{name}_{key}", value) for key, value in result.items()]
        return {n: v for part in parts for n, v in part.items()}
    array = to_array(result)
    if array.dtype.kind not in "fiub":
        raise OnnxTrainError(
            f"it returned {type(result).__name__}\n"
            "hint: return a number, an array, or a dict of these"
        )
    return {name: float(array.item()) if array.size == 1 else array.tolist()}


# sklearn.metrics names its second argument after what it must be.
_PROBABILITIES = ("y_score", "y_proba", "y_prob")
_LOG_LOSSES = ("log_loss", "d2_log_loss_score")  # their y_pred has probabilities


def _call(metric: Callable[..., Any], comparison: Comparison) -> Any:
    """Return ``metric(targets, predictions)``.

    Functions of scikit-learn get what its classifiers return: class labels as ``y_pred``,
    probabilities as ``y_score``. Functions of torchmetrics take predictions first. Other functions
    get the output of the model, and class labels if they fail on it: often they call scikit-learn.
    """
    inner = metric.func if isinstance(metric, functools.partial) else metric
    library = str(getattr(inner, "__module__", "")).partition(".")[0]
    targets, predictions = comparison.targets, comparison.predictions
    if library == "torchmetrics":
        return metric(_tensors(predictions), _tensors(targets))
    if library != "sklearn" or isinstance(targets, Mapping):
        try:
            return metric(targets, predictions)
        except Exception as error:
            if isinstance(targets, Mapping) or not comparison.classifies:
                raise
            with contextlib.suppress(Exception):
                return metric(comparison.labels, comparison.classes)
            raise error from None
    if not comparison.classifies:
        return metric(_flat_column(targets), _flat_column(predictions))
    second = [*inspect.signature(inner).parameters, "", ""][1]
    if second in _PROBABILITIES or _name_of(metric) in _LOG_LOSSES:
        p = comparison.probabilities
        return metric(comparison.labels, p[:, 1] if comparison.binary and p.ndim == 2 else p)
    return metric(comparison.labels, comparison.classes)


def _flat_column(array: np.ndarray) -> np.ndarray:
    return array[..., 0] if array.ndim > 1 and array.shape[-1] == 1 else array


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Targets and predictions of a data set, or of a batch.

    Labels, classes and probabilities have a row per label that is not ignored: ``[rows]`` and
    ``[rows, classes]``. For several labels per row, all are ``[rows, labels]``.
    """

    targets: Any
    """An array; a dict of arrays by name if there are several targets."""
    predictions: Any
    """The output that the loss reads; a dict of all outputs if there are several targets."""
    activation: str = ""
    """What makes probabilities of the predictions: softmax, sigmoid or exp."""
    applied: bool = False
    """Whether the predictions are probabilities already."""

    @property
    def single(self) -> tuple[np.ndarray, np.ndarray]:
        """The target and the prediction, if there is one of each."""
        if isinstance(self.targets, Mapping) or isinstance(self.predictions, Mapping):
            raise PrepareError(
                f"found several targets or outputs: {', '.join([*self.targets, *self.predictions])}"
                "\nhint: pass a function of dicts: metrics={'f1': lambda targets, predictions: ...}"
            )
        return self.targets, self.predictions

    @property
    def _indexed(self) -> bool:
        """Whether targets are class indices."""
        targets, predictions = self.single
        return targets.dtype.kind in "iu" and predictions.ndim == targets.ndim + 1

    @property
    def classifies(self) -> bool:
        """Whether predictions are scores of classes."""
        return self._indexed or bool(self.activation)

    @property
    def binary(self) -> bool:
        """Whether there are two classes, of which 1 is the positive one."""
        p = self._scores[1]
        return p.ndim == 1 or (self._exclusive and p.shape[1] == 2)

    @property
    def _exclusive(self) -> bool:
        """Whether a row has one class."""
        return self._indexed or self.activation in ("softmax", "exp")

    @functools.cached_property
    def _scores(self) -> tuple[np.ndarray, np.ndarray]:
        """Labels and scores."""
        targets, scores = self.single
        scores = scores.astype(np.float64)
        if self._indexed:
            axis = 1 if targets.shape[1:] == scores.shape[2:] else -1
            scores = np.moveaxis(scores, axis, -1).reshape(-1, scores.shape[axis])
            labels = targets.reshape(-1)
            known = (labels >= 0) & (labels < scores.shape[1])  # others are ignored
            return labels[known], scores[known]
        if not self.activation or targets.shape != scores.shape:
            raise PrepareError(
                "the loss compares values, not classes\nhint: metrics of values are 'mae' and 'r2'"
            )
        if self._exclusive:
            return targets.argmax(1).reshape(-1), np.moveaxis(scores, 1, -1).reshape(
                -1, scores.shape[1]
            )
        labels = (targets > 0.5).astype(np.int64).reshape(len(targets), -1)
        scores = scores.reshape(len(scores), -1)
        return (labels[:, 0], scores[:, 0]) if labels.shape[1] == 1 else (labels, scores)

    @property
    def labels(self) -> np.ndarray:
        """Class indices, or 0 and 1 for several labels per row."""
        return self._scores[0]

    @functools.cached_property
    def classes(self) -> np.ndarray:
        """Predicted labels."""
        scores = self._scores[1]
        if self._exclusive:
            return scores.argmax(1)
        return (scores > (0.5 if self.applied else 0.0)).astype(np.int64)

    @functools.cached_property
    def probabilities(self) -> np.ndarray:
        """Probabilities of the classes or labels."""
        scores = self._scores[1]
        if self.applied:
            return scores
        if self.activation == "sigmoid":
            return 0.5 * (1.0 + np.tanh(0.5 * scores))
        if self.activation not in ("softmax", "exp"):
            raise PrepareError("the loss defines no probabilities\nhint: 'accuracy' or 'f1'")
        e = np.exp(scores - scores.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    @property
    def indicators(self) -> tuple[np.ndarray, np.ndarray]:
        """Labels as 0 and 1, and probabilities, with a column per class: the positive of two."""
        labels, p = self.labels, self.probabilities
        if p.ndim == 1:
            return labels[:, None], p[:, None]
        if self._exclusive:
            labels = labels[:, None] == np.arange(p.shape[1])
        return (labels[:, 1:], p[:, 1:]) if self.binary else (labels, p)

    def hint(self) -> str:
        """Return what functions get, as the hint of an error."""
        if isinstance(self.targets, Mapping) or isinstance(self.predictions, Mapping):
            names = [", ".join(a) for a in (self.targets, self.predictions)]
            return f"hint: it gets dicts of targets ({names[0]}) and predictions ({names[1]})"
        kinds = [f"{a.dtype}{list(a.shape)}" for a in (self.targets, self.predictions)]
        text = f"hint: it gets targets {kinds[0]} and predictions {kinds[1]}"
        if not self._indexed:
            return text
        return (
            f"{text}; for classes: lambda targets, predictions: f(targets, predictions.argmax(1))"
        )


# -- built-in metrics ----------------------------------------------------------------------


def _built_in(name: str) -> Callable[[Comparison], Any]:
    number = re.fullmatch(r"top_(\d+)", name)
    if number:
        return functools.partial(_top_k, k=int(number[1]))
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name in METRICS:
        raise OnnxTrainError(
            f"{name!r} is a metric of the graph\nhint: "
            + by_caller(f"build(..., metrics=[{name!r}])", f"onnxtrain build ... --metric {name}")
        )
    known = [*BUILT_IN, *OBJECTS, "top_3"]
    raise OnnxTrainError(f"unknown metric: {name!r} {expected_one_of(name, known)}")


def _accuracy(c: Comparison) -> float:
    return float((c.labels == c.classes).mean())


def _counts(c: Comparison) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return true positives, predictions and labels of each class: the positive one of two."""
    labels, classes = c.labels, c.classes
    if labels.ndim == 1:
        present = np.array([1]) if c.binary else np.union1d(labels, classes)
        labels, classes = (a[:, None] == present for a in (labels, classes))
    return (labels & classes).sum(0), classes.sum(0), labels.sum(0)


def _ratio(a: np.ndarray, b: np.ndarray) -> float:
    """Return the mean of ``a / b``, with 0 where ``b`` is 0."""
    return float(np.divide(a, b, out=np.zeros(len(a)), where=b > 0).mean())


def _precision(c: Comparison) -> float:
    hits, predicted, _ = _counts(c)
    return _ratio(hits, predicted)


def _recall(c: Comparison) -> float:
    hits, _, actual = _counts(c)
    return _ratio(hits, actual)


def _f1(c: Comparison) -> float:
    hits, predicted, actual = _counts(c)
    return _ratio(2 * hits, predicted + actual)


def _auc(c: Comparison) -> float:
    """Return the area under the ROC curve; NaN if no class has rows inside and outside of it."""
    areas = []
    for y, p in zip(*(a.T for a in c.indicators), strict=True):
        positive, negative = int(y.sum()), int(len(y) - y.sum())
        if positive and negative:
            _, inverse, counts = np.unique(p, return_inverse=True, return_counts=True)
            ranks = (counts.cumsum() - (counts - 1) / 2)[inverse]
            wins = ranks[y.astype(bool)].sum() - positive * (positive + 1) / 2
            areas.append(wins / (positive * negative))
    return float(np.mean(areas)) if areas else float("nan")


def _mean_average_precision(c: Comparison) -> float:
    """Return the mean over classes of the area under precision and recall."""
    means = []
    for y, p in zip(*(a.T for a in c.indicators), strict=True):
        if not y.any():
            continue
        order = np.argsort(-p, kind="stable")
        last = np.flatnonzero(np.append(np.diff(p[order]) != 0, True))  # of rows of equal scores
        hits = y[order].cumsum()[last]
        recall = np.append(0, hits / y.sum())
        means.append((np.diff(recall) * hits / (last + 1)).sum())
    return float(np.mean(means)) if means else float("nan")


def _top_k(c: Comparison, k: int) -> float:
    labels, scores = c._scores
    if scores.ndim == 1 or labels.ndim == 2:
        raise PrepareError(f"top_{k} needs a score per class")
    own = scores[np.arange(len(labels)), labels]
    return float(((scores > own[:, None]).sum(1) < k).mean())


def _confusion_matrix(c: Comparison) -> np.ndarray:
    """Return the number of rows by label (rows) and prediction (columns)."""
    if c.labels.ndim == 2:
        raise PrepareError("confusion_matrix needs one label per row")
    size = 2 if c.binary else c._scores[1].shape[1]
    return np.bincount(c.labels * size + c.classes, minlength=size * size).reshape(size, size)


def _values(c: Comparison) -> tuple[np.ndarray, np.ndarray]:
    targets, predictions = (a.astype(np.float64) for a in c.single)
    if targets.shape != predictions.shape:
        raise PrepareError(
            f"targets have shape {list(targets.shape)}, predictions {list(predictions.shape)}\n"
            "hint: metrics of class labels are 'accuracy', 'f1' and 'auc'"
        )
    return targets.reshape(len(targets), -1), predictions.reshape(len(predictions), -1)


def _mae(c: Comparison) -> float:
    targets, predictions = _values(c)
    return float(np.abs(targets - predictions).mean())


def _r2(c: Comparison) -> float:
    """Return the mean over columns; a constant column counts 1 if it is exact, else 0."""
    targets, predictions = _values(c)
    rest = ((targets - predictions) ** 2).sum(0)
    total = ((targets - targets.mean(0)) ** 2).sum(0)
    constant = np.where(rest == 0, 1.0, 0.0)
    return float(np.where(total > 0, 1 - rest / np.where(total > 0, total, 1), constant).mean())


BUILT_IN: dict[str, Callable[[Comparison], Any]] = {
    "accuracy": _accuracy,
    "precision": _precision,
    "recall": _recall,
    "f1": _f1,
    "auc": _auc,
    "map": _mean_average_precision,
    "confusion_matrix": _confusion_matrix,
    "mae": _mae,
    "r2": _r2,
}
"""Built-in metrics by name, besides ``top_3`` for any number.

Precision, recall, F1 and AUC are those of class 1 if there are two classes, else means over classes
or labels (``average="macro"`` in scikit-learn).
"""


# -- metrics of one batch at a time --------------------------------------------------------


class MeanIoU:
    """Mean over classes of ``hits / (hits + misses + false alarms)`` of positions of masks.

    Positions whose label is not a class are ignored. Classes that neither labels nor predictions
    have do not count. For masks of sigmoids, a class is what lies inside of its mask.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self._counts = np.zeros((3, 0), np.int64)  # hits, predictions and labels by class

    def update(self, predictions: np.ndarray, targets: np.ndarray) -> None:
        """Count the positions of logits ``[N, C, ...]`` and labels ``[N, ...]``."""
        self.add(Comparison(np.asarray(targets), np.asarray(predictions)))

    def add(self, comparison: Comparison) -> None:
        """Count the positions of a batch."""
        labels, classes = comparison.labels, comparison.classes
        if comparison._exclusive:
            size = comparison._scores[1].shape[1]
            found = (labels[labels == classes], classes, labels)
            counts = np.stack([np.bincount(a, minlength=size) for a in found])
        else:  # a mask per class: [N, C, ...]
            shape = comparison.single[0].shape
            a, b = (
                v.reshape(*(shape[:2] if len(shape) > 1 else (-1, 1)), -1).astype(bool)
                for v in (labels, classes)
            )
            counts = np.stack([v.sum((0, 2)) for v in (a & b, b, a)])
        self._counts = counts + (self._counts if self._counts.size else 0)

    def compute(self) -> float:
        """Return the mean; NaN without any class."""
        hits, predicted, actual = self._counts
        return self._mean(hits, predicted + actual - hits)

    @staticmethod
    def _mean(a: np.ndarray, b: np.ndarray) -> float:
        return float((a[b > 0] / b[b > 0]).mean()) if (b > 0).any() else float("nan")


class DiceScore(MeanIoU):
    """Mean over classes of ``2 hits / (2 hits + misses + false alarms)``: F1 of positions."""

    def compute(self) -> float:
        """Return the mean; NaN without any class."""
        hits, predicted, actual = self._counts
        return self._mean(2 * hits, predicted + actual)


class CharErrorRate:
    """Insertions, deletions and substitutions per label of the reference.

    It decodes the output of a model with the loss ``ctc`` by the best class of each time step.
    :meth:`update` also takes two lists of texts.

    >>> metric = CharErrorRate()
    >>> metric.update(["kitten"], ["sitting"])
    >>> round(metric.compute(), 3)
    0.429

    Args:
        blank: class of the blank.
        batch_first: the output is ``[N, T, C]``, not ``[T, N, C]``, as for the loss.
    """

    def __init__(self, blank: int = 0, *, batch_first: bool = False) -> None:
        self.blank, self.batch_first = blank, batch_first
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self._edits = self._length = 0

    def update(self, predictions: Any, targets: Any) -> None:
        """Compare texts or label sequences, or the outputs and targets of a batch of CTC."""
        if isinstance(targets, Mapping):
            predictions, targets = self._decoded(predictions, targets)
        for predicted, actual in zip(predictions, targets, strict=True):
            a, b = self.tokens(predicted), self.tokens(actual)
            self._edits += edit_distance(a, b)
            self._length += len(b)

    def compute(self) -> float:
        """Return the rate; NaN for references without labels."""
        return self._edits / self._length if self._length else float("nan")

    def tokens(self, sequence: Any) -> list[Any]:
        """Return what is compared: the characters of a text, or the labels of a sequence."""
        return list(sequence)

    def _decoded(self, outputs: Any, targets: Mapping[str, np.ndarray]) -> tuple[Any, Any]:
        scores = [y for y in outputs.values() if y.ndim == 3]
        if len(scores) != 1 or not targets.keys() >= {"labels", "input_lengths", "target_lengths"}:
            raise PrepareError(
                "it reads one output [T, N, C] and the targets of the loss 'ctc'\n"
                "hint: decode yourself: metrics={'cer': lambda targets, predictions: ...}"
            )
        best = scores[0].argmax(-1)
        best = best if self.batch_first else best.T
        if len(best) != len(targets["labels"]):
            raise ShapeError(
                f"{len(best)} sequences in the output {list(scores[0].shape)} and "
                f"{len(targets['labels'])} in the labels\nhint: "
                f"{type(self).__name__}(batch_first={not self.batch_first})"
            )
        paths = [row[:n] for row, n in zip(best, targets["input_lengths"], strict=True)]
        merged = [path[np.append(True, path[1:] != path[:-1])[: len(path)]] for path in paths]
        pairs = zip(targets["labels"], targets["target_lengths"], strict=True)
        return [m[m != self.blank].tolist() for m in merged], [a[:n].tolist() for a, n in pairs]


class WordErrorRate(CharErrorRate):
    """Insertions, deletions and substitutions per word of the reference.

    >>> metric = WordErrorRate()
    >>> metric.update(["the cat sat"], ["the bat sat down"])
    >>> metric.compute()
    0.5

    Args:
        separator: class of the label between words, for the loss ``ctc``; texts have spaces.
        blank: class of the blank.
        batch_first: the output is ``[N, T, C]``, not ``[T, N, C]``, as for the loss.
    """

    def __init__(
        self, separator: int | None = None, blank: int = 0, *, batch_first: bool = False
    ) -> None:
        super().__init__(blank, batch_first=batch_first)
        self.separator = separator

    def tokens(self, sequence: Any) -> list[Any]:
        """Return the words."""
        if isinstance(sequence, str):
            return sequence.split()
        if self.separator is None:
            raise PrepareError("the label between words is not known\nhint: pass separator=")
        words: list[list[Any]] = [[]]
        for label in sequence:
            words[-1:] = [words[-1], []] if label == self.separator else [[*words[-1], label]]
        return [word for word in words if word]


def edit_distance(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the number of insertions, deletions and substitutions between two sequences."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a):
        last, row[0] = row[0], i + 1
        for j, y in enumerate(b):
            last, row[j + 1] = row[j + 1], min(row[j] + 1, row[j + 1] + 1, last + (x != y))
    return row[-1]


OBJECTS: dict[str, Callable[..., Any]] = {
    "miou": MeanIoU,
    "dice": DiceScore,
    "coco_map": CocoMAP,
    "cer": CharErrorRate,
    "wer": WordErrorRate,
}
"""Built-in metrics that read one batch at a time, by name."""
