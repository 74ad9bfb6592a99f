"""Tasks of fine-tuning: each turns data into batches, adapts the model and chooses a loss.

CausalTask          language models: messages, prompts with completions, or text
ClassificationTask  encoders: texts with labels
RegressionTask      encoders: texts with numbers
TaggingTask         encoders: words with tags
EmbeddingTask       encoders: pairs or triplets of texts
VisionTask          image classifiers: images with labels
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import PrepareError, ShapeError, argument
from onnxtrain.finetuning.arguments import FineTuneOptions
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io import CheckedModel, load
from onnxtrain.graph.io.limits import quote
from onnxtrain.heads import replace_head
from onnxtrain.losses import LossLike, LossTerm, MultipleNegatives
from onnxtrain.manifest import TensorSpec
from onnxtrain.text.data import (
    IGNORE_INDEX,
    EpochBatches,
    Example,
    Examples,
    GroupBatches,
    Record,
    Records,
    TokenBatches,
    check_vocabulary,
    from_arrays,
    make_examples,
    pack,
    preview,
    read_records,
)
from onnxtrain.text.model_folder import (
    LOGITS,
    ModelFolder,
    Settings,
    add_classifier,
    add_pooling,
    add_token_classifier,
    read_settings,
    without_cache,
)
from onnxtrain.text.tokenizer import Tokenizer
from onnxtrain.training.data import Batch, as_fraction, held_out, shuffled
from onnxtrain.training.data_files import read_images, sorted_labels

LABELS = "labels"
DEFAULT_MAX_LENGTH = 512
# Default validation split: 5 % of at least 20 examples. 64 examples keep an evaluation short.
_VALIDATION_FRACTION, _MIN_EXAMPLES, _MAX_VALIDATION = 0.05, 20, 64


class Task:
    """Data, model and loss of one kind of fine-tuning."""

    loss: LossLike
    metrics: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    """Weights to train besides adapters, such as those of a new head."""

    def __init__(self, folder: ModelFolder, options: FineTuneOptions) -> None:
        self.folder, self.options = folder, options
        self.notes: list[str] = []
        self.tokenizer: Tokenizer | None = None

    @property
    def max_length(self) -> int:
        """The maximum number of tokens per example.

        Raises:
            PrepareError: if the option ``max_length`` exceeds the model's limit.
        """
        requested, limit = self.options.max_length, self.folder.max_positions
        if requested is None:
            return min(DEFAULT_MAX_LENGTH, limit or DEFAULT_MAX_LENGTH)
        if limit is not None and requested > limit:
            raise PrepareError(
                f"max_length={requested} exceeds the {limit} positions of the model\n"
                f"hint: {argument('max_length', limit)}"
            )
        return requested

    @property
    def pad_token_id(self) -> int:
        """The padding token; 0 if neither the tokenizer nor the model has one."""
        own = None if self.tokenizer is None else self.tokenizer.id_of("pad_token")
        return next((p for p in (own, self.folder.pad_token_id) if p is not None), 0)

    def read(self, data: Any) -> Records:
        """Read records, and load the tokenizer on the first call."""
        if self.tokenizer is None:
            self.tokenizer = Tokenizer(self.options.tokenizer or self.folder.folder)
        records = read_records(data)
        if records.note():
            self.notes.append(records.note())
        return records

    def model(self) -> CheckedModel:
        """Return the model to train, before adapters are added."""
        return self.folder.model

    def for_training(self, model: CheckedModel) -> CheckedModel:
        """Return the model that :func:`onnxtrain.build` gets, after adapters are added."""
        return model

    def batches(self, names: Sequence[str], *, validation: bool = False) -> TokenBatches | None:
        """Return the batches for training or validation; ``None`` without validation data."""
        raise NotImplementedError

    @property
    def largest_batch(self) -> tuple[int, int]:
        """Rows and tokens per row of the largest batch."""
        raise NotImplementedError

    def memory_sizes(self) -> tuple[dict[str, Any], str]:
        """Return the largest batch as arguments of ``plan``, and its description."""
        rows, length = self.largest_batch
        return {"tokens": f"{rows}x{length}"}, f"{rows} x {length} tokens"

    def preview(self) -> str:
        """Return a text with the first examples."""
        raise NotImplementedError

    def summary(self) -> str:
        """Return a line with the size of the data."""
        raise NotImplementedError


def _validation_summary(count: int) -> str:
    return f"{count} for validation" if count else "no validation data"


class CausalTask(Task):
    """Train a language model to predict the next token."""

    loss = "causal_lm"

    def __init__(self, folder: ModelFolder, options: FineTuneOptions, data: Any) -> None:
        super().__init__(folder, options)
        self.records: Records | None = None
        train, validation = train_validation_split(self._examples(data, keep=True), options)
        if options.validation is not None and as_fraction(options.validation) is None:
            validation = self._examples(options.validation).examples
        self.train, self.validation = train, validation
        self.rows = pack(train, self.max_length) if options.pack else list(train)

    def _examples(self, data: Any, *, keep: bool = False) -> Examples:
        if is_token_arrays(data):
            arrays = data if isinstance(data, Mapping) else {"input_ids": data}
            examples = from_arrays(arrays["input_ids"], arrays.get("labels"))
            long = [e.line - 1 for e in examples.examples if len(e) > self.max_length]
            if long:
                raise ShapeError(
                    f"{len(long)} rows have more than {self.max_length} tokens, first row {long[0]}"
                    "\nhint: truncate the rows or increase max_length"
                )
            if examples.note():
                self.notes.append(f"the data: {examples.note()}")
            check_vocabulary(examples, self.folder.vocab_size)
            return examples
        records = self.read(data)
        if records.format not in ("messages", "completion", "unpaired", "text"):
            method = argument("method", "dpo")
            other = f", or {method} for pairs" if records.format == "preference" else ""
            raise PrepareError(
                f"causal_lm does not support records with {', '.join(records.fields)}\n"
                f"hint: use messages, prompt and completion, or text{other}"
            )
        assert self.tokenizer is not None
        if records.format == "messages" and not self.tokenizer.has_template:
            self.notes.append("the model has no chat template; using 'User: ...', 'Assistant: ...'")
        examples = make_examples(
            records, self.tokenizer, max_length=self.max_length, prompt=self.options.learn_prompts
        )
        if examples.note():
            self.notes.append(f"{records.name}: {examples.note()}")
        check_vocabulary(examples, self.folder.vocab_size, self.tokenizer)
        if keep:
            self.records = records
        return examples

    def for_training(self, model: CheckedModel) -> CheckedModel:
        """Return the model without its KV cache."""
        return CheckedModel(without_cache(model))

    def batches(self, names: Sequence[str], *, validation: bool = False) -> TokenBatches | None:
        """Return the batches."""
        rows = self.validation if validation else self.rows
        seed = None if validation else self.options.seed
        size = self.options.batch_size
        if not rows:
            return None
        return TokenBatches(rows, names, batch_size=size, pad=self.pad_token_id, seed=seed)

    @property
    def largest_batch(self) -> tuple[int, int]:
        """Rows and tokens per row of the largest batch."""
        return min(self.options.batch_size, len(self.rows)), max(len(e) for e in self.rows)

    def preview(self) -> str:
        """Return the first three examples, with the tokens that count in the loss."""
        return preview(self.train, self.tokenizer)

    def summary(self) -> str:
        """Return a line with the numbers of examples and tokens."""
        tokens, learned = (sum(map(f, self.train)) for f in (len, lambda e: e.learned))
        packed = f" in {len(self.rows)} rows" if self.options.pack else ""
        return (
            f"{len(self.train)} examples{packed}, {tokens:,} tokens, {learned:,} in the loss, "
            f"max length {self.max_length}; {_validation_summary(len(self.validation))}"
        )

    def prompts(self) -> list[list[int]]:
        """Return prompts for samples: those of the options, or the beginnings of two examples."""
        if self.options.prompts and self.tokenizer is not None:
            return [self.tokenizer.encode(text).ids for text in self.options.prompts]
        prompts = []
        for e in (*self.validation, *self.train)[:2]:
            # The prompt of the example, or a quarter of a plain text.
            learned = np.flatnonzero(e.labels == e.ids)
            has_prompt = learned.size and learned[0] > 0
            length = int(learned[0]) if has_prompt else min(8, max(1, len(e) // 4))
            prompts.append(e.ids[:length].tolist())
        return prompts

    def stop_token_ids(self) -> set[int]:
        """Return end-of-sequence tokens of model, tokenizer and chat template."""
        ids = set(self.folder.eos_token_ids)
        if self.tokenizer is None:
            return ids
        own = self.tokenizer.id_of("eos_token")
        # The last special token of an answer ends the turn, whatever the configuration says.
        special = self.tokenizer.special_ids()
        in_answer = [t for t in self.train[0].labels.tolist() if t in special]
        return {*ids, *([] if own is None else [own]), *in_answer[-1:]}


def train_validation_split(
    examples: Examples, options: FineTuneOptions
) -> tuple[Sequence[Example], Sequence[Example]]:
    """Split examples at random into training and validation; all train if validation is a file."""
    rows, requested = examples.examples, options.validation
    n = len(rows)
    fraction = as_fraction(requested)
    if requested is None:
        count = min(_MAX_VALIDATION, int(n * _VALIDATION_FRACTION)) if n >= _MIN_EXAMPLES else 0
    elif fraction is None:
        return rows, ()
    else:
        if not 0.0 <= fraction < 1.0:
            raise PrepareError(
                f"validation must be a file or a fraction in [0, 1), got {fraction:g}"
            )
        count = round(n * fraction)
    if not count:
        return rows, ()
    if count >= n:
        raise PrepareError(
            f"validation={requested} leaves no examples to train on: {n} examples in all\n"
            "hint: use a smaller fraction or more data"
        )
    picked = held_out(n, count, options.seed).tolist()
    chosen = set(picked)
    return [e for i, e in enumerate(rows) if i not in chosen], [rows[i] for i in picked]


def is_token_arrays(data: Any) -> bool:
    """Return whether the data are token ids."""
    if isinstance(data, Mapping):
        return "input_ids" in data
    if isinstance(data, str | os.PathLike) or not hasattr(data, "__getitem__") or not len(data):
        return False
    first = data[0]
    return not isinstance(first, str | Mapping) and hasattr(first, "__len__")


def with_classification_head(
    source: CheckedModel, output: str, classes: int, *, seed: int
) -> tuple[ir.Model, str]:
    """Return a copy with one output, a logit per class, and a note if the head was replaced.

    Args:
        source: the model.
        output: the name of its logits.
        classes: the number of classes.
        seed: random seed for the weights of a new head.
    """
    logits = next(y for y in source.model.graph.outputs if y.name == output)
    dims, note = S.dims_of(logits) or (), ""
    if dims[-1:] == (classes,):
        model = load(source)
    else:
        known = dims[-1] if dims else "an unknown number"
        note = f"replaced the classification head: {classes} classes instead of {known}"
        model = load(replace_head(source, output, classes, seed=seed))
    model.graph.outputs[:] = [y for y in model.graph.outputs if y.name == output]
    return model, note


def head_weights(model: ir.Model) -> tuple[str, ...]:
    """Return the weight and bias of the layer that computes the first output."""
    value = model.graph.outputs[0]
    while (node := value.producer()) is not None:
        weights = [x.name or "" for x in node.inputs if x is not None and x.is_initializer()]
        if node.op_type in ("Gemm", "MatMul", "Conv"):
            return tuple(weights)
        if node.op_type == "Add" and weights:
            inner = next(x for x in node.inputs if x is not None and not x.is_initializer())
            matmul = inner.producer()
            if matmul is not None and matmul.op_type == "MatMul":
                inputs = [x for x in matmul.inputs if x is not None and x.is_initializer()]
                return (*(x.name or "" for x in inputs), *weights)
        first = node.inputs[0] if node.inputs else None
        if first is None:
            break
        value = first
    return ()


_MAX_CHARACTERS = 60  # of a field in a preview


class GroupTask(Task):
    """Train on groups of texts: one text with a label, a pair or triplet, or two answers."""

    formats: tuple[str, ...] = ()

    def __init__(self, folder: ModelFolder, options: FineTuneOptions, data: Any) -> None:
        super().__init__(folder, options)
        self.records = self._read(data)
        self.groups = self._encoded(self.records)
        self.train, self.validation = self._split(options)

    def _read(self, data: Any) -> Records:
        records = self.read(data)
        if records.format not in self.formats:
            kind = next((k for k, f in _KINDS_OF_RECORDS if records.format in f), None)
            hint = "" if kind is None else f", or {argument('kind', kind)}"
            raise PrepareError(
                f"{self.folder.kind} does not support records with {', '.join(records.fields)}\n"
                f"hint: use {self._example_record()}{hint}"
            )
        return records

    def _example_record(self) -> str:
        return '{"text": ..., "label": ...}'

    def _split(self, options: FineTuneOptions) -> tuple[list[int], list[int]]:
        """Return the indices of groups for training and for validation."""
        if options.validation is not None and as_fraction(options.validation) is None:
            first = len(self.records.records)
            more = self._read(options.validation)
            self.records = Records((*self.records.records, *more.records), (), self.records.name)
            self.groups += self._encoded(more)
            return list(range(first)), list(range(first, len(self.groups)))
        indices = Examples(tuple(_index_example(i) for i in range(len(self.groups))))
        train, validation = train_validation_split(indices, options)
        return [e.line for e in train], [e.line for e in validation]

    def _encoded(self, records: Records) -> list[list[Example]]:
        groups, truncated, length = [], 0, self.max_length
        for record in records.records:
            group = self._group(record)
            truncated += any(len(e) > length for e in group)
            groups.append([Example(e.ids[:length], e.labels[:length], e.line) for e in group])
        if truncated:
            self.notes.append(f"{records.name}: {truncated} examples truncated to {length} tokens")
        flat = Examples(tuple(e for group in groups for e in group))
        check_vocabulary(flat, self.folder.vocab_size, self.tokenizer)
        return groups

    def _group(self, record: Record) -> list[Example]:
        """Return the rows of a record."""
        return [self._example(text, record) for text in self._texts(record)]

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
        picked = self.validation if validation else self.train
        labels = self._labels()
        if not picked:
            return None
        return GroupBatches(
            [self.groups[i] for i in picked],
            None if labels is None else labels[picked],
            names,
            batch_size=self.options.batch_size,
            pad=self.pad_token_id,
            seed=None if validation else self.options.seed,
        )

    @property
    def largest_batch(self) -> tuple[int, int]:
        """Rows and tokens per row of the largest batch."""
        groups = [self.groups[i] for i in self.train]
        rows = min(self.options.batch_size, len(groups)) * len(groups[0])
        return rows, max(len(e) for group in groups for e in group)

    def preview(self) -> str:
        """Return the fields and lengths of the first three records."""
        lines = []
        for i in self.train[:3]:
            record = self.records.records[i]
            fields = ", ".join(
                f"{n}: {str(v)[:_MAX_CHARACTERS]!r}" for n, v in record.fields.items()
            )
            tokens = " + ".join(str(len(e)) for e in self.groups[i])
            lines.append(f"line {record.line} ({tokens} tokens): {fields}")
        return "\n".join(lines)

    def summary(self) -> str:
        """Return a line with the number of records."""
        fields = ", ".join(self.records.fields)
        validation = _validation_summary(len(self.validation))
        return f"{len(self.train)} records with {fields}; {validation}"


def _index_example(i: int) -> Example:
    # train_validation_split splits examples; the line is the index of a group or an image.
    return Example(np.empty(0, np.int64), np.empty(0, np.int64), i)


class ClassificationTask(GroupTask):
    """Train an encoder to classify texts."""

    formats = ("label",)
    loss = "cross_entropy"
    metrics = ("accuracy",)

    def __init__(self, folder: ModelFolder, options: FineTuneOptions, data: Any) -> None:
        super().__init__(folder, options, data)
        known = {str(self.records.records[i].fields["label"]) for i in self.train}
        self.classes = sorted_labels(known)
        _check_classes(self.classes)

    def _labels(self) -> np.ndarray:
        index = {name: i for i, name in enumerate(self.classes)}
        unknown = [r for r in self.records.records if str(r.fields["label"]) not in index]
        if unknown:
            label, line = unknown[0].fields["label"], unknown[0].line
            raise PrepareError(
                f"unknown class {label!r} in validation data, line {line} "
                f"(expected one of {', '.join(self.classes[:8])})"
            )
        return np.array([index[str(r.fields["label"])] for r in self.records.records], np.int64)

    def model(self) -> CheckedModel:
        """Return the model with one logit per class."""
        count, source = len(self.classes), self.folder.model
        logits = next((y for y in source.model.graph.outputs if y.name == LOGITS), None)
        dims = () if logits is None else S.dims_of(logits) or ()
        if len(dims) != 2:
            self.notes.append(f"added a classification head for {count} classes; it is trained")
            self.trained = ("classifier.weight", "classifier.bias")
            return CheckedModel(add_classifier(source, count, seed=self.options.seed))
        model, note = with_classification_head(source, LOGITS, count, seed=self.options.seed)
        self.notes += [note] if note else []
        self.trained = head_weights(model)
        return CheckedModel(model)

    def summary(self) -> str:
        """Return a line with the number of records and the classes."""
        return f"{super().summary()}; {len(self.classes)} classes: {', '.join(self.classes[:8])}"


class RegressionTask(GroupTask):
    """Train an encoder to predict a number for each text."""

    formats = ("label",)
    loss = LossTerm("mse", target=LABELS)
    metrics = ("mae",)

    def __init__(self, folder: ModelFolder, options: FineTuneOptions, data: Any) -> None:
        super().__init__(folder, options, data)
        self.values = np.array([self._number(r) for r in self.records.records], np.float32)

    def _example_record(self) -> str:
        return '{"text": ..., "label": 2.5}'

    def _number(self, record: Record) -> float:
        label = record.fields["label"]
        try:
            number = float(label)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise PrepareError(
                f"line {record.line}: the label {label!r} is not a number\n"
                f"hint: {argument('kind', 'classification')} learns names"
            )
        return number

    def _labels(self) -> np.ndarray:
        return self.values[:, None]

    def model(self) -> CheckedModel:
        """Return the model with one output; the bias of a new head is the mean of the labels."""
        source = self.folder.model
        logits = next((y for y in source.model.graph.outputs if y.name == LOGITS), None)
        dims = () if logits is None else S.dims_of(logits) or ()
        if len(dims) != 2:
            model, note = add_classifier(source, 1, seed=self.options.seed), "added a head"
        else:
            model, note = with_classification_head(source, LOGITS, 1, seed=self.options.seed)
        self.trained = head_weights(model)
        if note:
            mean = float(self.values[self.train].mean())
            self.notes.append(f"{note} for one number, at first the mean of the labels {mean:.4g}")
            for name in self.trained:
                x = model.graph.initializers[name]
                if x.const_value is not None and x.const_value.size == 1:
                    array = np.full(x.const_value.shape.numpy(), mean, x.const_value.dtype.numpy())
                    x.const_value = ir.Tensor(array, name=name)
        return CheckedModel(model)


class TaggingTask(GroupTask):
    """Train an encoder to classify words: named entities, parts of speech.

    The first token of a word has its tag; the others, and special tokens, do not count.
    """

    formats = ("tags",)
    loss = "cross_entropy:axis=-1"
    metrics = ("accuracy",)

    def __init__(self, folder: ModelFolder, options: FineTuneOptions, data: Any) -> None:
        self.classes: list[str] = []
        super().__init__(folder, options, data)

    def _example_record(self) -> str:
        return '{"tokens": ["Anna", "sings"], "tags": ["B-PER", "O"]}, or a .conll file'

    def _read(self, data: Any) -> Records:
        records = super()._read(data)
        if not self.classes:
            self.classes = sorted_labels(str(t) for r in records.records for t in r.fields["tags"])
            _check_classes(self.classes)
        return records

    def _group(self, record: Record) -> list[Example]:
        assert self.tokenizer is not None
        words, tags = record.fields["tokens"], [str(t) for t in record.fields["tags"]]
        unknown = [t for t in tags if t not in self.classes]
        if unknown:
            raise PrepareError(
                f"unknown tag {unknown[0]!r} in validation data, line {record.line} "
                f"(expected one of {', '.join(self.classes[:8])})"
            )
        text = " ".join(words)
        ids, spans = self.tokenizer.encode(text)
        labels = np.full(len(ids), IGNORE_INDEX, np.int64)
        ends = np.cumsum([len(w) + 1 for w in words])
        done = -1
        for i, (start, end) in enumerate(spans):
            # Tokens of byte-level tokenizers begin with the space before the word.
            start += len(text[start:end]) - len(text[start:end].lstrip())
            word = int(np.searchsorted(ends, start, side="right"))
            if start < end and word > done:
                labels[i], done = self.classes.index(tags[word]), word
        return [Example(np.array(ids, np.int64), labels, record.line)]

    def batches(self, names: Sequence[str], *, validation: bool = False) -> TokenBatches | None:
        """Return the batches."""
        picked = self.validation if validation else self.train
        if not picked:
            return None
        return TokenBatches(
            [self.groups[i][0] for i in picked],
            names,
            batch_size=self.options.batch_size,
            pad=self.pad_token_id,
            seed=None if validation else self.options.seed,
        )

    def model(self) -> CheckedModel:
        """Return the model with logits for each token."""
        count, source = len(self.classes), self.folder.model
        logits = next((y for y in source.model.graph.outputs if y.name == LOGITS), None)
        if logits is None:
            self.notes.append(f"added a classification head for {count} tags; it is trained")
            model = add_token_classifier(source, count, seed=self.options.seed)
        else:
            model, note = with_classification_head(source, LOGITS, count, seed=self.options.seed)
            self.notes += [note] if note else []
        self.trained = head_weights(model)
        return CheckedModel(model)

    def summary(self) -> str:
        """Return a line with the number of records and the tags."""
        return f"{super().summary()}; {len(self.classes)} tags: {', '.join(self.classes[:8])}"


def _check_classes(classes: Sequence[str]) -> None:
    if len(classes) < 2:
        raise PrepareError(
            f"classification requires at least two classes, got {', '.join(classes) or 'none'}\n"
            "hint: check the labels of the data"
        )


_KINDS_OF_RECORDS = (
    ("classification", ("label",)),
    ("embeddings", ("pair", "triplet")),
    ("token_classification", ("tags",)),
)


class EmbeddingTask(GroupTask):
    """Train an encoder on pairs of texts: similar texts get similar embeddings."""

    formats = ("pair", "triplet")

    def __init__(self, folder: ModelFolder, options: FineTuneOptions, data: Any) -> None:
        super().__init__(folder, options, data)
        self.loss = MultipleNegatives(parts=2 if self.records.format == "pair" else 3)
        if options.batch_size < 2:
            raise PrepareError(
                "batch_size must be at least 2: the other pairs of a batch are the negatives"
            )

    def _example_record(self) -> str:
        return '{"anchor": ..., "positive": ...}, optionally with "negative"'

    def _texts(self, record: Record) -> list[str]:
        return [str(v) for v in record.fields.values()]

    def model(self) -> CheckedModel:
        """Return the encoder with one embedding per text."""
        return CheckedModel(add_pooling(self.folder.model))


_DEFAULT_IMAGE_SIZE = 224  # for symbolic sizes without a preprocessor_config.json


class ImageBatches(TokenBatches):
    """Batches of images with labels.

    Args:
        images: all images, as the model expects them.
        labels: the class index of each image.
        names: names of the input and the target.
        batch_size: images per batch.
        seed: random seed for shuffling; ``None`` keeps the order.
    """

    unit = "images"

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        names: Sequence[str],
        *,
        batch_size: int,
        seed: int | None = 0,
    ) -> None:
        super().__init__([], names, batch_size=batch_size, seed=seed)
        self.images, self.labels = images, labels

    def __call__(self, epoch: int) -> EpochBatches:
        """Return the batches of an epoch."""
        n = len(self.labels)
        return EpochBatches(
            self, np.arange(n) if self.seed is None else shuffled(n, self.seed, epoch)
        )

    def batch(self, picked: Sequence[int]) -> Batch:
        """Return the images with these indices as a batch."""
        rows = np.asarray(picked)
        self.tokens += len(rows)
        image = next(n for n in self.names if n != LABELS)
        arrays = {image: self.images[rows], LABELS: self.labels[rows]}
        return Batch(arrays, rows, len(rows))


class VisionTask(Task):
    """Train an image classifier on folders of images, a table of paths, or arrays."""

    loss = "cross_entropy"
    metrics = ("accuracy",)

    def __init__(self, folder: ModelFolder, options: FineTuneOptions, data: Any) -> None:
        super().__init__(folder, options)
        self._graph = folder.model.model.graph
        self.image = self._input()
        self.classes: list[str] = []
        self.images, self.labels = self._read(data)
        self.train, self.validation = self._split(options)

    def _input(self) -> TensorSpec:
        """Return the image input; symbolic sizes come from preprocessor_config.json."""
        inputs = [x for x in self._graph.inputs if len(S.dims_of(x) or ()) == 4]
        if len(self._graph.inputs) != 1 or not inputs:
            listing = ", ".join(S.describe_value(x) for x in self._graph.inputs)
            raise PrepareError(
                f"vision requires a model with one 4-D input, got {listing}\n"
                "hint: onnxtrain.build supports other models"
            )
        (x,) = inputs
        sides = _image_size(self._settings())
        known = (None, 3, *sides)
        dims = [
            d if isinstance(d, int) else k for d, k in zip(S.dims_of(x) or (), known, strict=True)
        ]
        shape = ("batch", *(d if d is not None else _DEFAULT_IMAGE_SIZE for d in dims[1:]))
        return TensorSpec(x.name or "", "float32", shape, "input")

    def _settings(self) -> Settings:
        return read_settings(self.folder.folder / "preprocessor_config.json")

    def _read(self, data: Any) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(data, Mapping):
            return self._arrays(data)
        if not isinstance(data, str | os.PathLike):
            raise PrepareError(
                "image data must be a folder, a table of paths, or a dict of arrays, got "
                f"{type(data).__name__}"
            )
        target = TensorSpec(LABELS, "int64", ("batch",), "target")
        classes = {LABELS: self.classes} if self.classes else {}
        skipped = list[str]()
        read = read_images(Path(data), (self.image, target), classes, skipped)
        if skipped:
            more = f"; and {len(skipped) - 5} more" if len(skipped) > 5 else ""
            total = len(skipped) + len(read.arrays[LABELS])
            listing = "; ".join(skipped[:5])
            self._note(f"{data}: skipped {len(skipped)} of {total} images: {listing}{more}")
        self.classes = list(read.classes[LABELS])
        return self._normalize(read.arrays[self.image.name]), read.arrays[LABELS]

    def _arrays(self, data: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return arrays without preprocessing."""
        expected = {self.image.name, LABELS}
        if set(data) != expected:
            raise PrepareError(
                f"unexpected arrays {', '.join(sorted(data))} (expected "
                f"{', '.join(sorted(expected))})"
            )
        images, labels = np.asarray(data[self.image.name], np.float32), np.asarray(data[LABELS])
        if len(images) != len(labels) or labels.ndim != 1:
            raise ShapeError(
                f"labels must have shape [{len(images)}], one per image, got {list(labels.shape)}"
            )
        names = [str(t) for t in labels.tolist()]
        self.classes = self.classes or sorted_labels(names)
        unknown = [n for n in names if n not in self.classes]
        if unknown:
            raise PrepareError(
                f"unknown class {unknown[0]!r} in validation data "
                f"(expected one of {', '.join(self.classes[:8])})"
            )
        return images, np.array([self.classes.index(n) for n in names], np.int64)

    def _normalize(self, images: np.ndarray) -> np.ndarray:
        """Apply mean and standard deviation of preprocessor_config.json to images in [0, 1]."""
        settings = self._settings()
        mean, std = settings.get("image_mean"), settings.get("image_std")
        if not settings.get("do_normalize", mean is not None) or mean is None or std is None:
            self._note(
                "images are scaled to [0, 1] and not normalized: no preprocessor_config.json with "
                "image_mean and image_std"
            )
            return images
        axis = 1 if self.image.shape[1] in (1, 3) else 3
        shape = [-1 if i == axis else 1 for i in range(4)]
        for name, values in (("image_mean", mean), ("image_std", std)):
            if not _are_channels(values, images.shape[axis], positive=name == "image_std"):
                raise PrepareError(
                    f"{str(settings.path)!r}: {name} must be {images.shape[axis]} finite numbers"
                    f"{' above 0' if name == 'image_std' else ''}, got {quote(values)}"
                )
        mean, std = (np.asarray(v, np.float32).reshape(shape) for v in (mean, std))
        return (images - mean) / std

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _split(self, options: FineTuneOptions) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of images for training and for validation."""
        _check_classes(self.classes)
        n, requested = len(self.labels), options.validation
        if requested is not None and as_fraction(requested) is None:
            images, labels = self._read(requested)
            self.images = np.concatenate([self.images, images])
            self.labels = np.concatenate([self.labels, labels])
            return np.arange(n), np.arange(n, len(self.labels))
        indices = Examples(tuple(_index_example(i) for i in range(n)))
        train, validation = (
            np.array([e.line for e in part], np.int64)
            for part in train_validation_split(indices, options)
        )
        return train, validation

    def model(self) -> CheckedModel:
        """Return the model with one logit per class."""
        scores = [y for y in self._graph.outputs if len(S.dims_of(y) or ()) == 2]
        if not scores:
            listing = ", ".join(S.describe_value(y) for y in self._graph.outputs)
            raise PrepareError(
                f"vision requires an output with the shape [batch, classes], got {listing}\n"
                "hint: onnxtrain.build supports other models"
            )
        named = next((y for y in scores if y.name == "logits"), scores[0])
        model, note = with_classification_head(
            self.folder.model, named.name or "", len(self.classes), seed=self.options.seed
        )
        if note:
            self._note(note)
        self.trained = head_weights(model)
        return CheckedModel(model)

    def batches(self, names: Sequence[str], *, validation: bool = False) -> TokenBatches | None:
        """Return the batches."""
        picked = self.validation if validation else self.train
        if not len(picked):
            return None
        return ImageBatches(
            self.images[picked],
            self.labels[picked],
            names,
            batch_size=self.options.batch_size,
            seed=None if validation else self.options.seed,
        )

    def memory_sizes(self) -> tuple[dict[str, Any], str]:
        """Return the largest batch as arguments of ``plan``, and its description."""
        rows = min(self.options.batch_size, len(self.train))
        sizes = " x ".join(map(str, self.images.shape[1:]))
        return {"batch": rows}, f"{rows} images of {sizes}"

    def preview(self) -> str:
        """Return class, size and range of the first three images."""
        lines = []
        for i in self.train[:3]:
            image = self.images[i]
            sizes = " x ".join(map(str, image.shape))
            values = f"{image.min():.3g} to {image.max():.3g}"
            lines.append(f"{self.classes[self.labels[i]]}: {sizes}, values from {values}")
        return "\n".join(lines)

    def summary(self) -> str:
        """Return a line with the number of images and the classes."""
        validation = _validation_summary(len(self.validation))
        names = ", ".join(self.classes[:8])
        return f"{len(self.train)} images; {validation}; {len(self.classes)} classes: {names}"


def _are_channels(values: Any, count: int, *, positive: bool) -> bool:
    """Return whether values are a number per channel, or one number for all of them."""
    numbers = values if isinstance(values, list) else [values]
    low = 1e-6 if positive else -1e6
    return len(numbers) in (1, count) and all(
        isinstance(v, int | float) and not isinstance(v, bool) and low <= v <= 1e6 for v in numbers
    )


def _image_size(settings: Settings) -> tuple[int | None, int | None]:
    """Return height and width in a preprocessor configuration, if it has them."""
    name = "crop_size" if settings.get("crop_size") else "size"
    if not isinstance(settings.get(name), Mapping):
        return settings.size(name), settings.size(name)
    size = settings.inner(name)
    edge = size.size("shortest_edge")
    return size.size("height") or edge, size.size("width") or edge
