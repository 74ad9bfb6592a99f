"""Records as token ids with the labels that are to be learned."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from onnxtrain.errors import LabelError, PrepareError, ShapeError
from onnxtrain.text.records import Record, Records
from onnxtrain.text.tokenizer import Tokenizer

IGNORED = -100


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
        return int((self.labels[1:] != IGNORED).sum())


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
        example = _FORMS[record.form](record, tokenizer)
        if prompt:
            example = dataclasses.replace(example, labels=example.ids.copy())
        if record.form == "text":
            parts = _windows(example, max_length)
        else:
            parts = [_start(example, max_length)]
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


def _windows(example: Example, length: int) -> list[Example]:
    """Return a long text in parts."""
    starts = range(0, max(1, len(example) - 1), length)
    return [
        Example(example.ids[i : i + length], example.labels[i : i + length], example.line)
        for i in starts
    ]


def _start(example: Example, length: int) -> Example:
    return Example(example.ids[:length], example.labels[:length], example.line)


def _text(record: Record, tokenizer: Tokenizer) -> Example:
    ids = _ended(tokenizer.encode(record.fields["text"]).ids, tokenizer)
    return Example(np.array(ids, np.int64), np.array(ids, np.int64), record.line)


def _completion(record: Record, tokenizer: Tokenizer) -> Example:
    """Return prompt and completion as one text, cut where the completion's characters start."""
    prompt, completion = record.fields["prompt"], record.fields["completion"]
    gap = "" if prompt[-1:].isspace() or completion[:1].isspace() else " "
    tokens = tokenizer.encode(prompt + gap + completion)
    labels = [
        token if end > len(prompt) and end > start else IGNORED
        for token, (start, end) in zip(tokens.ids, tokens.spans, strict=True)
    ]
    ids = _ended(tokens.ids, tokenizer)
    labels += ids[len(labels) :]
    return Example(np.array(ids, np.int64), np.array(labels, np.int64), record.line)


def _messages(record: Record, tokenizer: Tokenizer) -> Example:
    """Return a conversation in which what the assistant says is learned, its end included."""
    messages = record.fields["messages"]
    text = tokenizer.chat(messages)
    spans = _assistant_spans(messages, text, tokenizer)
    tokens = tokenizer.encode(text, special=not tokenizer.has_template)
    labels = [
        token if any(a < end and start < b and end > start for a, b in spans) else IGNORED
        for token, (start, end) in zip(tokens.ids, tokens.spans, strict=True)
    ]
    ids = list(tokens.ids)
    if not tokenizer.has_template and messages[-1]["role"] == "assistant":
        ids = _ended(ids, tokenizer)
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


def _ended(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Return tokens with the one that ends a text, if there is such a token."""
    end = tokenizer.id_of("eos_token")
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


_FORMS = {"text": _text, "completion": _completion, "messages": _messages}


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
        labels = e.labels[(e.labels != IGNORED) & ((e.labels < 0) | (e.labels >= size))]
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
            f"hint: {IGNORED} is the label that does not count"
        )


__all__ = ["IGNORED", "Example", "Examples", "check_vocabulary", "from_arrays", "make_examples"]
