"""Batches of a training run, and labels that are not classes of the model.

:func:`as_source` turns arrays, tables, files, lists, torch's DataLoader and functions into a
:class:`Source`. :func:`columns_of` reads any of them as named columns, which the rules of
:mod:`onnxtrain.training.columns` convert. Batches depend on data, seed and epoch only, so a resumed
run sees the same ones. :func:`explain_label_error` names the row of a label that is out of range.
"""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import LabelError, OnnxTrainError, ShapeError, by_caller
from onnxtrain.manifest import TensorSpec
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.feeds import has_shape, match_target, to_array
from onnxtrain.training.columns import Classes, Columns, Origin, arrays_of
from onnxtrain.training.data_files import read_data

if TYPE_CHECKING:
    from onnxtrain.training.trainer import Trainer

_MASK_64 = 0xFFFFFFFFFFFFFFFF


class Batch(NamedTuple):
    """The arrays of a batch by the names of inputs and targets."""

    arrays: dict[str, Any]
    rows: np.ndarray | None = None
    """Indices of its samples in the data, if they are known."""
    weight: float | None = None
    """Weight in means over batches; the number of samples by default."""
    origin: Origin = Origin()
    """Where the rows come from, for messages."""

    def part(self, rows: Callable[[int], slice]) -> Batch:
        """Return a worker's part: arrays whose first axis is the samples are cut, others stay.

        Args:
            rows: the part of a number of samples.
        """
        shapes = {n: np.shape(value) for n, value in self.arrays.items()}
        count = next((int(shape[0]) for shape in shapes.values() if shape), 1)
        cut = rows(count)
        arrays = {
            n: value[cut] if shapes[n] and shapes[n][0] == count else value
            for n, value in self.arrays.items()
        }
        size = cut.stop - cut.start
        weight = size if self.weight is None else self.weight * size / count
        index = None if self.rows is None else self.rows[cut]
        return Batch(arrays, index, weight, self.origin)

    def places(self, indices: Sequence[int]) -> str:
        """Return where samples of the batch come from, as text."""
        if self.rows is None:
            return f"{Origin().rows(indices)} of the batch"
        return self.origin.rows(sorted(int(self.rows[i]) for i in indices))

    @property
    def size(self) -> float:
        """The weight, else the number of samples: the length of the first array."""
        if self.weight is not None:
            return self.weight
        shapes = (np.shape(value) for value in self.arrays.values())
        return next((int(shape[0]) for shape in shapes if shape), 1)


Part = Callable[[int], slice]
"""The rows of a worker, as a function of the number of rows of a batch."""


@runtime_checkable
class SplitsBatches(Protocol):
    """Batches of an epoch that know how to make a worker's part of each."""

    def parts(self, part: Part) -> Iterable[Any]:
        """Return the parts of a worker, one of each batch."""
        ...


class Source(Protocol):
    """Batches, epoch by epoch."""

    classes: Classes
    """Class names by target, if labels are texts."""

    def __len__(self) -> int:
        """Return the number of batches per epoch; raise ``TypeError`` if it is unknown."""
        ...

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch (from 0) without the first ``start`` batches."""
        ...


def as_source(
    data: Any,
    specs: Sequence[TensorSpec],
    *,
    batch_size: int,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    classes: Mapping[str, Sequence[str]] | None = None,
    part: Part | None = None,
) -> Source:
    """Return the batches of a data set.

    Args:
        data: arrays (a dict by name, or a tuple by position), a table (pandas, polars, Arrow, a
            Hugging Face ``Dataset``) or the path of a file, which are cut into batches; a list or
            other iterable of batches, each one of these or a :class:`Batch`; or a function that
            returns such an iterable, with the epoch as its argument or without arguments.
        specs: the inputs and targets of a batch.
        batch_size: for arrays, tables and files.
        shuffle: shuffle arrays in each epoch; the order depends on seed and epoch only.
        seed: random seed of the order.
        drop_last: drop the last batch of an epoch if it is smaller.
        classes: class names by target; by default the sorted labels of the data.
        part: the rows of a batch that this worker computes; all of them by default. Batches of a
            torch ``DistributedSampler`` are parts already.
    """
    known = {name: list(names) for name, names in (classes or {}).items()}
    origin = Origin()
    if isinstance(data, str | os.PathLike):
        arrays, known, origin = read_data(data, specs, known)
    elif (columns := columns_of(data, specs)) is not None:
        arrays, known = arrays_of(columns, specs, _feature_names(data, specs) | known)
    elif callable(data) and not hasattr(data, "__iter__"):
        return Batches(_function_of_epoch(data), specs, known, part)
    elif isinstance(data, Iterable):
        return Batches(_per_epoch(data, seed), specs, known, None if _is_split(data) else part)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        raise ShapeError(
            f"a {type(data).__name__} gives single rows, not batches\n"
            "hint: torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True)"
        )
    else:
        raise ShapeError(
            f"data of type {type(data).__name__} is not supported\n"
            "hint: pass a tuple or dict of arrays, a table, a path, or an iterable of batches"
        )
    return Arrays(
        arrays,
        specs,
        batch_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        classes=known,
        origin=origin,
        part=part,
    )


def _is_split(data: Any) -> bool:
    """Return whether a DataLoader gives each worker other rows: by torch's DistributedSampler."""
    samplers = (getattr(data, n, None) for n in ("sampler", "batch_sampler"))
    return any(hasattr(sampler, "num_replicas") for sampler in samplers)


def _function_of_epoch(function: Callable[..., Any]) -> Callable[[int], Iterable[Any]]:
    try:
        inspect.signature(function).bind(0)
    except TypeError:
        return lambda epoch: function()
    except ValueError:  # a builtin without a signature
        pass
    return function


def with_targets(data: Any, y: Any) -> Any:
    """Return the data of ``fit(X, y)``: the inputs, followed by the targets if there are any.

    Raises:
        OnnxTrainError: if ``y`` is a number.
    """
    if y is None:
        return data
    if np.ndim(y) == 0 and not isinstance(y, Mapping):
        raise OnnxTrainError(f"y must be the targets, got {y!r}\nhint: fit(data, epochs={y!r})")
    return (*data, y) if isinstance(data, tuple) else (data, y)


def columns_of(data: Any, specs: Sequence[TensorSpec]) -> Columns | None:
    """Return data in memory as columns by name; ``None`` for an iterable of batches.

    Args:
        data: a dict or tuple of arrays, an array, a table, a tuple of a table and targets, or
            torch's ``TensorDataset``.
        specs: the inputs and targets, which name arrays given by position.
    """
    if _is_tensor_dataset(data):
        data = data.tensors
    if isinstance(data, Mapping):
        _check_not_splits(data)
        return data
    names = _column_names(data)
    if names is not None:
        return _TableColumns(data, names)
    if isinstance(data, np.ndarray) or (hasattr(data, "shape") and hasattr(data, "dtype")):
        data = (data,)
    if not isinstance(data, tuple) or not data:
        return None
    first, *rest = data
    if rest and is_table(first):
        return None if any(isinstance(d, tuple) for d in rest) else _joined(data, specs)
    if any(isinstance(d, tuple | Mapping) for d in data):
        return None
    if len(data) > len(specs):
        expected = ", ".join(s.name for s in specs)
        raise ShapeError(f"got {len(data)} tensors, the model takes {expected}")
    if len(data) < len(specs):
        missing = ", ".join(s.name for s in specs[len(data) :])
        raise ShapeError(
            f"missing from the data: {missing}\n"
            f"hint: pass ({', '.join(s.name for s in specs)}), or a dict of arrays by name"
        )
    return dict(zip((s.name for s in specs), map(_values, data), strict=True))


def is_table(data: Any) -> bool:
    """Return whether data has named columns: a dict or a table of any library."""
    return isinstance(data, Mapping) or _column_names(data) is not None


def _is_tensor_dataset(data: Any) -> bool:
    tensors = getattr(data, "tensors", None)
    return isinstance(tensors, tuple) and hasattr(data, "__getitem__")


def _check_not_splits(data: Mapping[str, Any]) -> None:
    splits = [n for n, v in data.items() if is_table(v)]
    # A column of a table may be a table of one column, but never all of them.
    if splits and len(splits) == len(data):
        first = splits[0]
        raise ShapeError(
            f"a {type(data).__name__} has splits: {', '.join(map(repr, splits))}\n"
            f"hint: pass one of them: fit(data[{first!r}], ...)"
        )


def _joined(data: tuple[Any, ...], specs: Sequence[TensorSpec]) -> Columns | None:
    """Return the columns of a table of inputs and of targets by position or by name."""
    first, *rest = data
    inputs = (
        first if isinstance(first, Mapping) else _TableColumns(first, _column_names(first) or [])
    )
    targets = [s.name for s in specs if s.role == "target"]
    if len(rest) == 1 and isinstance(rest[0], Mapping):
        return {**inputs, **rest[0]} if targets and {*rest[0]} <= {*targets} else None
    if len(rest) != len(targets):
        return None
    return {**inputs, **dict(zip(targets, map(_values, rest), strict=True))}


def _values(data: Any) -> Any:
    """Return the values of a table without its names; one column is one array."""
    names = _column_names(data)
    if names is None:
        return data
    columns = _TableColumns(data, names)
    arrays = [to_array(columns[n], n) for n in names]
    return arrays[0] if len(arrays) == 1 else np.stack(arrays, 1)


class _TableColumns(Mapping[str, Any]):
    """The columns of a table of any library; only those that are read are converted."""

    def __init__(self, table: Any, names: Sequence[str]) -> None:
        # Hugging Face: whole columns of arrays instead of one Python object per cell.
        self._table = table.with_format("numpy") if hasattr(table, "with_format") else table
        # pandas numbers columns without names: 0, 1, ...
        labels = names if hasattr(table, "column_names") else table.columns
        self._labels = dict(zip(names, labels, strict=True))
        self._names = list(names)

    def __getitem__(self, name: str) -> Any:
        values = self._table[self._labels.get(name, name)]
        return values[:] if hasattr(self._table, "with_format") else values

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _column_names(data: Any) -> list[str] | None:
    """Return the names of the columns if this is a table of any library."""
    if isinstance(data, Mapping | np.ndarray) or not hasattr(data, "__getitem__"):
        return None
    names = getattr(data, "column_names", None)
    if names is None and (hasattr(data, "to_numpy") or hasattr(data, "to_arrow")):
        names = getattr(data, "columns", None)
    return None if names is None or not hasattr(data, "__len__") else [str(n) for n in names]


def _feature_names(data: Any, specs: Sequence[TensorSpec]) -> Classes:
    """Return the class names that a Hugging Face data set declares, by target."""
    features = getattr(data, "features", None)
    if not isinstance(features, Mapping):
        return {}
    columns = {n: f for n, f in features.items() if hasattr(f, "int2str")}
    targets = [s for s in specs if s.role == "target" and "int" in s.dtype]
    found = {t.name: columns.get(t.name) or columns.get(t.name.removesuffix("s")) for t in targets}
    return {name: list(f.names) for name, f in found.items() if f is not None}


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
        arrays: Mapping[str, np.ndarray],
        specs: Sequence[TensorSpec],
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        classes: Classes,
        origin: Origin = Origin(),  # noqa: B008
        part: Part | None = None,
    ) -> None:
        if batch_size < 1:
            raise ShapeError(f"batch_size must be at least 1, got {batch_size}")
        scalars = [name for name, a in arrays.items() if a.ndim == 0]
        if scalars:
            raise ShapeError(f"{scalars[0]!r} is a scalar\nhint: axis 0 must be the samples")
        lengths = {len(a) for a in arrays.values()}
        if len(lengths) != 1:
            listing = ", ".join(f"{n}: {len(a)}" for n, a in arrays.items())
            raise ShapeError(f"arrays have different lengths: {listing}")
        (self.samples,) = lengths
        self.classes, self._origin, self._part = classes, origin, part
        self._size, self._shuffle, self._seed = batch_size, shuffle, seed
        self._end = self.samples - self.samples % batch_size if drop_last else self.samples
        if not self._end:
            raise ShapeError(
                f"{self.samples} samples are fewer than one batch of {batch_size}\n"
                f"hint: use a smaller {by_caller('batch_size, or drop_last=False', '--batch-size')}"
            )
        # Targets as a whole: an error names the row of the data, before the first step.
        targets = {s.name: s for s in specs if s.role == "target"}
        self._arrays = {
            n: match_target(targets[n], a, "") if n in targets else a for n, a in arrays.items()
        }

    def __len__(self) -> int:
        return -(-self._end // self._size)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch."""
        order = shuffled(self.samples, self._seed, epoch) if self._shuffle else None
        for first in range(start * self._size, self._end, self._size):
            end = min(first + self._size, self._end)
            if self._part is not None:
                cut = self._part(end - first)
                first, end = first + cut.start, first + cut.stop
            index = slice(first, end) if order is None else order[first:end]
            rows = np.arange(first, end) if order is None else order[first:end]
            yield Batch({n: a[index] for n, a in self._arrays.items()}, rows, origin=self._origin)


class Batches:
    """Batches of the caller's own: a function from the epoch to an iterable."""

    def __init__(
        self,
        make_batches: Callable[[int], Iterable[Any]],
        specs: Sequence[TensorSpec],
        classes: Classes,
        part: Part | None = None,
    ) -> None:
        self._make_batches, self._specs, self.classes = make_batches, specs, classes
        self._part = part

    def __len__(self) -> int:
        return len(self._make_batches(0))  # type: ignore[arg-type]

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch; skipped batches are computed as well."""
        batches, part = self._make_batches(epoch), self._part
        if part is not None and isinstance(batches, SplitsBatches):
            batches, part = batches.parts(part), None
        for item in itertools.islice(batches, start, None):
            batch = self._batch(item)
            yield batch if part is None else batch.part(part)

    def _batch(self, item: Any) -> Batch:
        if isinstance(item, Batch):
            return item
        columns = columns_of(tuple(item) if isinstance(item, list) else item, self._specs)
        if columns is None:
            raise ShapeError(
                f"a batch must be a tuple or dict of arrays, got {type(item).__name__}\n"
                f"hint: its arrays are {', '.join(s.name for s in self._specs)}"
            )
        arrays, _ = arrays_of(columns, self._specs, self.classes, whole=False)
        if all(has_shape(arrays[s.name], s.shape[1:]) for s in self._specs):
            shapes = ", ".join(f"{n} {list(a.shape)}" for n, a in arrays.items())
            raise ShapeError(
                f"the data gives single rows, and batches are expected: {shapes}\n"
                "hint: torch.utils.data.DataLoader(rows, batch_size=32) makes batches"
            )
        return Batch(arrays)


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
    batch: Batch | None = None,
) -> OnnxTrainError:
    """Return an error that names the wrong label of a batch, if one is the cause.

    Args:
        trainer: ran the batch.
        error: onnxruntime's error, which is returned if the labels are fine.
        feeds: the arrays of the batch.
        batch: knows where its rows come from.
    """
    if trainer.manifest.model("eval") is None:
        return error
    targets = {t.name: feeds[t.name] for t in trainer.batch_specs if t.role == "target"}
    model = runtime.load_graph(trainer.artifacts.source("eval"))
    problem = label_problem(model, targets, batch or Batch({}))
    return error if problem is None else LabelError(problem)


def label_problem(
    model: onnx.ModelProto, targets: Mapping[str, np.ndarray], batch: Batch
) -> str | None:
    """Return the message for the first label of a batch that is not a class, if there is one.

    Args:
        model: computes the loss.
        targets: arrays by name.
        batch: knows where its rows come from.
    """
    for name, labels in targets.items():
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
            value, where = int(labels[index]), batch.places(index[:1])
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
