"""What is learned: data of a form, the model made ready for it, and the loss."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import PrepareError, ShapeError
from onnxtrain.finetuning.options import FineTuneOptions
from onnxtrain.graph.io import load
from onnxtrain.losses import LossLike
from onnxtrain.text.batches import TokenBatches, pack
from onnxtrain.text.examples import Example, Examples, check_vocabulary, from_arrays, make_examples
from onnxtrain.text.folder import ModelFolder
from onnxtrain.text.preview import preview
from onnxtrain.text.records import Records, read_records
from onnxtrain.text.tokenizer import Tokenizer
from onnxtrain.text.without_cache import without_cache
from onnxtrain.training.data import shuffled

LENGTH = 512
_PART, _ENOUGH, _MOST = 0.05, 20, 64  # of the data, if there is enough, for validation


class Task:
    """Data and model of one kind of training."""

    loss: LossLike
    metrics: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    """Weights that train besides adapters."""

    def __init__(self, folder: ModelFolder, options: FineTuneOptions) -> None:
        self.folder, self.options = folder, options
        self.notes: list[str] = []
        self.tokenizer: Tokenizer | None = None

    @property
    def length(self) -> int:
        """The longest row.

        Raises:
            PrepareError: it was asked for, and the model cannot have it.
        """
        asked, most = self.options.max_length, self.folder.positions
        if asked is not None and most is not None and asked > most:
            raise PrepareError(
                f"max_length={asked} is beyond the {most} positions of the model\n"
                f"hint: max_length={most} is the most it takes"
            )
        return asked if asked is not None else min(LENGTH, most or LENGTH)

    @property
    def pad(self) -> int:
        """The token that rows are filled up with."""
        known = None if self.tokenizer is None else self.tokenizer.id_of("pad_token")
        return next((p for p in (known, self.folder.pad) if p is not None), 0)

    def read(self, data: Any) -> Records:
        """Return the records of data, and take the tokenizer."""
        if self.tokenizer is None:
            self.tokenizer = Tokenizer(self.options.tokenizer or self.folder.folder)
        records = read_records(data)
        if records.note():
            self.notes.append(records.note())
        return records

    def model(self) -> Any:
        """Return the model that adapters are put into: a path, or one made of it."""
        return self.folder.path

    def for_training(self, model: Any) -> ir.Model:
        """Return what is built."""
        return load(model)

    def batches(self, names: Sequence[str], *, validation: bool = False) -> TokenBatches | None:
        """Return the batches of training, or those of the validation, if there is one."""
        raise NotImplementedError

    @property
    def largest(self) -> tuple[int, int]:
        """The rows of a batch, and the length of the longest."""
        raise NotImplementedError

    def memory_sizes(self) -> tuple[dict[str, Any], str]:
        """Return the sizes of the largest batch, for a plan and in words."""
        rows, length = self.largest
        return {"tokens": f"{rows}x{length}"}, f"{rows} x {length} tokens"

    def preview(self) -> str:
        """Return some examples in words."""
        raise NotImplementedError

    def summary(self) -> str:
        """Return in words what the data are."""
        raise NotImplementedError


class CausalTask(Task):
    """A language model learns to go on."""

    loss = "causal_lm"

    def __init__(self, folder: ModelFolder, options: FineTuneOptions, data: Any) -> None:
        super().__init__(folder, options)
        self.records: Records | None = None
        train, held = split(self._examples(data, keep=True), options)
        if isinstance(options.validation, str | os.PathLike) and not is_part(options.validation):
            held = self._examples(options.validation).examples
        self.train, self.held = train, held
        self.rows = pack(train, self.length) if options.pack else list(train)

    def _examples(self, data: Any, *, keep: bool = False) -> Examples:
        if is_arrays(data):
            arrays = data if isinstance(data, Mapping) else {"input_ids": data}
            examples = from_arrays(arrays["input_ids"], arrays.get("labels"))
            long = [e.line - 1 for e in examples.examples if len(e) > self.length]
            if long:
                raise ShapeError(
                    f"{len(long)} rows are longer than {self.length} tokens, row {long[0]} first\n"
                    "hint: cut the rows, or raise max_length"
                )
            check_vocabulary(examples, self.folder.vocabulary)
            return examples
        records = self.read(data)
        if records.form not in ("messages", "completion", "text"):
            raise PrepareError(
                f"a language model does not learn from records of the form {records.form!r}\n"
                "hint: messages, prompt and completion, or text"
            )
        assert self.tokenizer is not None
        if records.form == "messages" and not self.tokenizer.has_template:
            self.notes.append("the model brings no chat template: a line per message, 'User: ...'")
        made = make_examples(
            records, self.tokenizer, max_length=self.length, prompt=self.options.learn_prompts
        )
        if made.note():
            self.notes.append(f"{records.name}: {made.note()}")
        check_vocabulary(made, self.folder.vocabulary, self.tokenizer)
        if keep:
            self.records = records
        return made

    def for_training(self, model: Any) -> ir.Model:
        """Return the model without its cache."""
        return without_cache(model)

    def batches(self, names: Sequence[str], *, validation: bool = False) -> TokenBatches | None:
        """Return the batches."""
        rows = self.held if validation else self.rows
        seed = None if validation else self.options.seed
        size = self.options.batch_size
        if not rows:
            return None
        return TokenBatches(rows, names, batch_size=size, pad=self.pad, seed=seed)

    @property
    def largest(self) -> tuple[int, int]:
        """The rows of a batch, and the length of the longest."""
        return min(self.options.batch_size, len(self.rows)), max(len(e) for e in self.rows)

    def preview(self) -> str:
        """Return three examples with their masks."""
        return preview(self.train, self.tokenizer)

    def summary(self) -> str:
        """Return numbers of examples and tokens."""
        tokens, learned = (sum(map(f, self.train)) for f in (len, lambda e: e.learned))
        packed = f" in {len(self.rows)} rows" if self.options.pack else ""
        held = f"; {len(self.held)} for validation" if self.held else "; no validation"
        return (
            f"{len(self.train)} examples{packed}, {tokens:,} tokens, {learned:,} of them learned, "
            f"at most {self.length} each{held}"
        )

    def prompts(self) -> list[list[int]]:
        """Return what samples go on from: the user's texts, or the start of some examples."""
        if self.options.prompts and self.tokenizer is not None:
            return [self.tokenizer.encode(text).ids for text in self.options.prompts]
        starts = []
        for e in (*self.held, *self.train)[:2]:
            first = np.flatnonzero(e.labels == e.ids)
            at = int(first[0]) if first.size and first[0] > 0 else min(8, max(1, len(e) // 4))
            starts.append(e.ids[:at].tolist())
        return starts

    def ends(self) -> set[int]:
        """Return the tokens that end a text: the model's own, and that of an answer's end."""
        ends = set(self.folder.eos)
        if self.tokenizer is None:
            return ends
        own = self.tokenizer.id_of("eos_token")
        special = self.tokenizer.special_ids()
        answer = [t for t in self.train[0].labels.tolist() if t in special]
        return {*ends, *([] if own is None else [own]), *answer[-1:]}


def split(
    examples: Examples, options: FineTuneOptions
) -> tuple[Sequence[Example], Sequence[Example]]:
    """Return examples to learn from and those held back, by the seed."""
    every, asked = examples.examples, options.validation
    n = len(every)
    if isinstance(asked, str | os.PathLike) and not is_part(asked):
        return every, ()
    if asked is None:
        count = min(_MOST, int(n * _PART)) if n >= _ENOUGH else 0
    else:
        part = float(os.fspath(asked) if isinstance(asked, os.PathLike) else asked)
        if not 0.0 <= part < 1.0:
            raise PrepareError(f"validation must be a file, or a part below 1: {part}")
        count = round(n * part)
    if not count:
        return every, ()
    if count >= n:
        raise PrepareError(f"{n} examples are too few to hold {count} back")
    order = shuffled(n, options.seed, 1 << 20)
    held = set(order[:count].tolist())
    return [e for i, e in enumerate(every) if i not in held], [every[i] for i in sorted(held)]


def is_part(value: Any) -> bool:
    """Return whether a value stands for a part of the data, such as ``"0.1"``."""
    try:
        float(os.fspath(value) if isinstance(value, os.PathLike) else value)
    except (TypeError, ValueError):
        return False
    return True


def is_arrays(data: Any) -> bool:
    """Return whether data are token ids already."""
    if isinstance(data, Mapping):
        return "input_ids" in data
    if isinstance(data, str | os.PathLike) or not hasattr(data, "__getitem__") or not len(data):
        return False
    first = data[0]
    return not isinstance(first, str | Mapping) and hasattr(first, "__len__")


__all__ = ["LENGTH", "CausalTask", "Task", "is_arrays", "is_part", "split"]
