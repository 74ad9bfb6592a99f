"""Batches of a training run.

:func:`as_source` turns arrays, tables, files, lists, torch's DataLoader and functions into a
:class:`Source`: :class:`Arrays` in memory, :class:`Batches` of the caller, or the rows of a
:class:`Stream`, which may be larger than memory. :func:`columns_of` reads any of them as named
columns, which the rules of :mod:`onnxtrain.training.columns` convert. Batches depend on data, seed
and epoch only, so a resumed run sees the same ones.
"""

from __future__ import annotations

import contextvars
import copy
import glob
import inspect
import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from onnxtrain.errors import OnnxTrainError, ShapeError, by_caller
from onnxtrain.manifest import TensorSpec
from onnxtrain.runtime.feeds import has_shape, match_target, to_array
from onnxtrain.training.columns import Classes, Columns, Origin, arrays_of
from onnxtrain.training.data_files import read_columns, read_data

_MASK_64 = 0xFFFFFFFFFFFFFFFF


class Batch(NamedTuple):
    """The arrays of a batch by the names of inputs and targets."""

    arrays: dict[str, Any]
    rows: np.ndarray | None = None
    """Indices of its samples in the data, if they are known."""
    weight: float | None = None
    """Weight in means over batches; the number of samples by default."""
    origin: Origin | FileRows = Origin()
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
            Hugging Face ``Dataset``), the path of a file, or a :class:`Stream`, which are cut into
            batches; a list or other iterable of batches, each one of these or a :class:`Batch`; or
            a function that returns such an iterable, with the epoch as its argument or without
            arguments.
        specs: the inputs and targets of a batch.
        batch_size: for arrays, tables, files and streams.
        shuffle: shuffle these in each epoch; the order depends on seed and epoch only.
        seed: random seed of the order.
        drop_last: drop the last batch of an epoch if it is smaller.
        classes: class names by target; by default the sorted labels of the data.
        part: the rows of a batch that this worker computes; all of them by default. Batches of a
            torch ``DistributedSampler`` are parts already.
    """
    known = {name: list(names) for name, names in (classes or {}).items()}
    origin = Origin()
    if isinstance(data, Stream):
        return StreamedRows(
            data,
            specs,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            classes=known,
            part=part,
        )
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
        self.classes, self._origin, self._part = classes, origin, part
        self._size, self._shuffle, self._seed = batch_size, shuffle, seed
        self._drop_last = drop_last
        self._select(np.arange(_number_of_rows(arrays)))
        # Targets as a whole: an error names the row of the data, before the first step.
        targets = {s.name: s for s in specs if s.role == "target"}
        self._arrays = {
            n: match_target(targets[n], a, "") if n in targets else a for n, a in arrays.items()
        }

    def _select(self, rows: np.ndarray) -> None:
        self._rows, self.samples = rows, len(rows)
        self._end = self.samples - self.samples % self._size if self._drop_last else self.samples
        if not self.samples:
            raise ShapeError("the data has no samples")
        if not self._end:
            raise ShapeError(
                f"{self.samples} samples are fewer than one batch of {self._size}\n"
                f"hint: use a smaller {by_caller('batch_size, or drop_last=False', '--batch-size')}"
            )

    def split(
        self, fraction: float, batch_size: int, *, drop_last: bool = False
    ) -> tuple[Arrays, Arrays]:
        """Return the data without a random part of its rows, and these rows in their order.

        Args:
            fraction: of the rows; which ones depends on the seed only.
            batch_size: of the part.
            drop_last: as for :func:`as_source`, of the part.
        """
        count = round(self.samples * fraction)
        if not 0 < count < self.samples:
            raise ShapeError(
                f"validation={fraction:g} of {self.samples} samples leaves none to "
                + ("train on" if count else "validate on")
            )
        held = held_out(self.samples, count, self._seed)
        train, part = copy.copy(self), copy.copy(self)
        part._size, part._drop_last, part._shuffle, part._part = batch_size, drop_last, False, None
        part._select(self._rows[held])
        train._select(np.delete(self._rows, held))
        return train, part

    def __len__(self) -> int:
        return -(-self._end // self._size)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch."""
        whole = self.samples == len(next(iter(self._arrays.values())))
        order = shuffled(self.samples, self._seed, epoch) if self._shuffle else None
        for first in range(start * self._size, self._end, self._size):
            end = min(first + self._size, self._end)
            if self._part is not None:
                cut = self._part(end - first)
                first, end = first + cut.start, first + cut.stop
            rows = self._rows[slice(first, end) if order is None else order[first:end]]
            index = slice(first, end) if order is None and whole else rows
            yield Batch({n: a[index] for n, a in self._arrays.items()}, rows, origin=self._origin)


def _number_of_rows(arrays: Mapping[str, np.ndarray]) -> int:
    scalars = [name for name, a in arrays.items() if a.ndim == 0]
    if scalars:
        raise ShapeError(f"{scalars[0]!r} is a scalar\nhint: axis 0 must be the samples")
    lengths = {len(a) for a in arrays.values()}
    if len(lengths) != 1:
        listing = ", ".join(f"{n}: {len(a)}" for n, a in arrays.items())
        raise ShapeError(f"arrays have different lengths: {listing}")
    return lengths.pop()


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
        if _is_row(arrays, self._specs):
            shapes = ", ".join(f"{n} {list(a.shape)}" for n, a in arrays.items())
            raise ShapeError(
                f"the data gives single rows, and batches are expected: {shapes}\n"
                "hint: fit(onnxtrain.Stream(rows), batch_size=32) makes batches"
            )
        return Batch(arrays)


def _is_row(arrays: Mapping[str, np.ndarray], specs: Sequence[TensorSpec]) -> bool:
    return all(has_shape(arrays[s.name], s.shape[1:]) for s in specs)


class FileRows(NamedTuple):
    """Rows of several files, for messages; a row's id is ``file * 2**32 + row``."""

    paths: Sequence[Path]

    def rows(self, ids: Sequence[int]) -> str:
        """Return the places of rows.

        >>> FileRows([Path("a.npz"), Path("b.npz")]).rows([3, (1 << 32) + 7])
        'a.npz: row 3; b.npz: row 7'
        """
        places = {}
        for i in ids[:5]:
            places.setdefault(i >> 32, []).append(i & 0xFFFFFFFF)
        return "; ".join(Origin(str(self.paths[f])).rows(rows) for f, rows in places.items())


class Stream:
    """Rows of a data set that may be larger than memory, read in order, shuffled in a buffer.

    The order depends on the data, the trainer's seed and the epoch only, so that resuming is exact.
    A resumed run reads the batches again that the epoch has had.

    Args:
        rows: files: a path with wildcards (``"shards/*.npz"``) or a list of paths, each of which
            fits into memory; or an iterable, or a function from the epoch to one, of pieces: tables
            or arrays of any number of rows, as ``pandas.read_csv(path, chunksize=10_000)`` gives
            them, or single rows.
        buffer: number of rows in memory, among which rows are shuffled; files are also read in
            another order in each epoch.
        prefetch: number of batches that a background thread prepares; 0 disables the thread.

    Example::

        stream = onnxtrain.Stream(lambda: pandas.read_csv("big.csv", chunksize=10_000))
        trainer.fit(stream, batch_size=64)
    """

    def __init__(self, rows: Any, *, buffer: int = 10_000, prefetch: int = 4) -> None:
        if buffer < 1:
            raise OnnxTrainError(f"buffer must be at least 1, got {buffer}")
        if prefetch < 0:
            raise OnnxTrainError(f"prefetch must not be negative, got {prefetch}")
        self.rows, self.buffer, self.prefetch = rows, buffer, prefetch


_ROW_IDS = ""  # the column of row numbers


class StreamedRows:
    """Batches of a :class:`Stream`."""

    def __init__(
        self,
        stream: Stream,
        specs: Sequence[TensorSpec],
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        classes: Classes,
        part: Part | None = None,
    ) -> None:
        self._stream, self._specs, self.classes, self._part = stream, specs, classes, part
        self._size, self._shuffle, self._seed = batch_size, shuffle, seed
        self._drop_last = drop_last
        self._files = _files(stream.rows)
        self._origin = Origin() if self._files is None else FileRows(self._files)
        if self._files is None:
            rows = stream.rows
            is_function = callable(rows) and not hasattr(rows, "__iter__")
            self._items = _function_of_epoch(rows) if is_function else _per_epoch(rows, seed)

    def __len__(self) -> int:
        raise TypeError("the number of rows is unknown")

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch; skipped batches are read as well."""
        pieces = self._pieces(epoch)
        if self._shuffle:
            pieces = self._mixed(pieces, epoch)
        batches = itertools.islice(self._cut(pieces), start, None)
        size = self._stream.prefetch
        return prefetched(batches, size) if size else batches

    def _pieces(self, epoch: int) -> Iterator[dict[str, np.ndarray]]:
        """Read pieces of any size, with the numbers of their rows."""
        if self._files is not None:
            n = len(self._files)
            for i in shuffled(n, self._seed, epoch) if self._shuffle else range(n):
                columns, origin = read_columns(self._files[i])
                yield self._piece(columns, (int(i) << 32), origin)
            return
        first = 0
        for item in self._items(epoch):
            columns = columns_of(tuple(item) if isinstance(item, list) else item, self._specs)
            if columns is None:
                raise ShapeError(
                    f"a stream must give tables, arrays or rows, got {type(item).__name__}\n"
                    f"hint: its arrays are {', '.join(s.name for s in self._specs)}"
                )
            piece = self._piece(columns, first, Origin())
            first += len(piece[_ROW_IDS])
            yield piece

    def _piece(self, columns: Columns, first: int, origin: Origin) -> dict[str, np.ndarray]:
        arrays, _ = arrays_of(columns, self._specs, self.classes, origin, whole=False)
        if _is_row(arrays, self._specs):
            arrays = {n: a[np.newaxis] for n, a in arrays.items()}
        rows = _number_of_rows(arrays)
        for spec in self._specs:
            if spec.role == "target":
                arrays[spec.name] = match_target(spec, arrays[spec.name], "")
        return {**arrays, _ROW_IDS: np.arange(first, first + rows)}

    def _mixed(
        self, pieces: Iterable[dict[str, np.ndarray]], epoch: int
    ) -> Iterator[dict[str, np.ndarray]]:
        """Shuffle rows in a buffer: when it is full, half of it stays for the next rows."""
        seed, turns = _hash_seed(self._seed, epoch), itertools.count()

        def mix() -> dict[str, np.ndarray]:
            rows = _concatenated(pool)
            order = shuffled(len(rows[_ROW_IDS]), seed, next(turns))
            return {n: a[order] for n, a in rows.items()}

        pool: list[dict[str, np.ndarray]] = []
        size = 0
        for piece in pieces:
            pool.append(piece)
            size += len(piece[_ROW_IDS])
            if size >= self._stream.buffer:
                rows, keep = mix(), self._stream.buffer // 2
                yield {n: a[keep:] for n, a in rows.items()}
                pool, size = [{n: a[:keep] for n, a in rows.items()}], keep
        if size:
            yield mix()

    def _cut(self, pieces: Iterable[dict[str, np.ndarray]]) -> Iterator[Batch]:
        rest: list[dict[str, np.ndarray]] = []
        size = 0
        for piece in pieces:
            rest.append(piece)
            size += len(piece[_ROW_IDS])
            if size >= self._size:
                rows, used = _concatenated(rest), size - size % self._size
                for first in range(0, used, self._size):
                    yield self._batch(rows, slice(first, first + self._size))
                rest, size = [{n: a[used:] for n, a in rows.items()}], size % self._size
        if size and not self._drop_last:
            yield self._batch(_concatenated(rest), slice(None))

    def _batch(self, rows: Mapping[str, np.ndarray], part: slice) -> Batch:
        arrays = {n: a[part] for n, a in rows.items() if n != _ROW_IDS}
        batch = Batch(arrays, rows[_ROW_IDS][part], origin=self._origin)
        return batch if self._part is None else batch.part(self._part)


def _files(rows: Any) -> list[Path] | None:
    """Return the files of a stream, ``None`` if it reads none."""
    is_path = isinstance(rows, str | os.PathLike)
    if is_path:
        paths = [Path(p) for p in sorted(glob.glob(os.fspath(rows)))]
        if not paths:
            raise OnnxTrainError(f"{rows}: no such file\nhint: Stream('shards/*.npz')")
        return paths
    if isinstance(rows, list | tuple) and all(isinstance(p, str | os.PathLike) for p in rows):
        return [Path(p) for p in rows]
    return None


def _concatenated(pieces: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    if len(pieces) == 1:
        return dict(pieces[0])
    try:
        return {n: np.concatenate([p[n] for p in pieces]) for n in pieces[0]}
    except ValueError as error:
        raise ShapeError(
            f"rows of a stream have different shapes: {error}\nhint: pad them to one length"
        ) from error


def prefetched(items: Iterator[Batch], size: int) -> Iterator[Batch]:
    """Yield items that a background thread computes, up to ``size`` of them ahead."""
    ready: queue.Queue[tuple[Batch | None, BaseException | None]] = queue.Queue(size)
    stopped = threading.Event()

    def put(item: Batch | None, error: BaseException | None = None) -> None:
        while not stopped.is_set():
            try:
                ready.put((item, error), timeout=0.1)
            except queue.Full:
                continue
            return

    def work() -> None:
        try:
            for item in items:
                put(item)
                if stopped.is_set():
                    return
            put(None)
        except BaseException as error:
            put(None, error)

    # With the context of the caller, which decides how hints are worded.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item
    finally:
        stopped.set()
        thread.join(timeout=10)


Transform = Callable[..., Mapping[str, Any]]
"""A function of a batch, a dict of arrays, and of a random generator if it takes one."""


class Transformed:
    """Batches that a function of the caller changes, such as augmentation.

    Each batch has a random generator of its own, which depends on seed, epoch and position.
    """

    def __init__(
        self, source: Source, transform: Transform, specs: Sequence[TensorSpec], seed: int
    ) -> None:
        self._source, self._seed, self.classes = source, seed, source.classes
        self._names = [s.name for s in specs]
        try:
            inspect.signature(transform).bind({}, None)
            self._transform = transform
        except TypeError:
            self._transform = lambda batch, rng: transform(batch)

    def __len__(self) -> int:
        return len(self._source)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch."""
        for i, batch in enumerate(self._source.batches(epoch, start), start):
            # Copies: a transform may write, and slices are the arrays of the caller.
            arrays = {n: np.array(a) for n, a in batch.arrays.items()}
            # Workers have different rows of a batch, and draw different values.
            first = 0 if batch.rows is None or not len(batch.rows) else int(batch.rows[0])
            rng = np.random.default_rng([self._seed, epoch, i, first])
            changed = self._transform(arrays, rng)
            if not isinstance(changed, Mapping) or {*changed} != {*self._names}:
                got = list(changed) if isinstance(changed, Mapping) else type(changed).__name__
                raise ShapeError(
                    f"transform must return a dict with {', '.join(self._names)}, got {got}\n"
                    "hint: change the batch that it gets and return it"
                )
            yield batch._replace(arrays=dict(changed))


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


def held_out(n: int, count: int, seed: int) -> np.ndarray:
    """Return ``count`` of ``n`` rows for validation, sorted; they depend on the seed only."""
    # An epoch that no run reaches: the rows are independent of the order of training.
    return np.sort(shuffled(n, seed, 1 << 20)[:count])


def as_fraction(value: Any) -> float | None:
    """Return a fraction of the data, such as ``0.1`` or ``"0.1"``; ``None`` for data and files."""
    if not isinstance(value, str | os.PathLike | Real):
        return None
    try:
        return float(os.fspath(value) if isinstance(value, os.PathLike) else value)
    except ValueError:
        return None


def _hash_seed(seed: int, epoch: int) -> int:
    """Return 64 bits that depend on seed and epoch."""
    value = (seed * 0x9E3779B97F4A7C15 + (epoch + 1) * 0xD1B54A32D192ED03) & _MASK_64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = ((value ^ (value >> shift)) * factor) & _MASK_64
    return value ^ (value >> 31)
