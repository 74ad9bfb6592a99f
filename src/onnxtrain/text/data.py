"""Training data of transformers: files to records, records to token ids, token ids to batches.

read_records   JSONL, JSON, CSV, TSV and plain text as ``Records``
make_examples  records as ``Example``: token ids and labels, with prompts masked by -100
pack, collate  several examples per row; padding, masks and positions
TokenBatches   the batches of each epoch, for ``Trainer.fit``
preview        examples as text, with the tokens that count in the loss
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.errors import LabelError, LoadError, PrepareError, ShapeError
from onnxtrain.graph.io.limits import read_json
from onnxtrain.text.model_folder import (
    ATTENTION_MASK,
    INPUT_IDS,
    LABELS,
    POSITION_IDS,
    TOKEN_TYPE_IDS,
)
from onnxtrain.text.tokenizer import Tokenizer
from onnxtrain.training.data import Batch, shuffled
from onnxtrain.training.data_files import DELIMITERS, read_csv, read_text

RECORD_FORMATS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "preference": ("chosen", "rejected"),
    "unpaired": ("prompt", "completion", "label"),
    "completion": ("prompt", "completion"),
    "triplet": ("anchor", "positive", "negative"),
    "pair": ("anchor", "positive"),
    "label": ("text", "label"),
    "tags": ("tokens", "tags"),
    "text": ("text",),
}
"""Format -> required fields; a record has the first format that matches."""
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
    "words": "tokens",
    "ner_tags": "tags",
    "pos_tags": "tags",
}
_MAX_LISTED = 5


@dataclasses.dataclass(frozen=True)
class Record:
    """One example: its fields and its line in the file."""

    format: str
    """A key of :data:`RECORD_FORMATS`."""
    fields: Mapping[str, Any]
    line: int


@dataclasses.dataclass(frozen=True)
class Records:
    """The records of a file, and the lines that are skipped."""

    records: tuple[Record, ...]
    skipped: tuple[tuple[int, str], ...]
    """Line and reason."""
    name: str

    @property
    def format(self) -> str:
        """The format of all records."""
        return self.records[0].format

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of all records."""
        return RECORD_FORMATS[self.format]

    def note(self) -> str:
        """Return a warning that lists skipped lines; empty if there are none."""
        if not self.skipped:
            return ""
        listing = "; ".join(f"line {n}: {reason}" for n, reason in self.skipped[:_MAX_LISTED])
        more = len(self.skipped) - _MAX_LISTED
        total = len(self.skipped) + len(self.records)
        return f"{self.name}: skipped {len(self.skipped)} of {total} lines: {listing}" + (
            f"; and {more} more" if more > 0 else ""
        )


def read_records(source: str | os.PathLike[str] | Iterable[Mapping[str, Any] | str]) -> Records:
    """Read records from a file, or from a list of dicts or texts.

    ``.jsonl`` has an object per line, ``.json`` a list of objects, ``.csv`` and ``.tsv`` a header
    and rows, ``.conll`` and ``.bio`` a word and its tag per line. Other files are plain text with
    empty lines between records. Invalid lines are skipped and listed by :meth:`Records.note`.

    Raises:
        LoadError: if the file cannot be read, has no records, mixes several formats, or has more
            invalid than valid lines.
    """
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        name, rows = str(path), _rows(path)
    else:
        name, rows = "the data", iter(enumerate(source, 1))
    records, skipped = list[Record](), list[tuple[int, str]]()
    for line, row in rows:
        record = row if isinstance(row, _InvalidRow) else _record(row, line)
        if isinstance(record, _InvalidRow):
            skipped.append((line, record.reason))
        else:
            records.append(record)
    return _check_records(Records(tuple(records), tuple(skipped), name))


def _check_records(read: Records) -> Records:
    hint = (
        "\nhint: each line is a JSON object such as "
        + json.dumps({"messages": [{"role": "user", "content": "..."}]})
        + ', {"prompt": ..., "completion": ...} or {"text": ...}'
    )
    if not read.records and not read.skipped:
        raise LoadError(f"{read.name}: no records{hint}")
    if len(read.skipped) > len(read.records):
        raise LoadError(f"{read.note()}{hint}")
    formats = {r.format: r.line for r in reversed(read.records)}
    if len(formats) > 1:
        listing = ", ".join(f"{name} (line {line})" for name, line in sorted(formats.items()))
        raise LoadError(
            f"{read.name}: records of several formats: {listing}\nhint: use one file per format"
        )
    return read


def _tagged_words(text: str) -> Iterator[tuple[int, Any]]:
    """Yield the sentences of a CoNLL file: a word per line, in the first column, its tag last."""
    for first, paragraph in _paragraphs(text):
        rows = [line.split() for line in paragraph.split("\n")]
        rows = [row for row in rows if row[0] != "-DOCSTART-"]
        if any(len(row) < 2 for row in rows):
            yield first, _InvalidRow("has a line without a tag")
        elif rows:
            yield first, {"tokens": [r[0] for r in rows], "tags": [r[-1] for r in rows]}


@dataclasses.dataclass(frozen=True)
class _InvalidRow:
    reason: str


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    ending = path.suffix.lower()
    if ending in DELIMITERS:
        yield from _csv_rows(path)
    elif ending == ".json":
        yield from _json_list(path)
    elif ending in (".jsonl", ".ndjson"):
        yield from _json_lines(read_text(path))
    elif ending in (".conll", ".bio", ".iob", ".iob2"):
        yield from _tagged_words(read_text(path))
    else:
        yield from _paragraphs(read_text(path))


def _csv_rows(path: Path) -> Iterator[tuple[int, Any]]:
    (_, names), *rows = read_csv(path) or [(1, [])]
    for line, cells in rows:
        if len(cells) > len(names):
            yield line, _InvalidRow(f"has {len(cells)} cells, expected {len(names)}")
        else:
            yield line, dict(zip(names, cells, strict=False))


def _json_lines(text: str) -> Iterator[tuple[int, Any]]:
    # Not splitlines(), which also splits at U+2028 and U+0085: JSON texts may contain them.
    lines = text.split("\n")
    for number, line in enumerate(lines if lines[-1] else lines[:-1], 1):
        if not line.strip():
            yield number, _InvalidRow("empty")
            continue
        try:
            yield number, json.loads(line)
        except ValueError as error:
            yield number, _InvalidRow(f"not JSON ({error})")
        except RecursionError:
            yield number, _InvalidRow("not JSON (nested too deeply)")


def _json_list(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        value = read_json(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise LoadError(f"{path}: cannot be read: {reason}") from error
    except ValueError as error:
        raise LoadError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, list):
        raise LoadError(f"{path}: not a list of records\nhint: use .jsonl for one object per line")
    yield from enumerate(value, 1)


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a text with the number of their first line."""
    paragraph, first = list[str](), 0
    for number, line in enumerate([*re.split(r"\r\n|\r|\n", text), ""], 1):
        if line.strip():
            first = first if paragraph else number
            paragraph.append(line)
        elif paragraph:
            yield first, "\n".join(paragraph)
            paragraph = []


def _record(row: Any, line: int) -> Record | _InvalidRow:
    if isinstance(row, str):
        row = {"text": row} if row.strip() else {}
        return _validated_record("text", row, line) if row else _InvalidRow("empty")
    if not isinstance(row, Mapping):
        return _InvalidRow(f"not an object but {type(row).__name__}")
    fields = {str(k).strip().lower(): v for k, v in row.items()}
    fields = {**{_FIELD_ALIASES[k]: v for k, v in fields.items() if k in _FIELD_ALIASES}, **fields}
    for format, names in RECORD_FORMATS.items():
        if all(fields.get(name) not in (None, "") for name in names):
            chosen = {name: fields[name] for name in names}
            if format == "preference" and fields.get("prompt"):
                chosen["prompt"] = fields["prompt"]
            return _validated_record(format, chosen, line)
    return _InvalidRow(f"has {', '.join(map(str, row)) or 'no fields'}")


def _validated_record(format: str, fields: dict[str, Any], line: int) -> Record | _InvalidRow:
    """Return a record after checking the types of its fields."""
    if format == "messages":
        messages = _parse_messages(fields["messages"])
        return (
            messages
            if isinstance(messages, _InvalidRow)
            else Record(format, {"messages": messages}, line)
        )
    if format in ("preference", "unpaired") and not all(map(_is_text, _texts(fields))):
        return _answers_as_messages(format, fields, line)
    if format == "preference" and "prompt" not in fields:
        return _InvalidRow("has no 'prompt'")
    if format == "tags":
        return _tagged_record(fields, line)
    texts = [n for n in fields if n != "label"]
    wrong = [n for n in texts if not _is_text(fields[n]) or not fields[n].strip()]
    if wrong:
        return _InvalidRow(f"{wrong[0]!r} is not text")
    label = fields.get("label", "")
    if not (_is_text(label) or (isinstance(label, int | float) and math.isfinite(label))):
        return _InvalidRow("'label' is not a text or a number")
    return Record(format, fields, line)


def _tagged_record(fields: dict[str, Any], line: int) -> Record | _InvalidRow:
    words, tags = fields["tokens"], fields["tags"]
    if not isinstance(words, list) or not all(_is_text(w) and w.strip() for w in words):
        return _InvalidRow("'tokens' is not a list of words")
    if not isinstance(tags, list) or not all(_is_text(t) or isinstance(t, int) for t in tags):
        return _InvalidRow("'tags' is not a list of texts or integers")
    if len(words) != len(tags) or not words:
        return _InvalidRow(f"{len(words)} tokens have {len(tags)} tags")
    return Record("tags", fields, line)


def _texts(fields: Mapping[str, Any]) -> list[Any]:
    return [v for n, v in fields.items() if n != "label"]


def _answers_as_messages(format: str, fields: dict[str, Any], line: int) -> Record | _InvalidRow:
    """Return a record whose answers are whole conversations, with the prompt of both as messages.

    Without a prompt, what both conversations begin with is the prompt.
    """
    if any(isinstance(v, str) or not isinstance(v, Sequence) for v in _texts(fields)):
        return _InvalidRow(f"{', '.join(fields)} are neither all texts nor all lists of messages")
    prompt = list(fields.get("prompt", ()))
    answers = {}
    for name in ("chosen", "rejected", "completion"):
        if name in fields:
            messages = _parse_messages([*prompt, *fields[name]])
            if isinstance(messages, _InvalidRow):
                return _InvalidRow(f"{name!r}: {messages.reason}")
            answers[name] = messages
    shared = len(prompt)
    if not shared:
        pairs = enumerate(zip(*answers.values(), strict=False))
        shared = next((i for i, (a, b) in pairs if a != b), 0)
    first = next(iter(answers.values()))
    rest = {n: v for n, v in fields.items() if n == "label"}
    return Record(format, {"prompt": first[:shared], **answers, **rest}, line)


def _is_text(value: Any) -> bool:
    """Return whether a value is a string of characters; JSON also has halves of them."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def _parse_messages(value: Any) -> list[dict[str, Any]] | _InvalidRow:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return _InvalidRow("'messages' is not a list of messages")
    messages = []
    for i, m in enumerate(value):
        if not isinstance(m, Mapping):
            return _InvalidRow(f"message {i + 1} is not an object")
        role, content = m.get("role", m.get("from")), m.get("content", m.get("value"))
        role = {"human": "user", "gpt": "assistant"}.get(str(role), role)
        if not _is_text(role) or not _is_text(content):
            return _InvalidRow(f"message {i + 1} has no role or no text content")
        messages.append({**m, "role": role, "content": content})
    if not any(m["role"] == "assistant" for m in messages):
        return _InvalidRow("no message is from the assistant")
    return messages


IGNORE_INDEX = -100


@dataclasses.dataclass(frozen=True)
class Example:
    """Token ids with labels: the token itself, or -100 to ignore it in the loss."""

    ids: np.ndarray
    labels: np.ndarray
    line: int = 0
    positions: np.ndarray | None = None
    """Position ids; 0, 1, 2 ... if ``None``."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def learned(self) -> int:
        """The number of tokens in the loss; the first token is never predicted."""
        return int((self.labels[1:] != IGNORE_INDEX).sum())


@dataclasses.dataclass(frozen=True)
class Examples:
    """The examples of a dataset, and the lines that were truncated or dropped."""

    examples: tuple[Example, ...]
    truncated: tuple[int, ...] = ()
    """Lines with more than ``max_length`` tokens."""
    dropped: tuple[int, ...] = ()
    """Lines without a token in the loss, mostly because the prompt alone is too long."""

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return sum(len(e) for e in self.examples)

    @property
    def learned(self) -> int:
        """The number of tokens in the loss."""
        return sum(e.learned for e in self.examples)

    def note(self) -> str:
        """Return a warning about truncated and dropped lines; empty if there are none."""
        notes = []
        for lines, what in (
            (self.truncated, "truncated to max_length"),
            (self.dropped, "dropped: no token to train on within max_length"),
        ):
            if lines:
                listing = ", ".join(map(str, lines[:5])) + (" ..." if len(lines) > 5 else "")
                notes.append(f"{len(lines)} {what} (line {listing})")
        return "; ".join(notes)


def make_examples(
    records: Records, tokenizer: Tokenizer, *, max_length: int, prompt: bool = False
) -> Examples:
    """Tokenize records and mask prompts in the labels.

    Args:
        records: conversations, prompts with completions, or texts.
        tokenizer: the tokenizer of the model.
        max_length: longer examples are truncated; plain texts are split into several examples.
        prompt: whether prompts count in the loss.

    Raises:
        PrepareError: if no example has a token in the loss.
    """
    examples, truncated, dropped = list[Example](), list[int](), list[int]()
    for record in records.records:
        example = _EXAMPLE_BUILDERS[record.format](record, tokenizer)
        if prompt:
            example = dataclasses.replace(example, labels=example.ids.copy())
        if record.format == "text":
            parts = _split_windows(example, max_length)
        else:
            parts = [_truncate(example, max_length)]
            if len(example) > max_length:
                truncated.append(record.line)
        parts = [p for p in parts if p.learned]
        examples += parts
        if not parts:
            dropped.append(record.line)
    if not examples:
        raise PrepareError(
            f"{records.name}: no example has a token to train on\n"
            f"hint: answers are empty, or prompts fill max_length={max_length}: increase it"
        )
    return Examples(tuple(examples), tuple(truncated), tuple(dropped))


def _split_windows(example: Example, length: int) -> list[Example]:
    """Split a long text into windows of ``length`` tokens."""
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
    """Tokenize prompt and completion as one text; mask tokens before the completion.

    Character spans decide: two separate calls would tokenize the boundary differently.
    """
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


def _chat_example(record: Record, tokenizer: Tokenizer, first: int = 0) -> Example:
    """Tokenize a conversation; only assistant turns count in the loss, with their end token.

    Turns before message ``first`` do not count.
    """
    messages = record.fields["messages"]
    text = tokenizer.chat(messages)
    spans = _assistant_spans(messages, text, tokenizer, first)
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
    messages: Sequence[dict[str, str]], text: str, tokenizer: Tokenizer, first: int = 0
) -> list[tuple[int, int]]:
    """Return the character spans of the assistant turns from message ``first`` on.

    A span is what the rendered text gains with the message, without the header of the turn. Some
    templates render earlier turns differently: there the content itself is searched for.
    """
    spans, at = list[tuple[int, int]](), 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i < first:
            continue
        before, after = "", ""
        try:
            before = tokenizer.chat(messages[:i], answer=True)
            after = tokenizer.chat(messages[: i + 1])
        except PrepareError:  # Some templates reject incomplete conversations.
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


def answer_example(
    prompt: str | Sequence[dict[str, str]],
    answer: str | Sequence[dict[str, str]],
    line: int,
    tokenizer: Tokenizer,
) -> Example:
    """Return a prompt with one answer; only the answer counts in the loss.

    Args:
        prompt: a text, or messages.
        answer: a text, or the messages of prompt and answer.
        line: the line of the record.
        tokenizer: the tokenizer of the model.
    """
    if isinstance(answer, str):
        fields = {"prompt": prompt, "completion": answer}
        return _completion_example(Record("completion", fields, line), tokenizer)
    return _chat_example(Record("messages", {"messages": answer}, line), tokenizer, len(prompt))


def _append_eos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Append the end-of-sequence token, if there is one and it is not there yet."""
    end = tokenizer.id_of("eos_token")
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


_EXAMPLE_BUILDERS = {
    "text": _text_example,
    "completion": _completion_example,
    "unpaired": _completion_example,
    "messages": _chat_example,
}


def from_arrays(ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]] | None) -> Examples:
    """Return examples from token ids; without labels all tokens count in the loss.

    Raises:
        PrepareError: if no row has a token in the loss.
    """
    rows = [np.asarray(row, np.int64) for row in ids]
    targets = rows if labels is None else [np.asarray(row, np.int64) for row in labels]
    unequal = [i for i, (a, b) in enumerate(zip(rows, targets, strict=False)) if a.shape != b.shape]
    if len(rows) != len(targets) or unequal or any(r.ndim != 1 for r in rows):
        where = f" in row {unequal[0]}" if unequal else ""
        raise ShapeError(f"ids and labels have different shapes{where}")
    made = [Example(a, b, i) for i, (a, b) in enumerate(zip(rows, targets, strict=True), 1)]
    kept = tuple(e for e in made if e.learned)
    if not kept:
        raise PrepareError(
            "no row has a token to train on\n"
            f"hint: rows need two tokens or more, and labels other than {IGNORE_INDEX}"
        )
    return Examples(kept, dropped=tuple(e.line for e in made if not e.learned))


def check_vocabulary(
    examples: Examples, size: int | None, tokenizer: Tokenizer | None = None
) -> None:
    """Check that tokens and labels are in the model's vocabulary.

    Raises:
        PrepareError: if the tokenizer does not match the model.
        LabelError: if a token or label of the data is out of range.
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
                f"the tokenizer does not match the model: line {e.line} has token {value}, but the "
                f"vocabulary has {size} tokens (the tokenizer {tokenizer.size})\n"
                "hint: use the tokenizer.json that the model was exported with"
            )
        raise LabelError(
            f"{what} {value} in row {e.line - 1} is out of range: expected 0 to {size - 1}\n"
            f"hint: {IGNORE_INDEX} is the label to ignore"
        )


_KNOWN_INPUTS = (INPUT_IDS, ATTENTION_MASK, POSITION_IDS, TOKEN_TYPE_IDS, LABELS, "cache_position")


def pack(examples: Sequence[Example], length: int) -> list[Example]:
    """Pack examples into rows of at most ``length`` tokens.

    Position ids restart with each example, and its first token is not predicted. Attention still
    sees earlier examples of the row; end-of-sequence tokens separate them. Best-fit decreasing:
    the longest example first, each into the fullest row with enough room.
    """
    order = sorted(range(len(examples)), key=lambda i: (-len(examples[i]), i))
    rows: list[list[int]] = []
    room: list[int] = []
    for i in order:
        size = len(examples[i])
        # Only the last 64 rows: searching all of them is quadratic in the number of examples.
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
    """Return a batch with the inputs and targets of a model.

    Rows are padded on the right; labels of padding are -100.

    Args:
        rows: the examples.
        names: names of the model's inputs and targets.
        pad: the padding token.
        multiple: pad to a multiple of this length.

    Raises:
        ShapeError: if the model has other inputs.
    """
    unknown = [n for n in names if n not in _KNOWN_INPUTS]
    if unknown:
        raise ShapeError(
            f"unsupported inputs: {', '.join(unknown)}\n"
            "hint: onnxtrain.text.without_cache removes KV caches; pass other inputs as arrays to "
            "Trainer.step"
        )
    length = -(-max(len(e) for e in rows) // multiple) * multiple
    shape = (len(rows), length)
    ids, mask = np.full(shape, pad, np.int64), np.zeros(shape, np.int64)
    labels, positions = np.full(shape, IGNORE_INDEX, np.int64), np.zeros(shape, np.int64)
    for i, e in enumerate(rows):
        n = len(e)
        ids[i, :n], mask[i, :n], labels[i, :n] = e.ids, 1, e.labels
        positions[i, :n] = np.arange(n) if e.positions is None else e.positions
    arrays = {INPUT_IDS: ids, ATTENTION_MASK: mask, POSITION_IDS: positions, LABELS: labels}
    arrays |= {TOKEN_TYPE_IDS: np.zeros(shape, np.int64), "cache_position": np.arange(length)}
    return {name: arrays[name] for name in names}


class TokenBatches:
    """Batches of token ids for each epoch; seed and epoch decide their order.

    ``trainer.fit(batches)`` calls it with the epoch. The weight of a batch is its number of tokens
    in the loss, so that averages over batches are averages over tokens.

    Args:
        rows: examples, packed or not.
        names: names of the model's inputs and targets.
        batch_size: rows per batch.
        pad: the padding token.
        seed: random seed for shuffling; ``None`` keeps the order.
        multiple: pad to a multiple of this length.
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
            raise ShapeError(f"batch_size must be at least 1, got {batch_size}")
        self.rows, self.names = list(rows), list(names)
        self.batch_size, self.seed = batch_size, seed
        self._pad, self._multiple = pad, multiple
        self.tokens = 0
        """The tokens of all batches so far."""

    def __call__(self, epoch: int) -> EpochBatches:
        """Return the batches of an epoch."""
        n = len(self.rows)
        order = np.arange(n) if self.seed is None else shuffled(n, self.seed, epoch)
        return EpochBatches(self, order)

    def batch(self, picked: Sequence[int]) -> Batch:
        """Return the rows with these indices as a batch."""
        rows = [self.rows[i] for i in picked]
        self.tokens += sum(len(e) for e in rows)
        arrays = collate(rows, self.names, pad=self._pad, multiple=self._multiple)
        return Batch(arrays, np.asarray(picked), max(1, sum(e.learned for e in rows)))


class GroupBatches(TokenBatches):
    """Batches of groups of rows: a text with a label, or the texts of a pair or triplet.

    Args:
        groups: the rows of each group; they are consecutive in a batch.
        labels: one label per group, or ``None``.
        names: names of the model's inputs and targets.
        batch_size: groups per batch.
        pad: the padding token.
        seed: random seed for shuffling; ``None`` keeps the order.
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
        """Return the groups with these indices as a batch."""
        rows = [example for i in picked for example in self.groups[i]]
        self.tokens += sum(len(e) for e in rows)
        arrays = collate(rows, [n for n in self.names if n != LABELS], pad=self._pad)
        if LABELS in self.names and self.labels is not None:
            arrays[LABELS] = self.labels[np.asarray(picked)]
        return Batch(arrays, np.asarray(picked), len(picked))


class EpochBatches:
    """The batches of one epoch, created lazily."""

    def __init__(
        self, source: TokenBatches, order: np.ndarray, part: Callable[[int], slice] | None = None
    ) -> None:
        self._source, self._order, self._part = source, order, part

    def parts(self, part: Callable[[int], slice]) -> EpochBatches:
        """Return the parts of a worker, one of each batch."""
        return EpochBatches(self._source, self._order, part)

    def __len__(self) -> int:
        return -(-len(self._order) // self._source.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        size = self._source.batch_size
        for i in range(0, len(self._order), size):
            picked = self._order[i : i + size].tolist()
            if self._part is not None:
                picked = picked[self._part(len(picked))]
            yield self._source.batch(picked) if picked else Batch({}, weight=0)


_MAX_CHARACTERS = 400  # of a span in a preview


def preview(examples: Sequence[Example], tokenizer: Tokenizer | None, count: int = 3) -> str:
    """Return the first examples as text, with the tokens that count in the loss."""
    blocks = []
    for number, e in enumerate(examples[:count], 1):
        title = f"example {number} (line {e.line}): {len(e)} tokens, {e.learned} in the loss"
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
