"""Batches of examples: padded or packed, with all that a model takes besides the ids.

Records as token ids with the labels that are to be learned.

Data as people have it: JSONL, CSV and plain text, line by line.

What a model will be shown: some examples, and which of their tokens are learned.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.errors import LabelError, LoadError, PrepareError, ShapeError
from onnxtrain.graph.io.limits import open_regular
from onnxtrain.text.model_folder import (
    ATTENTION_MASK,
    INPUT_IDS,
    LABELS,
    POSITION_IDS,
    TOKEN_TYPE_IDS,
)
from onnxtrain.text.tokenizer import Tokenizer
from onnxtrain.training.data import Batch, shuffled

RECORD_FORMATS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "completion": ("prompt", "completion"),
    "triplet": ("anchor", "positive", "negative"),
    "pair": ("anchor", "positive"),
    "label": ("text", "label"),
    "text": ("text",),
}
"""What a record may hold, the first that fits."""
_FIELD_ALIASES = {
    "conversations": "messages",
    "instruction": "prompt",
    "question": "prompt",
    "response": "completion",
    "answer": "completion",
    "output": "completion",
    "sentence": "text",
    "sentence1": "anchor",
    "sentence2": "positive",
    "query": "anchor",
    "category": "label",
}
_MAX_LISTED = 5


@dataclasses.dataclass(frozen=True)
class Record:
    """One example: its fields, and where it stands."""

    format: str
    """One of :data:`FORMS`."""
    fields: Mapping[str, Any]
    line: int


@dataclasses.dataclass(frozen=True)
class Records:
    """The records of a file, and the lines that are none."""

    records: tuple[Record, ...]
    left_out: tuple[tuple[int, str], ...]
    """Line and reason."""
    name: str

    @property
    def format(self) -> str:
        """What all records hold."""
        return self.records[0].format

    def note(self) -> str:
        """Return in words which lines were left out; empty if none was."""
        if not self.left_out:
            return ""
        shown = "; ".join(f"line {n}: {why}" for n, why in self.left_out[:_MAX_LISTED])
        more = len(self.left_out) - _MAX_LISTED
        total = len(self.left_out) + len(self.records)
        return f"{self.name}: {len(self.left_out)} of {total} lines left out: {shown}" + (
            f"; and {more} more" if more > 0 else ""
        )


def read_records(source: str | os.PathLike[str] | Iterable[Mapping[str, Any] | str]) -> Records:
    """Return the records of a file, or of a list of dicts or texts.

    ``.jsonl`` has an object per line, ``.json`` a list of them, ``.csv`` and ``.tsv`` a header and
    rows; anything else is plain text, with empty lines between its parts. Lines that cannot be read
    are left out, and counted.

    Raises:
        LoadError: the file cannot be read, nothing in it can be used, or more lines are bad than
            good; or records of several formats are mixed.
    """
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        name, rows = str(path), _rows(path)
    else:
        name, rows = "the data", iter(enumerate(source, 1))
    records, left_out = list[Record](), list[tuple[int, str]]()
    for line, row in rows:
        record = row if isinstance(row, _InvalidRow) else _record(row, line)
        if isinstance(record, _InvalidRow):
            left_out.append((line, record.why))
        else:
            records.append(record)
    return _check_records(Records(tuple(records), tuple(left_out), name))


def _check_records(read: Records) -> Records:
    records, left_out = read.records, read.left_out
    wanted = (
        "\nhint: a line is a JSON object such as "
        + json.dumps({"messages": [{"role": "user", "content": "..."}]})
        + ', {"prompt": ..., "completion": ...} or {"text": ...}'
    )
    if not records and not left_out:
        raise LoadError(f"{read.name}: there is nothing in it{wanted}")
    if len(left_out) > len(records):
        raise LoadError(f"{read.note()}{wanted}")
    formats = {r.format: r.line for r in reversed(records)}
    if len(formats) > 1:
        listing = ", ".join(f"{format} (line {line})" for format, line in sorted(formats.items()))
        raise LoadError(
            f"{read.name}: records of several formats: {listing}\nhint: one file holds one format"
        )
    return read


@dataclasses.dataclass(frozen=True)
class _InvalidRow:
    why: str


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        with open_regular(path) as file:
            data = file.read()
    except OSError as error:
        reason = error.strerror or str(error)
        raise LoadError(f"{str(path)!r}: cannot be read: {reason}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise LoadError(
            f"{str(path)!r}: not UTF-8 text, from line {line} on\nhint: save it as UTF-8"
        ) from error
    ending = path.suffix.lower()
    if ending in (".jsonl", ".ndjson"):
        yield from _json_lines(text)
    elif ending == ".json":
        yield from _json_list(text, path)
    elif ending in (".csv", ".tsv"):
        reader = csv.DictReader(text.splitlines(), delimiter="\t" if ending == ".tsv" else ",")
        for row in reader:
            yield reader.line_num, {k: v for k, v in row.items() if k is not None}
    else:
        yield from _paragraphs(text)


def _json_lines(text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            yield number, _InvalidRow("empty")
            continue
        try:
            yield number, json.loads(line)
        except ValueError as error:
            yield number, _InvalidRow(f"not JSON ({error})")


def _json_list(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise LoadError(f"{str(path)!r}: not JSON: {error}") from error
    if not isinstance(value, list):
        raise LoadError(f"{str(path)!r}: not a list of records\nhint: a .jsonl has one per line")
    yield from enumerate(value, 1)


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Return the parts between empty lines, each with its first line's number."""
    part, first = list[str](), 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.strip():
            first = first if part else number
            part.append(line)
        elif part:
            yield first, "\n".join(part)
            part = []


def _record(row: Any, line: int) -> Record | _InvalidRow:
    if isinstance(row, str):
        return Record("text", {"text": row}, line) if row.strip() else _InvalidRow("empty")
    if not isinstance(row, Mapping):
        return _InvalidRow(f"not an object but {type(row).__name__}")
    fields = {str(k).strip().lower(): v for k, v in row.items()}
    fields = {**{_FIELD_ALIASES[k]: v for k, v in fields.items() if k in _FIELD_ALIASES}, **fields}
    for format, names in RECORD_FORMATS.items():
        if all(fields.get(name) not in (None, "") for name in names):
            return _validated_record(format, {name: fields[name] for name in names}, line)
    return _InvalidRow(f"has {', '.join(map(str, row)) or 'no fields'}")


def _validated_record(format: str, fields: dict[str, Any], line: int) -> Record | _InvalidRow:
    """Return a record whose fields are of the right type."""
    if format == "messages":
        messages = _parse_messages(fields["messages"])
        return (
            messages
            if isinstance(messages, _InvalidRow)
            else Record(format, {"messages": messages}, line)
        )
    texts = [n for n in fields if n != "label"]
    wrong = [n for n in texts if not isinstance(fields[n], str) or not fields[n].strip()]
    if wrong:
        return _InvalidRow(f"{wrong[0]!r} is no text")
    return Record(format, fields, line)


def _parse_messages(value: Any) -> list[dict[str, Any]] | _InvalidRow:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return _InvalidRow("'messages' is no list of messages")
    messages = []
    for i, m in enumerate(value):
        if not isinstance(m, Mapping):
            return _InvalidRow(f"message {i + 1} is no object")
        role, content = m.get("role", m.get("from")), m.get("content", m.get("value"))
        role = {"human": "user", "gpt": "assistant"}.get(str(role), role)
        if not isinstance(role, str) or not isinstance(content, str):
            return _InvalidRow(f"message {i + 1} has no role, or its content is no text")
        messages.append({**m, "role": role, "content": content})
    if not any(m["role"] == "assistant" for m in messages):
        return _InvalidRow("no message is from the assistant")
    return messages


IGNORE_INDEX = -100


@dataclasses.dataclass(frozen=True)
class Example:
    """Tokens, and for each whether it is learned: the token itself, or -100."""

    ids: np.ndarray
    labels: np.ndarray
    line: int = 0
    positions: np.ndarray | None = None
    """Where each token stands in its own text; counted from the start if ``None``."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def learned(self) -> int:
        """How many tokens are predicted: the first has none before it."""
        return int((self.labels[1:] != IGNORE_INDEX).sum())


@dataclasses.dataclass(frozen=True)
class Examples:
    """All examples of a data set, and what was cut or left out on the way."""

    examples: tuple[Example, ...]
    cut: tuple[int, ...] = ()
    """Lines whose end did not fit."""
    dropped: tuple[int, ...] = ()
    """Lines of which nothing is learned, mostly since the prompt alone is too long."""

    @property
    def tokens(self) -> int:
        """How many there are."""
        return sum(len(e) for e in self.examples)

    @property
    def learned(self) -> int:
        """How many of them are predicted."""
        return sum(e.learned for e in self.examples)

    def note(self) -> str:
        """Return in words what was cut or left out; empty if nothing was."""
        parts = []
        for lines, what in ((self.cut, "cut at max_length"), (self.dropped, "without an answer")):
            if lines:
                some = ", ".join(map(str, lines[:5])) + (" ..." if len(lines) > 5 else "")
                parts.append(f"{len(lines)} {what} (line {some})")
        return "; ".join(parts)


def make_examples(
    records: Records, tokenizer: Tokenizer, *, max_length: int, prompt: bool = False
) -> Examples:
    """Return the tokens of records, prompts masked.

    Args:
        records: conversations, prompts with completions, or texts.
        tokenizer: of the model.
        max_length: longer examples are cut; plain texts go on in another example.
        prompt: learn prompts, too.

    Raises:
        PrepareError: nothing is left to learn from.
    """
    examples, cut, dropped = list[Example](), list[int](), list[int]()
    for record in records.records:
        example = _EXAMPLE_BUILDERS[record.format](record, tokenizer)
        if prompt:
            example = dataclasses.replace(example, labels=example.ids.copy())
        if record.format == "text":
            parts = _split_windows(example, max_length)
        else:
            parts = [_truncate(example, max_length)]
            if len(example) > max_length:
                cut.append(record.line)
        kept = [p for p in parts if p.learned]
        examples += kept
        if not kept:
            dropped.append(record.line)
    if not examples:
        raise PrepareError(
            f"{records.name}: no example has a token to learn\n"
            f"hint: prompts alone are longer than max_length={max_length}, or answers are empty"
        )
    return Examples(tuple(examples), tuple(cut), tuple(dropped))


def _split_windows(example: Example, length: int) -> list[Example]:
    """Return a long text in parts."""
    starts = range(0, max(1, len(example) - 1), length)
    return [
        Example(example.ids[i : i + length], example.labels[i : i + length], example.line)
        for i in starts
    ]


def _truncate(example: Example, length: int) -> Example:
    return Example(example.ids[:length], example.labels[:length], example.line)


def _text_example(record: Record, tokenizer: Tokenizer) -> Example:
    ids = _append_eos(tokenizer.encode(record.fields["text"]).ids, tokenizer)
    return Example(np.array(ids, np.int64), np.array(ids, np.int64), record.line)


def _completion_example(record: Record, tokenizer: Tokenizer) -> Example:
    """Return prompt and completion as one text, cut where the completion's characters start."""
    prompt, completion = record.fields["prompt"], record.fields["completion"]
    gap = "" if prompt[-1:].isspace() or completion[:1].isspace() else " "
    tokens = tokenizer.encode(prompt + gap + completion)
    labels = [
        token if end > len(prompt) and end > start else IGNORE_INDEX
        for token, (start, end) in zip(tokens.ids, tokens.spans, strict=True)
    ]
    ids = _append_eos(tokens.ids, tokenizer)
    labels += ids[len(labels) :]
    return Example(np.array(ids, np.int64), np.array(labels, np.int64), record.line)


def _chat_example(record: Record, tokenizer: Tokenizer) -> Example:
    """Return a conversation in which what the assistant says is learned, its end included."""
    messages = record.fields["messages"]
    text = tokenizer.chat(messages)
    spans = _assistant_spans(messages, text, tokenizer)
    tokens = tokenizer.encode(text, special=not tokenizer.has_template)
    labels = [
        token if any(a < end and start < b and end > start for a, b in spans) else IGNORE_INDEX
        for token, (start, end) in zip(tokens.ids, tokens.spans, strict=True)
    ]
    ids = list(tokens.ids)
    if not tokenizer.has_template and messages[-1]["role"] == "assistant":
        ids = _append_eos(ids, tokenizer)
        labels += ids[len(labels) :]
    return Example(np.array(ids, np.int64), np.array(labels, np.int64), record.line)


def _assistant_spans(
    messages: Sequence[dict[str, str]], text: str, tokenizer: Tokenizer
) -> list[tuple[int, int]]:
    """Return where in the text the assistant's turns are.

    A turn is what comes to the text with the message, behind the opening of the turn. Templates
    that write earlier turns otherwise are searched for the words themselves.
    """
    spans, at = list[tuple[int, int]](), 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = "", ""
        try:
            before = tokenizer.chat(messages[:i], answer=True)
            after = tokenizer.chat(messages[: i + 1])
        except PrepareError:  # some templates want a conversation to be complete
            pass
        if before and after.startswith(before) and text.startswith(after):
            spans.append((len(before), len(after)))
            at = len(after)
            continue
        start = text.find(message["content"].strip(), at)
        if start >= 0:
            at = start + len(message["content"].strip())
            spans.append((start, at))
    return spans


def _append_eos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Return tokens with the one that ends a text, if there is such a token."""
    end = tokenizer.id_of("eos_token")
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


_EXAMPLE_BUILDERS = {
    "text": _text_example,
    "completion": _completion_example,
    "messages": _chat_example,
}


def from_arrays(ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]] | None) -> Examples:
    """Return examples of token ids; without labels all tokens are learned."""
    rows = [np.asarray(row, np.int64) for row in ids]
    wanted = rows if labels is None else [np.asarray(row, np.int64) for row in labels]
    odd = [i for i, (a, b) in enumerate(zip(rows, wanted, strict=False)) if a.shape != b.shape]
    if len(rows) != len(wanted) or odd or any(r.ndim != 1 for r in rows):
        where = f" in row {odd[0]}" if odd else ""
        raise ShapeError(f"ids and labels have different shapes{where}")
    pairs = enumerate(zip(rows, wanted, strict=True), 1)
    return Examples(tuple(Example(a, b, i) for i, (a, b) in pairs if len(a) > 1))


def check_vocabulary(
    examples: Examples, size: int | None, tokenizer: Tokenizer | None = None
) -> None:
    """Refuse tokens and labels that the model does not have.

    Raises:
        PrepareError: the tokenizer does not fit the model.
        LabelError: a token or label of the data is out of range.
    """
    if size is None:
        return
    for e in examples.examples:
        bad = e.ids[(e.ids < 0) | (e.ids >= size)]
        labels = e.labels[(e.labels != IGNORE_INDEX) & ((e.labels < 0) | (e.labels >= size))]
        if not bad.size and not labels.size:
            continue
        what, value = ("token", bad[0]) if bad.size else ("label", labels[0])
        if tokenizer is not None:
            raise PrepareError(
                f"the tokenizer does not fit the model: line {e.line} has token {value}, the model "
                f"knows 0 to {size - 1} (the tokenizer has {tokenizer.size})\n"
                "hint: take the tokenizer.json that the model was exported with"
            )
        raise LabelError(
            f"{what} {value} in row {e.line - 1} is out of range: the model knows 0 to {size - 1}\n"
            f"hint: {IGNORE_INDEX} is the label that does not count"
        )


_KNOWN_INPUTS = (INPUT_IDS, ATTENTION_MASK, POSITION_IDS, TOKEN_TYPE_IDS, LABELS, "cache_position")


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
    return [_concatenate_examples([examples[i] for i in row]) for row in rows]


def _concatenate_examples(parts: Sequence[Example]) -> Example:
    labels = [np.concatenate([[IGNORE_INDEX], e.labels[1:]]) for e in parts]
    positions = [np.arange(len(e)) for e in parts]
    return Example(
        np.concatenate([e.ids for e in parts]),
        np.concatenate(labels).astype(np.int64),
        parts[0].line,
        np.concatenate(positions),
    )


def collate(
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
    unknown = [n for n in names if n not in _KNOWN_INPUTS]
    if unknown:
        raise ShapeError(
            f"the model takes {', '.join(unknown)}, which does not follow from token ids\n"
            "hint: onnxtrain.text.model_folder takes caches away; else give such inputs as arrays"
        )
    length = -(-max(len(e) for e in rows) // multiple) * multiple
    shape = (len(rows), length)
    ids, mask = np.full(shape, pad, np.int64), np.zeros(shape, np.int64)
    labels, positions = np.full(shape, IGNORE_INDEX, np.int64), np.zeros(shape, np.int64)
    for i, e in enumerate(rows):
        n = len(e)
        ids[i, :n], mask[i, :n], labels[i, :n] = e.ids, 1, e.labels
        positions[i, :n] = np.arange(n) if e.positions is None else e.positions
    made = {INPUT_IDS: ids, ATTENTION_MASK: mask, POSITION_IDS: positions, LABELS: labels}
    made |= {TOKEN_TYPE_IDS: np.zeros(shape, np.int64), "cache_position": np.arange(length)}
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

    def __call__(self, epoch: int) -> EpochBatches:
        """Return the batches of an epoch."""
        n = len(self.rows)
        order = np.arange(n) if self.seed is None else shuffled(n, self.seed, epoch)
        return EpochBatches(self, order)

    def batch(self, picked: Sequence[int]) -> Batch:
        """Return some rows as a batch."""
        rows = [self.rows[i] for i in picked]
        self.tokens += sum(len(e) for e in rows)
        arrays = collate(rows, self.names, pad=self._pad, multiple=self._multiple)
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

    def __call__(self, epoch: int) -> EpochBatches:
        """Return the batches of an epoch."""
        n = len(self.groups)
        return EpochBatches(
            self, np.arange(n) if self.seed is None else shuffled(n, self.seed, epoch)
        )

    def batch(self, picked: Sequence[int]) -> Batch:
        """Return some groups as a batch."""
        rows = [example for i in picked for example in self.groups[i]]
        self.tokens += sum(len(e) for e in rows)
        arrays = collate(rows, [n for n in self.names if n != LABELS], pad=self._pad)
        if LABELS in self.names and self.labels is not None:
            arrays[LABELS] = self.labels[np.asarray(picked)]
        return Batch((), arrays, np.asarray(picked), len(picked))


class EpochBatches:
    """The batches of one epoch, made when they are asked for."""

    def __init__(self, source: TokenBatches, order: np.ndarray) -> None:
        self._source, self._order = source, order

    def __len__(self) -> int:
        return -(-len(self._order) // self._source.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        size = self._source.batch_size
        for i in range(0, len(self._order), size):
            yield self._source.batch(self._order[i : i + size].tolist())


_MAX_CHARACTERS = 400  # characters of one part


def preview(examples: Sequence[Example], tokenizer: Tokenizer | None, count: int = 3) -> str:
    """Return the first examples in words: what is read, and what is learned."""
    blocks = []
    for number, e in enumerate(examples[:count], 1):
        title = f"example {number} (line {e.line}): {len(e)} tokens, {e.learned} learned"
        blocks.append("\n".join([title, *_format_spans(e, tokenizer)]))
    return "\n\n".join(blocks)


def _format_spans(example: Example, tokenizer: Tokenizer | None) -> list[str]:
    pairs = zip(example.ids.tolist(), example.labels.tolist(), strict=True)
    lines = []
    for learned, group in groupby(pairs, key=lambda pair: pair[1] != IGNORE_INDEX):
        ids = [token for token, _ in group]
        text = " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids, special=True)
        short = text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} ..."
        lines.append(f"  {'learned' if learned else 'read   '} | {short!r}")
    return lines
