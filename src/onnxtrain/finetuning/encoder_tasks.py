"""Encoders: classes of texts, and vectors of texts that belong together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.finetuning.heads import head_weights, with_head
from onnxtrain.finetuning.options import FineTuneOptions
from onnxtrain.finetuning.tasks import Task, is_part, split
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io import load
from onnxtrain.losses import MultipleNegatives
from onnxtrain.text.batches import GroupBatches, TokenBatches
from onnxtrain.text.examples import Example, Examples, check_vocabulary
from onnxtrain.text.folder import ModelFolder
from onnxtrain.text.pooling import LOGITS, pooled, with_classifier
from onnxtrain.text.records import Record, Records
from onnxtrain.training.data_files.images import in_order

_SHOWN = 60


class _Encoded(Task):
    """Texts in groups."""

    forms: tuple[str, ...] = ()

    def __init__(self, folder: ModelFolder, options: FineTuneOptions, data: Any) -> None:
        super().__init__(folder, options)
        self.records = self._read(data)
        self.groups = self._encoded(self.records)
        self.train, self.held = self._split(options)

    def _read(self, data: Any) -> Records:
        records = self.read(data)
        if records.form not in self.forms:
            raise PrepareError(
                f"{records.name} has records of the form {records.form!r}, not "
                f"{' or '.join(self.forms)}\nhint: {self._hint()}"
            )
        return records

    def _hint(self) -> str:
        return '{"text": ..., "label": ...}'

    def _split(self, options: FineTuneOptions) -> tuple[list[int], list[int]]:
        """Return the numbers of groups to learn from, and of those held back."""
        if options.validation is not None and not is_part(options.validation):
            first = len(self.records.records)
            more = self._read(options.validation)
            self.records = Records((*self.records.records, *more.records), (), self.records.name)
            self.groups += self._encoded(more)
            return list(range(first)), list(range(first, len(self.groups)))
        numbers = Examples(tuple(_number(i) for i in range(len(self.groups))))
        train, held = split(numbers, options)
        return [e.line for e in train], [e.line for e in held]

    def _encoded(self, records: Records) -> list[list[Example]]:
        groups, cut = [], 0
        for record in records.records:
            group = [self._example(text, record) for text in self._texts(record)]
            cut += any(len(e) > self.length for e in group)
            groups.append([Example(e.ids[: self.length], e.labels[: self.length], e.line)
                           for e in group])  # fmt: skip
        if cut:
            self.notes.append(f"{records.name}: {cut} cut at {self.length} tokens")
        flat = Examples(tuple(e for group in groups for e in group))
        check_vocabulary(flat, self.folder.vocabulary, self.tokenizer)
        return groups

    def _example(self, text: str, record: Record) -> Example:
        assert self.tokenizer is not None
        ids = np.array(self.tokenizer.encode(text).ids, np.int64)
        return Example(ids, ids, record.line)

    def _texts(self, record: Record) -> list[str]:
        return [record.fields["text"]]

    def _labels(self) -> np.ndarray | None:
        return None

    def batches(self, names: Sequence[str], *, validation: bool = False) -> TokenBatches | None:
        """Return the batches."""
        picked = self.held if validation else self.train
        labels = self._labels()
        if not picked:
            return None
        return GroupBatches(
            [self.groups[i] for i in picked],
            None if labels is None else labels[picked],
            names,
            batch_size=self.options.batch_size,
            pad=self.pad,
            seed=None if validation else self.options.seed,
        )

    @property
    def largest(self) -> tuple[int, int]:
        """The rows of a batch, and the length of the longest."""
        groups = [self.groups[i] for i in self.train]
        rows = min(self.options.batch_size, len(groups)) * len(groups[0])
        return rows, max(len(e) for group in groups for e in group)

    def preview(self) -> str:
        """Return three records in words."""
        lines = []
        for i in self.train[:3]:
            record = self.records.records[i]
            fields = ", ".join(f"{n}: {str(v)[:_SHOWN]!r}" for n, v in record.fields.items())
            tokens = " + ".join(str(len(e)) for e in self.groups[i])
            lines.append(f"line {record.line} ({tokens} tokens): {fields}")
        return "\n".join(lines)

    def summary(self) -> str:
        """Return how many records there are."""
        held = f"; {len(self.held)} for validation" if self.held else "; no validation"
        return f"{len(self.train)} records of the form {self.records.form!r}{held}"


def _number(i: int) -> Example:
    return Example(np.empty(0, np.int64), np.empty(0, np.int64), i)


class ClassificationTask(_Encoded):
    """An encoder learns classes of texts."""

    forms = ("label",)
    loss = "cross_entropy"
    metrics = ("accuracy",)

    def __init__(self, folder: ModelFolder, options: FineTuneOptions, data: Any) -> None:
        super().__init__(folder, options, data)
        known = {str(self.records.records[i].fields["label"]) for i in self.train}
        self.classes = in_order(known)
        if len(self.classes) < 2:
            raise PrepareError(f"there is one class only: {', '.join(self.classes)}")

    def _labels(self) -> np.ndarray:
        numbers = {name: i for i, name in enumerate(self.classes)}
        unknown = [r for r in self.records.records if str(r.fields["label"]) not in numbers]
        if unknown:
            label, line = unknown[0].fields["label"], unknown[0].line
            raise PrepareError(
                f"the validation has a class that training has not: {label!r} in line {line}"
            )
        return np.array([numbers[str(r.fields["label"])] for r in self.records.records], np.int64)

    def model(self) -> ir.Model:
        """Return the model with a score per class."""
        count, source = len(self.classes), load(self.folder.path)
        logits = next((y for y in source.graph.outputs if y.name == LOGITS), None)
        dims = () if logits is None else S.dims_of(logits) or ()
        if len(dims) != 2:
            self.notes.append(f"a new last layer for {count} classes is trained, too")
            work = with_classifier(source, count, seed=self.options.seed)
            self.trained = ("classifier.weight", "classifier.bias")
            return work
        source, note = with_head(source, LOGITS, count, seed=self.options.seed)
        self.notes += [note] if note else []
        self.trained = head_weights(source)
        return source

    def summary(self) -> str:
        """Return how many records and classes there are."""
        return f"{super().summary()}, {len(self.classes)} classes: {', '.join(self.classes[:8])}"


class EmbeddingTask(_Encoded):
    """An encoder learns vectors of texts: near where they belong together."""

    forms = ("pair", "triplet")

    def __init__(self, folder: ModelFolder, options: FineTuneOptions, data: Any) -> None:
        super().__init__(folder, options, data)
        self.loss = MultipleNegatives(parts=2 if self.records.form == "pair" else 3)
        if options.batch_size < 2:
            raise PrepareError("batch_size must be at least 2: other pairs are what to tell from")

    def _hint(self) -> str:
        return '{"anchor": ..., "positive": ...}, with or without "negative"'

    def _texts(self, record: Record) -> list[str]:
        return [str(v) for v in record.fields.values()]

    def model(self) -> ir.Model:
        """Return the encoder with a vector per text."""
        return pooled(self.folder.path)


__all__ = ["ClassificationTask", "EmbeddingTask"]
