"""Batches of a training run, and labels that are not classes of the model.

:func:`as_source` turns arrays, tables, lists, torch's DataLoader and functions into a
:class:`Source`. Its batches depend on data, seed and epoch only, so a resumed run sees the same
ones. :func:`explain_label_error` names the row of a label that is out of range.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import LabelError, OnnxTrainError, ShapeError
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.feeds import to_array

if TYPE_CHECKING:
    from onnxtrain.training.trainer import Trainer

_MASK_64 = 0xFFFFFFFFFFFFFFFF


class Batch(NamedTuple):
    """The tensors of a batch, by position and by name."""

    positional: tuple[Any, ...]
    named: dict[str, Any]
    rows: np.ndarray | None = None
    """Indices of its samples in the data, if they are known."""
    weight: int | None = None
    """Weight in means over batches; the number of samples by default."""

    @property
    def size(self) -> int:
        """The weight, else the number of samples: the length of the first tensor."""
        if self.weight is not None:
            return self.weight
        for value in (*self.positional, *self.named.values()):
            shape = getattr(value, "shape", None)
            if shape is None:
                shape = to_array(value).shape
            if len(shape):
                return int(shape[0])
        return 1


class Source(Protocol):
    """Batches, epoch by epoch."""

    def __len__(self) -> int:
        """Return the number of batches per epoch; raise ``TypeError`` if it is unknown."""
        ...

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch (from 0) without the first ``start`` batches."""
        ...


def as_source(
    data: Any,
    *,
    batch_size: int,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    columns: Sequence[str] = (),
) -> Source:
    """Return the batches of a data set.

    Args:
        data: an array, a tuple of arrays (by position) or a dict of arrays (by name), which are cut
            into batches; a table: a pandas or polars DataFrame, an Arrow table or a Hugging Face
            ``Dataset``; a list or other iterable of batches, each one of these or a
            :class:`Batch`; or a function from the epoch to such an iterable.
        batch_size: for arrays and tables.
        shuffle: shuffle arrays in each epoch; the order depends on seed and epoch only.
        seed: random seed of the order.
        drop_last: drop the last batch of an epoch if it is smaller.
        columns: columns to read from a table; others are not read.
    """
    names = _column_names(data)
    if names is not None:
        data = _read_columns(data, names, columns)
    if isinstance(data, Mapping) or (
        isinstance(data, tuple) and data and not any(isinstance(d, tuple | Mapping) for d in data)
    ):
        return Arrays(data, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)
    if isinstance(data, np.ndarray) or (hasattr(data, "shape") and hasattr(data, "dtype")):
        return Arrays((data,), batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)
    if callable(data) and not hasattr(data, "__iter__"):
        make_batches: Any = data
        return Batches(make_batches)
    if isinstance(data, Iterable):
        return Batches(_per_epoch(data, seed))
    raise ShapeError(
        f"data of type {type(data).__name__} is not supported\n"
        "hint: pass a tuple or dict of arrays, or an iterable of batches"
    )


def _column_names(data: Any) -> list[str] | None:
    """Return the names of the columns if this is a table of any library."""
    if isinstance(data, Mapping | np.ndarray) or not hasattr(data, "__getitem__"):
        return None
    names = getattr(data, "column_names", None)
    if names is None and (hasattr(data, "to_numpy") or hasattr(data, "to_arrow")):
        names = getattr(data, "columns", None)
    return None if names is None or not hasattr(data, "__len__") else [str(n) for n in names]


def _read_columns(data: Any, names: list[str], wanted: Sequence[str]) -> dict[str, np.ndarray]:
    missing = [n for n in wanted if n not in names]
    if missing:
        raise ShapeError(
            f"the table has no column {', '.join(map(repr, missing))}\n"
            f"hint: its columns are {', '.join(names)}; the model needs {', '.join(wanted)}"
        )
    return {n: _column(n, data[n]) for n in wanted or names}


def _column(name: str, values: Any) -> np.ndarray:
    array = to_array(values)
    if array.dtype != object:
        return array
    try:
        return np.stack([to_array(v) for v in array]) if len(array) else array
    except ValueError as error:
        raise ShapeError(f"column {name!r} has rows of different shapes") from error


def length(source: Source) -> int | None:
    """Return the number of batches per epoch, or ``None`` if it is unknown."""
    try:
        return len(source)
    except TypeError:
        return None


class Arrays:
    """Arrays of equal length, cut into batches."""

    def __init__(
        self,
        data: tuple[Any, ...] | Mapping[str, Any],
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
    ) -> None:
        if batch_size < 1:
            raise ShapeError(f"batch_size must be at least 1, got {batch_size}")
        keys = list(data) if isinstance(data, Mapping) else None
        values = data.values() if isinstance(data, Mapping) else data
        self._keys, self._arrays = keys, [to_array(v) for v in values]
        if any(a.ndim == 0 for a in self._arrays):
            raise ShapeError("an array of the data is a scalar\nhint: axis 0 must be the samples")
        lengths = {len(a) for a in self._arrays}
        if len(lengths) != 1:
            names = keys or range(len(self._arrays))
            listing = ", ".join(f"{n}: {len(a)}" for n, a in zip(names, self._arrays, strict=True))
            raise ShapeError(f"arrays have different lengths: {listing}")
        (self.samples,) = lengths
        self._size, self._shuffle, self._seed = batch_size, shuffle, seed
        self._end = self.samples - self.samples % batch_size if drop_last else self.samples
        if not self._end:
            raise ShapeError(
                f"{self.samples} samples are fewer than one batch of {batch_size}\n"
                "hint: use a smaller batch_size, or drop_last=False"
            )

    def __len__(self) -> int:
        return -(-self._end // self._size)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch."""
        order = shuffled(self.samples, self._seed, epoch) if self._shuffle else None
        for first in range(start * self._size, self._end, self._size):
            end = min(first + self._size, self._end)
            index = slice(first, end) if order is None else order[first:end]
            rows = np.arange(first, end) if order is None else order[first:end]
            arrays = [a[index] for a in self._arrays]
            if self._keys is None:
                yield Batch(tuple(arrays), {}, rows)
            else:
                yield Batch((), dict(zip(self._keys, arrays, strict=True)), rows)


class Batches:
    """Batches of the caller's own: a function from the epoch to an iterable."""

    def __init__(self, make_batches: Callable[[int], Iterable[Any]]) -> None:
        self._make_batches = make_batches

    def __len__(self) -> int:
        return len(self._make_batches(0))  # type: ignore[arg-type]

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch; skipped batches are computed as well."""
        for item in itertools.islice(self._make_batches(epoch), start, None):
            yield _as_batch(item)


def _as_batch(item: Any) -> Batch:
    if isinstance(item, Batch):
        return item
    if isinstance(item, Mapping):
        return Batch((), dict(item))
    if isinstance(item, tuple | list):
        return Batch(tuple(item), {})
    return Batch((item,), {})


def _per_epoch(data: Any, seed: int) -> Callable[[int], Iterable[Any]]:
    """Return a function from the epoch to the batches, which seeds samplers and generators."""
    is_iterator = iter(data) is data

    def make_batches(epoch: int) -> Iterable[Any]:
        if is_iterator and epoch > 0:
            raise ShapeError(
                "an iterator can only be read in one epoch\n"
                "hint: pass a list, a DataLoader, or a function from the epoch to an iterable"
            )
        # torch: a DistributedSampler has set_epoch, a shuffling DataLoader has a generator.
        owner: Any
        for owner in (data, getattr(data, "sampler", None)):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)
        generator: Any = getattr(data, "generator", None)
        if hasattr(generator, "manual_seed"):
            generator.manual_seed(_hash_seed(seed, epoch) >> 1)
        return data

    return make_batches


def shuffled(n: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of ``range(n)`` that depends on seed and epoch only.

    The indices are sorted by a hash, since numpy's generators may change between versions.

    >>> [int(i) for i in shuffled(5, seed=0, epoch=0)]
    [3, 4, 0, 2, 1]
    """
    keys = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    keys += np.uint64(_hash_seed(seed, epoch))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(factor)
    return np.argsort(keys ^ (keys >> np.uint64(31)), kind="stable")


def _hash_seed(seed: int, epoch: int) -> int:
    """Return 64 bits that depend on seed and epoch."""
    value = (seed * 0x9E3779B97F4A7C15 + (epoch + 1) * 0xD1B54A32D192ED03) & _MASK_64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = ((value ^ (value >> shift)) * factor) & _MASK_64
    return value ^ (value >> 31)


_PASS_THROUGH = (
    "Cast",
    "Concat",
    "Flatten",
    "Identity",
    "Pad",
    "Reshape",
    "Slice",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
    "Where",
)
_LOSSES = ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")


class LabelClasses(NamedTuple):
    """The labels that a target may contain."""

    size: int
    ignored: frozenset[int]


def explain_label_error(
    trainer: Trainer,
    error: OnnxTrainError,
    feeds: Mapping[str, np.ndarray],
    rows: np.ndarray | None = None,
) -> OnnxTrainError:
    """Return an error that names the wrong label of a batch, if one is the cause.

    Args:
        trainer: ran the batch.
        error: onnxruntime's error, which is returned if the labels are fine.
        feeds: the batch.
        rows: indices of the batch's rows in the data.
    """
    if trainer.manifest.model("eval") is None:
        return error
    targets = {t.name: feeds[t.name] for t in trainer.batch_specs if t.role == "target"}
    problem = label_problem(runtime.load_graph(trainer.artifacts.source("eval")), targets, rows)
    return error if problem is None else LabelError(problem)


def label_problem(
    model: onnx.ModelProto, batch: Mapping[str, np.ndarray], rows: np.ndarray | None = None
) -> str | None:
    """Return the message for the first label of a batch that is not a class, if there is one.

    Args:
        model: computes the loss.
        batch: arrays by input name.
        rows: indices of the batch's rows in the data.
    """
    for name, labels in batch.items():
        if labels.dtype.kind not in "iu" or not labels.ndim:
            continue
        known = label_classes(model, name)
        if known is None:
            continue
        bad = (labels < 0) | (labels >= known.size)
        for ignored in known.ignored:
            bad &= labels != ignored
        if bad.any():
            index = tuple(int(i) for i in np.argwhere(bad)[0])
            value, row = int(labels[index]), index[0]
            where = f"row {row} of the batch" if rows is None else f"row {int(rows[row])}"
            many = f" (and {int(bad.sum()) - 1} more of the batch)" if bad.sum() > 1 else ""
            return (
                f"{name!r} has {value} in {where}{many}; the model has {known.size} classes: "
                f"0 to {known.size - 1}\n"
                f"hint: {_label_hint(labels, known)}"
            )
    return None


def _label_hint(labels: np.ndarray, known: LabelClasses) -> str:
    if labels.max() == known.size and labels.min() >= 1:
        return "labels count from 0; subtract 1"
    ignored = ", ".join(map(str, sorted(known.ignored)))
    return f"rows with label {ignored} are ignored" if ignored else "labels count from 0"


def label_classes(model: onnx.ModelProto, name: str) -> LabelClasses | None:
    """Return the classes that the target ``name`` chooses from, if a loss determines them."""
    constants = {t.name: t for t in model.graph.initializer}
    return _classes_in(model.graph, {name}, constants)


def _classes_in(
    graph: onnx.GraphProto, labels: set[str], constants: Mapping[str, onnx.TensorProto]
) -> LabelClasses | None:
    """Return the classes of labels in a graph, or in the body of a Scan.

    Args:
        graph: the graph.
        labels: names of values that are labels; grows with values computed from them.
        constants: initializers of the model.
    """
    count, ignored = None, set[int]()
    for node in graph.node:
        given = {i for i, x in enumerate(node.input) if x in labels}
        if not given:
            continue
        if given & ({1, 2} if node.op_type == "Where" else {0}) and node.op_type in _PASS_THROUGH:
            labels.update(node.output)
        elif node.op_type == "Equal":
            ignored.update(_scalar_constants(constants, (x for x in node.input if x not in labels)))
        elif node.op_type == "Scan":
            body = next(a.g for a in node.attribute if a.name == "body")
            inner = _classes_in(body, {body.input[i].name for i in given}, constants)
            if inner is not None:
                count, ignored = inner.size, ignored | inner.ignored
        elif 1 in given and node.op_type in (*_LOSSES, "GatherElements"):
            attributes = {a.name: a.i for a in node.attribute}
            axis = 1 if node.op_type in _LOSSES else attributes.get("axis", 0)
            count = count or _static_size(graph, node.input[0], axis)
            if "ignore_index" in attributes:
                ignored.add(attributes["ignore_index"])
    return None if count is None else LabelClasses(count, frozenset(ignored))


def _scalar_constants(
    constants: Mapping[str, onnx.TensorProto], names: Iterator[str]
) -> Iterator[int]:
    for name in names:
        tensor = constants.get(name)
        if tensor is not None and not tensor.dims and not tensor.external_data:
            yield int(ir.serde.deserialize_tensor(tensor).numpy())


def _static_size(graph: onnx.GraphProto, name: str, axis: int) -> int | None:
    for value in (*graph.value_info, *graph.input, *graph.output):
        if value.name == name:
            dims: Any = value.type.tensor_type.shape.dim
            if -len(dims) <= axis < len(dims) and dims[axis].HasField("dim_value"):
                return dims[axis].dim_value
    return None
