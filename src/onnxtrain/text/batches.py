"""Batches of examples: padded or packed, with all that a model takes besides the ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from onnxtrain.errors import ShapeError
from onnxtrain.text.examples import IGNORED, Example
from onnxtrain.text.names import IDS, LABELS, MASK, POSITIONS, TYPES
from onnxtrain.training.data import Batch, shuffled

_KNOWN = (IDS, MASK, POSITIONS, TYPES, LABELS, "cache_position")


def pack(examples: Sequence[Example], length: int) -> list[Example]:
    """Return rows of at most ``length`` tokens with several examples in each.

    The first token of an example is not predicted from the one before it, and positions start
    again with each example. Attention still sees earlier examples of the row: a token that ends a
    text tells them apart. Longest first, each into the fullest row that has room for it.
    """
    order = sorted(range(len(examples)), key=lambda i: (-len(examples[i]), i))
    rows: list[list[int]] = []
    room: list[int] = []
    for i in order:
        size = len(examples[i])
        fits = [r for r in range(max(0, len(rows) - 64), len(rows)) if room[r] >= size]
        if fits:
            best = min(fits, key=lambda r: room[r])
            rows[best].append(i)
            room[best] -= size
        else:
            rows.append([i])
            room.append(length - size)
    return [_joined([examples[i] for i in row]) for row in rows]


def _joined(parts: Sequence[Example]) -> Example:
    labels = [np.concatenate([[IGNORED], e.labels[1:]]) for e in parts]
    positions = [np.arange(len(e)) for e in parts]
    return Example(
        np.concatenate([e.ids for e in parts]),
        np.concatenate(labels).astype(np.int64),
        parts[0].line,
        np.concatenate(positions),
    )


def inputs_for(
    rows: Sequence[Example], names: Sequence[str], *, pad: int = 0, multiple: int = 1
) -> dict[str, np.ndarray]:
    """Return the arrays of a batch by the names that a model has for them.

    Rows are filled up at the right, with labels that do not count. Mask, positions and types are
    made where the model takes them.

    Args:
        rows: the examples.
        names: inputs and targets of the model.
        pad: the token that rows are filled up with.
        multiple: lengths are rounded up to a multiple of this.

    Raises:
        ShapeError: the model takes something that cannot be made.
    """
    unknown = [n for n in names if n not in _KNOWN]
    if unknown:
        raise ShapeError(
            f"the model takes {', '.join(unknown)}, which does not follow from token ids\n"
            "hint: onnxtrain.text.without_cache takes caches away; else give such inputs as arrays"
        )
    length = -(-max(len(e) for e in rows) // multiple) * multiple
    shape = (len(rows), length)
    ids, mask = np.full(shape, pad, np.int64), np.zeros(shape, np.int64)
    labels, positions = np.full(shape, IGNORED, np.int64), np.zeros(shape, np.int64)
    for i, e in enumerate(rows):
        n = len(e)
        ids[i, :n], mask[i, :n], labels[i, :n] = e.ids, 1, e.labels
        positions[i, :n] = np.arange(n) if e.positions is None else e.positions
    made = {IDS: ids, MASK: mask, POSITIONS: positions, LABELS: labels}
    made |= {TYPES: np.zeros(shape, np.int64), "cache_position": np.arange(length)}
    return {name: made[name] for name in names}


class TokenBatches:
    """Batches of one epoch after the other, in an order that follows from seed and epoch.

    ``trainer.fit(batches)`` takes it as a function from the epoch to its batches. A batch weighs as
    much as it has tokens to learn, so that means over batches are means over tokens.

    Args:
        rows: examples, packed or not.
        names: inputs and targets of the model.
        batch_size: rows of a batch.
        pad: the token that rows are filled up with.
        seed: of the order; ``None`` keeps the order of the rows.
        multiple: lengths are rounded up to a multiple of this.
    """

    unit = "tokens"
    """What ``tokens`` counts."""

    def __init__(
        self,
        rows: Sequence[Example],
        names: Sequence[str],
        *,
        batch_size: int,
        pad: int = 0,
        seed: int | None = 0,
        multiple: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ShapeError(f"batch_size must be at least 1: {batch_size}")
        self.rows, self.names = list(rows), list(names)
        self.batch_size, self.seed = batch_size, seed
        self._pad, self._multiple = pad, multiple
        self.tokens = 0
        """Of all batches that were made so far."""

    def __call__(self, epoch: int) -> Epoch:
        """Return the batches of an epoch."""
        n = len(self.rows)
        order = np.arange(n) if self.seed is None else shuffled(n, self.seed, epoch)
        return Epoch(self, order)

    def batch(self, picked: Sequence[int]) -> Batch:
        """Return some rows as a batch."""
        rows = [self.rows[i] for i in picked]
        self.tokens += sum(len(e) for e in rows)
        arrays = inputs_for(rows, self.names, pad=self._pad, multiple=self._multiple)
        return Batch((), arrays, np.asarray(picked), max(1, sum(e.learned for e in rows)))


class GroupBatches(TokenBatches):
    """Batches whose rows come in groups: texts with a label each, or pairs that stay together.

    Args:
        groups: the texts of each group, which stand behind each other in a batch.
        labels: one per group, if there are any.
        names: inputs and targets of the model.
        batch_size: groups of a batch.
        pad: the token that rows are filled up with.
        seed: of the order; ``None`` keeps the order of the groups.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Example]],
        labels: np.ndarray | None,
        names: Sequence[str],
        *,
        batch_size: int,
        pad: int = 0,
        seed: int | None = 0,
    ) -> None:
        rows = [example for group in groups for example in group]
        super().__init__(rows, names, batch_size=batch_size, pad=pad, seed=seed)
        self.groups, self.labels = [list(g) for g in groups], labels

    def __call__(self, epoch: int) -> Epoch:
        """Return the batches of an epoch."""
        n = len(self.groups)
        return Epoch(self, np.arange(n) if self.seed is None else shuffled(n, self.seed, epoch))

    def batch(self, picked: Sequence[int]) -> Batch:
        """Return some groups as a batch."""
        rows = [example for i in picked for example in self.groups[i]]
        self.tokens += sum(len(e) for e in rows)
        arrays = inputs_for(rows, [n for n in self.names if n != LABELS], pad=self._pad)
        if LABELS in self.names and self.labels is not None:
            arrays[LABELS] = self.labels[np.asarray(picked)]
        return Batch((), arrays, np.asarray(picked), len(picked))


class Epoch:
    """The batches of one epoch, made when they are asked for."""

    def __init__(self, source: TokenBatches, order: np.ndarray) -> None:
        self._source, self._order = source, order

    def __len__(self) -> int:
        return -(-len(self._order) // self._source.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        size = self._source.batch_size
        for i in range(0, len(self._order), size):
            yield self._source.batch(self._order[i : i + size].tolist())


__all__ = ["Epoch", "GroupBatches", "TokenBatches", "inputs_for", "pack"]
