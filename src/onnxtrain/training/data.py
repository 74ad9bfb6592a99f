"""Batches from arrays, from iterables, and from torch's DataLoader."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from onnxtrain.errors import ShapeError
from onnxtrain.runtime.feeds import to_array

_WORD = 0xFFFFFFFFFFFFFFFF


class Batch(NamedTuple):
    """Tensors by position and by name."""

    positional: tuple[Any, ...]
    named: dict[str, Any]
    rows: np.ndarray | None = None
    """The numbers of its samples in the data, if they are known."""
    weight: int | None = None
    """What it weighs in means over batches, if that is not the number of its samples."""

    @property
    def size(self) -> int:
        """The number of samples, or what counts as such: the length of the first tensor."""
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
    """Where batches come from."""

    def __len__(self) -> int:
        """Return the number of batches of an epoch; ``TypeError`` if it is not known."""
        ...

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch, counted from 0, without the first ``start``."""
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
    """Return the batches that ``data`` stands for.

    Args:
        data: an array, a tuple of arrays (by position) or a dict of arrays (by name), which are cut
            into batches here; or a list or other iterable of batches, each one of these or a
            :class:`Batch`; or a function that gives such an iterable for an epoch.
        batch_size: of arrays.
        shuffle: arrays anew in each epoch, in an order that follows from seed and epoch alone.
        seed: of the order.
        drop_last: leave a short last batch out.
        columns: those that are taken of a table: a pandas or polars DataFrame, an Arrow table or a
            ``Dataset`` of Hugging Face. The others stay unread.
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
        make: Any = data
        return Batches(make)
    if isinstance(data, Iterable):
        return Batches(_repeated(data, seed))
    raise ShapeError(
        f"no data: {type(data).__name__}\n"
        "hint: give a tuple or dict of arrays, or an iterable of batches"
    )


def _column_names(data: Any) -> list[str] | None:
    """Return the names of the columns if this is a table, whoever's it is."""
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
            f"hint: it has {', '.join(names)}; the model takes {', '.join(wanted)}"
        )
    return {n: _column(n, data[n]) for n in wanted or names}


def _column(name: str, values: Any) -> np.ndarray:
    array = to_array(values)
    if array.dtype != object:
        return array
    try:
        return np.stack([to_array(v) for v in array]) if len(array) else array
    except ValueError as error:
        raise ShapeError(f"column {name!r} has rows of different shape") from error


def length(source: Source) -> int | None:
    """Return the number of batches of an epoch, if it is known."""
    try:
        return len(source)
    except TypeError:
        return None


class Arrays:
    """Arrays of one length, cut into batches."""

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
            raise ShapeError(f"batch_size must be at least 1: {batch_size}")
        keys = list(data) if isinstance(data, Mapping) else None
        values = data.values() if isinstance(data, Mapping) else data
        self._keys, self._arrays = keys, [to_array(v) for v in values]
        if any(a.ndim == 0 for a in self._arrays):
            raise ShapeError(
                "an array of the data has no samples axis\nhint: axis 0 counts samples"
            )
        lengths = {len(a) for a in self._arrays}
        if len(lengths) != 1:
            names = keys or range(len(self._arrays))
            listing = ", ".join(f"{n}: {len(a)}" for n, a in zip(names, self._arrays, strict=True))
            raise ShapeError(f"arrays of different length: {listing}")
        (self.samples,) = lengths
        self._size, self._shuffle, self._seed = batch_size, shuffle, seed
        self._end = self.samples - self.samples % batch_size if drop_last else self.samples
        if not self._end:
            raise ShapeError(f"{self.samples} samples make no batch of {batch_size}")

    def __len__(self) -> int:
        return -(-self._end // self._size)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch."""
        order = shuffled(self.samples, self._seed, epoch) if self._shuffle else None
        for at in range(start * self._size, self._end, self._size):
            end = min(at + self._size, self._end)
            pick = slice(at, end) if order is None else order[at:end]
            rows = np.arange(at, end) if order is None else order[at:end]
            arrays = [a[pick] for a in self._arrays]
            if self._keys is None:
                yield Batch(tuple(arrays), {}, rows)
            else:
                yield Batch((), dict(zip(self._keys, arrays, strict=True)), rows)


class Batches:
    """Batches that somebody else makes, anew for each epoch."""

    def __init__(self, make: Callable[[int], Iterable[Any]]) -> None:
        self._make = make

    def __len__(self) -> int:
        return len(self._make(0))  # type: ignore[arg-type]

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch; those left out are made all the same."""
        for item in itertools.islice(self._make(epoch), start, None):
            yield _as_batch(item)


def _as_batch(item: Any) -> Batch:
    if isinstance(item, Batch):
        return item
    if isinstance(item, Mapping):
        return Batch((), dict(item))
    if isinstance(item, tuple | list):
        return Batch(tuple(item), {})
    return Batch((item,), {})


def _repeated(data: Any, seed: int) -> Callable[[int], Iterable[Any]]:
    """Return a function from the epoch to the batches; sources that can be seeded are."""
    exhausts_itself = iter(data) is data

    def make(epoch: int) -> Iterable[Any]:
        if exhausts_itself and epoch > 0:
            raise ShapeError(
                "an iterator gives its batches only once\n"
                "hint: pass a list, a DataLoader, or a function from the epoch to an iterable"
            )
        # torch: a sampler of several processes, and the generator that a DataLoader shuffles with.
        owner: Any
        for owner in (data, getattr(data, "sampler", None)):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)
        generator: Any = getattr(data, "generator", None)
        if hasattr(generator, "manual_seed"):
            generator.manual_seed(_mix(seed, epoch) >> 1)
        return data

    return make


def shuffled(n: int, seed: int, epoch: int) -> np.ndarray:
    """Return the numbers below ``n`` in an order that follows from seed and epoch alone.

    They are sorted by a hash, so that the order is the same with every version of numpy.

    >>> [int(i) for i in shuffled(5, seed=0, epoch=0)]
    [3, 4, 0, 2, 1]
    """
    keys = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    keys += np.uint64(_mix(seed, epoch))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(factor)
    return np.argsort(keys ^ (keys >> np.uint64(31)), kind="stable")


def _mix(seed: int, epoch: int) -> int:
    """Return 64 bits that depend on both numbers."""
    value = (seed * 0x9E3779B97F4A7C15 + (epoch + 1) * 0xD1B54A32D192ED03) & _WORD
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = ((value ^ (value >> shift)) * factor) & _WORD
    return value ^ (value >> 31)
