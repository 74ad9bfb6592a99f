"""Data as people have it: JSONL, CSV and plain text, line by line."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxtrain.errors import LoadError
from onnxtrain.graph.io.regular_file import open_regular

FORMS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "completion": ("prompt", "completion"),
    "triplet": ("anchor", "positive", "negative"),
    "pair": ("anchor", "positive"),
    "label": ("text", "label"),
    "text": ("text",),
}
"""What a record may hold, the first that fits."""
_OTHER_NAMES = {
    "conversations": "messages", "instruction": "prompt", "question": "prompt",
    "response": "completion", "answer": "completion", "output": "completion",
    "sentence": "text", "sentence1": "anchor", "sentence2": "positive", "query": "anchor",
    "category": "label",
}  # fmt: skip
_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Record:
    """One example: its fields, and where it stands."""

    form: str
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
    def form(self) -> str:
        """What all records hold."""
        return self.records[0].form

    def note(self) -> str:
        """Return in words which lines were left out; empty if none was."""
        if not self.left_out:
            return ""
        shown = "; ".join(f"line {n}: {why}" for n, why in self.left_out[:_SHOWN])
        more = len(self.left_out) - _SHOWN
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
            good; or records of several forms are mixed.
    """
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        name, rows = str(path), _rows(path)
    else:
        name, rows = "the data", iter(enumerate(source, 1))
    records, left_out = list[Record](), list[tuple[int, str]]()
    for line, row in rows:
        record = row if isinstance(row, _Bad) else _record(row, line)
        if isinstance(record, _Bad):
            left_out.append((line, record.why))
        else:
            records.append(record)
    return _checked(Records(tuple(records), tuple(left_out), name))


def _checked(read: Records) -> Records:
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
    forms = {r.form: r.line for r in reversed(records)}
    if len(forms) > 1:
        listing = ", ".join(f"{form} (line {line})" for form, line in sorted(forms.items()))
        raise LoadError(
            f"{read.name}: records of several forms: {listing}\nhint: one file holds one form"
        )
    return read


@dataclasses.dataclass(frozen=True)
class _Bad:
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
            yield number, _Bad("empty")
            continue
        try:
            yield number, json.loads(line)
        except ValueError as error:
            yield number, _Bad(f"not JSON ({error})")


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


def _record(row: Any, line: int) -> Record | _Bad:
    if isinstance(row, str):
        return Record("text", {"text": row}, line) if row.strip() else _Bad("empty")
    if not isinstance(row, Mapping):
        return _Bad(f"not an object but {type(row).__name__}")
    fields = {str(k).strip().lower(): v for k, v in row.items()}
    fields = {**{_OTHER_NAMES[k]: v for k, v in fields.items() if k in _OTHER_NAMES}, **fields}
    for form, names in FORMS.items():
        if all(fields.get(name) not in (None, "") for name in names):
            return _fitting(form, {name: fields[name] for name in names}, line)
    return _Bad(f"has {', '.join(map(str, row)) or 'no fields'}")


def _fitting(form: str, fields: dict[str, Any], line: int) -> Record | _Bad:
    """Return a record whose fields are of the right type."""
    if form == "messages":
        messages = _messages(fields["messages"])
        return (
            messages if isinstance(messages, _Bad) else Record(form, {"messages": messages}, line)
        )
    texts = [n for n in fields if n != "label"]
    wrong = [n for n in texts if not isinstance(fields[n], str) or not fields[n].strip()]
    if wrong:
        return _Bad(f"{wrong[0]!r} is no text")
    return Record(form, fields, line)


def _messages(value: Any) -> list[dict[str, Any]] | _Bad:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return _Bad("'messages' is no list of messages")
    messages = []
    for i, m in enumerate(value):
        if not isinstance(m, Mapping):
            return _Bad(f"message {i + 1} is no object")
        role, content = m.get("role", m.get("from")), m.get("content", m.get("value"))
        role = {"human": "user", "gpt": "assistant"}.get(str(role), role)
        if not isinstance(role, str) or not isinstance(content, str):
            return _Bad(f"message {i + 1} has no role, or its content is no text")
        messages.append({**m, "role": role, "content": content})
    if not any(m["role"] == "assistant" for m in messages):
        return _Bad("no message is from the assistant")
    return messages


__all__ = ["FORMS", "Record", "Records", "read_records"]
