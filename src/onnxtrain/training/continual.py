"""Continual learning: keep a sample of earlier data, or the weights that it needs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain.checkpoint import state_key
from onnxtrain.errors import CheckpointError, OnnxTrainError
from onnxtrain.optim.transforms import ANCHOR, FISHER
from onnxtrain.training.data import as_source, with_targets

if TYPE_CHECKING:
    from onnxtrain.training.trainer import Trainer

PREFIX = "replay/"
"""Names of the rows in a checkpoint start with it."""


class ReplayBuffer:
    """A uniform sample of all rows that were added, within a limit of memory.

    Rows are chosen by reservoir sampling: each row that was ever added is in the buffer with the
    same probability. ``trainer.replay = buffer`` stores it in every checkpoint of the trainer.

    >>> buffer = ReplayBuffer(max_bytes=100 * 12)  # a row has 4 + 8 bytes
    >>> buffer.add({"x": np.zeros((1000, 1), np.float32), "labels": np.arange(1000)})
    >>> len(buffer), buffer.seen
    (100, 1000)
    >>> mixed = buffer.mix({"x": np.ones((20, 1), np.float32), "labels": np.zeros(20, np.int64)})
    >>> mixed["x"].shape
    (120, 1)

    Args:
        max_bytes: limit for the bytes of all rows.
        seed: random seed of the choice.
    """

    def __init__(self, max_bytes: int, *, seed: int = 0) -> None:
        self.max_bytes, self.seed, self.seen = max_bytes, seed, 0
        self._columns: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return next((len(a) for a in self._columns.values()), 0)

    @property
    def rows(self) -> dict[str, np.ndarray]:
        """The chosen rows, by input name."""
        return dict(self._columns)

    def add(self, data: Mapping[str, Any]) -> None:
        """Offer rows to the buffer: an array per input, as for ``Trainer.fit``."""
        columns = {name: np.asarray(a) for name, a in data.items()}
        counts = {len(a) for a in columns.values()}
        if len(counts) != 1:
            raise OnnxTrainError(f"columns have different numbers of rows: {sorted(counts)}")
        (count,) = counts
        if not count:
            return
        capacity = self.max_bytes // sum(a[:1].nbytes for a in columns.values())
        if not capacity:
            raise OnnxTrainError(f"a row has more than max_bytes={self.max_bytes}")
        self._check(columns)
        # Row i of all takes a place at random among the first i + 1, if that is in the buffer.
        order = np.arange(self.seen, self.seen + count)
        places = np.random.default_rng([self.seed, self.seen]).integers(0, order + 1)
        places = np.where(order < capacity, order, places)
        last = {int(p): i for i, p in enumerate(places) if p < capacity}
        size = min(self.seen + count, capacity)
        for name, new in columns.items():
            old = self._columns.get(name, new[:0])
            kept = np.concatenate([old, np.empty((size - len(old), *new.shape[1:]), new.dtype)])
            kept[list(last)] = new[list(last.values())]
            self._columns[name] = kept
        self.seen += count

    def mix(self, data: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return new rows followed by those of the buffer, to train on both."""
        columns = {name: np.asarray(a) for name, a in data.items()}
        self._check(columns)
        return {n: np.concatenate([a, self._columns.get(n, a[:0])]) for n, a in columns.items()}

    def _check(self, columns: Mapping[str, np.ndarray]) -> None:
        def kinds(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
            return {n: f"{a.dtype}{list(a.shape[1:])}" for n, a in arrays.items()}

        if self._columns and kinds(columns) != kinds(self._columns):
            raise OnnxTrainError(
                f"the rows differ from those of the buffer: {kinds(columns)}, "
                f"expected {kinds(self._columns)}"
            )

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the rows by their names in a checkpoint."""
        return {f"{PREFIX}{name}": a for name, a in self._columns.items()}

    def metadata(self) -> dict[str, int]:
        """Return what a checkpoint stores beside the rows."""
        return {"max_bytes": self.max_bytes, "seed": self.seed, "seen": self.seen}

    @classmethod
    def restore(
        cls, tensors: Mapping[str, np.ndarray], meta: Mapping[str, Any], label: str
    ) -> ReplayBuffer | None:
        """Return the buffer of a checkpoint, ``None`` if it has none."""
        stored = meta.get("replay")
        columns = {
            n.removeprefix(PREFIX): np.array(a) for n, a in tensors.items() if n.startswith(PREFIX)
        }
        if stored is None or not columns:  # C++ keeps the metadata, but not the rows
            return None
        try:
            buffer = cls(int(stored["max_bytes"]), seed=int(stored["seed"]))
            buffer.seen = int(stored["seen"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{label}: the replay buffer is damaged: {error}") from error
        rows = {a.shape[0] if a.ndim else 0 for a in columns.values()}
        row_bytes = sum(a.nbytes for a in columns.values()) // max(1, *rows)
        if rows != {min(buffer.seen, buffer.max_bytes // max(1, row_bytes))}:
            raise CheckpointError(f"{label}: the replay buffer is damaged: its rows are incomplete")
        buffer._columns = columns
        return buffer


def consolidate(trainer: Trainer, data: Any, y: Any = None, *, max_rows: int | None = None) -> None:
    """Set the slots ``anchor`` and ``fisher``, see :meth:`onnxtrain.Trainer.consolidate`."""
    slots = [s for s in trainer.manifest.state if s.slot == FISHER]
    if not slots:
        raise OnnxTrainError(
            "the optimizer has no elastic weight consolidation\n"
            "hint: build(..., optimizer='adamw:ewc=100')"
        )
    if (trainer.fixed_batch or 1) > 1:
        axis = f"{trainer.batch_specs[0].name}[0]"
        raise OnnxTrainError(
            f"consolidate needs the gradients of single rows, the model has batches of "
            f"{trainer.fixed_batch}\nhint: build(..., dims={{{axis!r}: 'batch'}}) frees the axis"
        )
    source = as_source(with_targets(data, y), trainer.batch_specs, batch_size=1)
    squares = {s.parameter: np.zeros(s.shape, np.float64) for s in slots}
    rows = 0
    for batch in itertools.islice(source.batches(0), max_rows):
        for name, gradient in trainer.gradients(**batch.arrays).items():
            squares[name] += np.square(gradient, dtype=np.float64)
        rows += 1
    if not rows:
        raise OnnxTrainError("no rows to consolidate")
    state = trainer.state_dict()
    for name, total in squares.items():
        fisher, anchor = state_key(name, FISHER), state_key(name, ANCHOR)
        state[fisher] = (state[fisher] + total / rows).astype(state[fisher].dtype)
        state[anchor] = state[name]
    trainer.load_state_dict(state)
