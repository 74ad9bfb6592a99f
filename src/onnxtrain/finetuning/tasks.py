"""What is learned: data of a format, the model made ready for it, and the loss.

The last layer of a classifier: made for other classes, and trained beside adapters.

Encoders: classes of texts, and vectors of texts that belong together.

Images: a model learns their classes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import PrepareError, ShapeError
from onnxtrain.finetuning.arguments import FineTuneOptions
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io import CheckedModel, load
from onnxtrain.heads import replace_head
from onnxtrain.losses import LossLike, MultipleNegatives
from onnxtrain.manifest import TensorSpec
from onnxtrain.text.data import (
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
    add_classifier,
    add_pooling,
    without_cache,
)
from onnxtrain.text.tokenizer import Tokenizer
from onnxtrain.training.data import Batch, shuffled
from onnxtrain.training.data_files import read_images, sorted_labels

DEFAULT_MAX_LENGTH = 512
_VALIDATION_FRACTION, _MIN_EXAMPLES, _MAX_VALIDATION = (
    0.05,
    20,
    64,
)  # of the data, if there is enough, for validation


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
        asked, most = self.options.max_length, self.folder.max_positions
        if asked is not None and most is not None and asked > most:
            raise PrepareError(
                f"max_length={asked} is beyond the {most} positions of the model\n"
                f"hint: max_length={most} is the most it takes"
            )
        return asked if asked is not None else min(DEFAULT_MAX_LENGTH, most or DEFAULT_MAX_LENGTH)

    @property
    def pad(self) -> int:
        """The token that rows are filled up with."""
        known = None if self.tokenizer is None else self.tokenizer.id_of("pad_token")
        return next((p for p in (known, self.folder.pad_token_id) if p is not None), 0)

    def read(self, data: Any) -> Records:
        """Return the records of data, and take the tokenizer."""
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
        train, held = train_validation_split(self._examples(data, keep=True), options)
        if isinstance(options.validation, str | os.PathLike) and not is_fraction(
            options.validation
        ):
            held = self._examples(options.validation).examples
        self.train, self.held = train, held
        self.rows = pack(train, self.length) if options.pack else list(train)

    def _examples(self, data: Any, *, keep: bool = False) -> Examples:
        if is_token_arrays(data):
            arrays = data if isinstance(data, Mapping) else {"input_ids": data}
            examples = from_arrays(arrays["input_ids"], arrays.get("labels"))
            long = [e.line - 1 for e in examples.examples if len(e) > self.length]
            if long:
                raise ShapeError(
                    f"{len(long)} rows are longer than {self.length} tokens, row {long[0]} first\n"
                    "hint: cut the rows, or raise max_length"
                )
            check_vocabulary(examples, self.folder.vocab_size)
            return examples
        records = self.read(data)
        if records.format not in ("messages", "completion", "text"):
            raise PrepareError(
                f"a language model does not learn from records of the format {records.format!r}\n"
                "hint: messages, prompt and completion, or text"
            )
        assert self.tokenizer is not None
        if records.format == "messages" and not self.tokenizer.has_template:
            self.notes.append("the model brings no chat template: a line per message, 'User: ...'")
        made = make_examples(
            records, self.tokenizer, max_length=self.length, prompt=self.options.learn_prompts
        )
        if made.note():
            self.notes.append(f"{records.name}: {made.note()}")
        check_vocabulary(made, self.folder.vocab_size, self.tokenizer)
        if keep:
            self.records = records
        return made

    def for_training(self, model: CheckedModel) -> CheckedModel:
        """Return the model without its KV cache."""
        return CheckedModel(without_cache(model))

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
        ends = set(self.folder.eos_token_ids)
        if self.tokenizer is None:
            return ends
        own = self.tokenizer.id_of("eos_token")
        special = self.tokenizer.special_ids()
        answer = [t for t in self.train[0].labels.tolist() if t in special]
        return {*ends, *([] if own is None else [own]), *answer[-1:]}


def train_validation_split(
    examples: Examples, options: FineTuneOptions
) -> tuple[Sequence[Example], Sequence[Example]]:
    """Return examples to learn from and those held back, by the seed."""
    every, asked = examples.examples, options.validation
    n = len(every)
    if isinstance(asked, str | os.PathLike) and not is_fraction(asked):
        return every, ()
    if asked is None:
        count = min(_MAX_VALIDATION, int(n * _VALIDATION_FRACTION)) if n >= _MIN_EXAMPLES else 0
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


def is_fraction(value: Any) -> bool:
    """Return whether a value stands for a part of the data, such as ``"0.1"``."""
    try:
        float(os.fspath(value) if isinstance(value, os.PathLike) else value)
    except (TypeError, ValueError):
        return False
    return True


def is_token_arrays(data: Any) -> bool:
    """Return whether data are token ids already."""
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
    """Return the weights of the last layer."""
    value = model.graph.outputs[0]
    while (node := value.producer()) is not None:
        weights = [x.name or "" for x in node.inputs if x is not None and x.is_initializer()]
        if node.op_type in ("Gemm", "MatMul", "Conv"):
            return tuple(weights)
        if node.op_type == "Add" and weights:
            inner = next(x for x in node.inputs if x is not None and not x.is_initializer())
            product = inner.producer()
            if product is not None and product.op_type == "MatMul":
                more = [
                    x.name or "" for x in product.inputs if x is not None and x.is_initializer()
                ]
                return (*more, *weights)
        first = node.inputs[0] if node.inputs else None
        if first is None:
            break
        value = first
    return ()


_MAX_CHARACTERS = 60


class _EncoderTask(Task):
    """Texts in groups."""

    formats: tuple[str, ...] = ()

    def __init__(self, folder: ModelFolder, options: FineTuneOptions, data: Any) -> None:
        super().__init__(folder, options)
        self.records = self._read(data)
        self.groups = self._encoded(self.records)
        self.train, self.held = self._split(options)

    def _read(self, data: Any) -> Records:
        records = self.read(data)
        if records.format not in self.formats:
            raise PrepareError(
                f"{records.name} has records of the format {records.format!r}, not "
                f"{' or '.join(self.formats)}\nhint: {self._hint()}"
            )
        return records

    def _hint(self) -> str:
        return '{"text": ..., "label": ...}'

    def _split(self, options: FineTuneOptions) -> tuple[list[int], list[int]]:
        """Return the numbers of groups to learn from, and of those held back."""
        if options.validation is not None and not is_fraction(options.validation):
            first = len(self.records.records)
            more = self._read(options.validation)
            self.records = Records((*self.records.records, *more.records), (), self.records.name)
            self.groups += self._encoded(more)
            return list(range(first)), list(range(first, len(self.groups)))
        numbers = Examples(tuple(_index_example(i) for i in range(len(self.groups))))
        train, held = train_validation_split(numbers, options)
        return [e.line for e in train], [e.line for e in held]

    def _encoded(self, records: Records) -> list[list[Example]]:
        groups, cut = [], 0
        for record in records.records:
            group = [self._example(text, record) for text in self._texts(record)]
            cut += any(len(e) > self.length for e in group)
            groups.append(
                [Example(e.ids[: self.length], e.labels[: self.length], e.line) for e in group]
            )
        if cut:
            self.notes.append(f"{records.name}: {cut} cut at {self.length} tokens")
        flat = Examples(tuple(e for group in groups for e in group))
        check_vocabulary(flat, self.folder.vocab_size, self.tokenizer)
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
            fields = ", ".join(
                f"{n}: {str(v)[:_MAX_CHARACTERS]!r}" for n, v in record.fields.items()
            )
            tokens = " + ".join(str(len(e)) for e in self.groups[i])
            lines.append(f"line {record.line} ({tokens} tokens): {fields}")
        return "\n".join(lines)

    def summary(self) -> str:
        """Return how many records there are."""
        held = f"; {len(self.held)} for validation" if self.held else "; no validation"
        return f"{len(self.train)} records of the format {self.records.format!r}{held}"


def _index_example(i: int) -> Example:
    return Example(np.empty(0, np.int64), np.empty(0, np.int64), i)


class ClassificationTask(_EncoderTask):
    """An encoder learns classes of texts."""

    formats = ("label",)
    loss = "cross_entropy"
    metrics = ("accuracy",)

    def __init__(self, folder: ModelFolder, options: FineTuneOptions, data: Any) -> None:
        super().__init__(folder, options, data)
        known = {str(self.records.records[i].fields["label"]) for i in self.train}
        self.classes = sorted_labels(known)
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
        """Return how many records and classes there are."""
        return f"{super().summary()}, {len(self.classes)} classes: {', '.join(self.classes[:8])}"


class EmbeddingTask(_EncoderTask):
    """An encoder learns vectors of texts: near where they belong together."""

    formats = ("pair", "triplet")

    def __init__(self, folder: ModelFolder, options: FineTuneOptions, data: Any) -> None:
        super().__init__(folder, options, data)
        self.loss = MultipleNegatives(parts=2 if self.records.format == "pair" else 3)
        if options.batch_size < 2:
            raise PrepareError("batch_size must be at least 2: other pairs are what to tell from")

    def _hint(self) -> str:
        return '{"anchor": ..., "positive": ...}, with or without "negative"'

    def _texts(self, record: Record) -> list[str]:
        return [str(v) for v in record.fields.values()]

    def model(self) -> CheckedModel:
        """Return the encoder with one embedding per text."""
        return CheckedModel(add_pooling(self.folder.model))


LABELS = "labels"
_DEFAULT_IMAGE_SIZE = 224  # of images, where nothing tells it


class ImageBatches(TokenBatches):
    """Batches of images with a label each.

    Args:
        images: all of them.
        labels: one for each.
        names: the input of the model, and the target.
        batch_size: images of a batch.
        seed: of the order; ``None`` keeps it.
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
        """Return some images as a batch."""
        rows = np.asarray(picked)
        self.tokens += len(rows)
        image = next(n for n in self.names if n != LABELS)
        arrays = {image: self.images[rows], LABELS: self.labels[rows]}
        return Batch((), arrays, rows, len(rows))


class VisionTask(Task):
    """A model learns classes of images: from folders, a table of paths, or arrays."""

    loss = "cross_entropy"
    metrics = ("accuracy",)

    def __init__(self, folder: ModelFolder, options: FineTuneOptions, data: Any) -> None:
        super().__init__(folder, options)
        self._graph = folder.model.model.graph
        self.image = self._input()
        self.classes: list[str] = []
        self.images, self.labels = self._read(data)
        self.train, self.held = self._split(options)

    def _input(self) -> TensorSpec:
        """Return the input for images; open sizes are those of the configuration."""
        inputs = [x for x in self._graph.inputs if len(S.dims_of(x) or ()) == 4]
        if len(self._graph.inputs) != 1 or not inputs:
            listing = ", ".join(S.describe_value(x) for x in self._graph.inputs)
            raise PrepareError(f"a vision model takes images only, this one {listing}")
        (x,) = inputs
        sides = _image_size(self._settings())
        known = (None, 3, *sides)
        dims = [
            d if isinstance(d, int) else k for d, k in zip(S.dims_of(x) or (), known, strict=True)
        ]
        shape = ("batch", *(d if d is not None else _DEFAULT_IMAGE_SIZE for d in dims[1:]))
        return TensorSpec(x.name or "", "float32", shape, "input")

    def _settings(self) -> dict[str, Any]:
        path = self.folder.folder / "preprocessor_config.json"
        if not path.is_file():
            return {}
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PrepareError(f"{str(path)!r}: cannot be read: {error}") from error
        return value if isinstance(value, dict) else {}

    def _read(self, data: Any) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(data, Mapping):
            return self._arrays(data)
        if not isinstance(data, str | os.PathLike):
            raise PrepareError(
                f"images are a folder, a table of paths, or arrays, not {type(data).__name__}"
            )
        target = TensorSpec(LABELS, "int64", ("batch",), "target")
        classes = {LABELS: self.classes} if self.classes else {}
        read = read_images(Path(data), (self.image, target), classes)
        self.classes = list(read.classes[LABELS])
        return self._normal(read.arrays[self.image.name]), read.arrays[LABELS]

    def _arrays(self, data: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return arrays as they are given: images as the model takes them."""
        wanted = {self.image.name, LABELS}
        if set(data) != wanted:
            raise PrepareError(f"arrays must be called {', '.join(sorted(wanted))}")
        images, texts = np.asarray(data[self.image.name], np.float32), np.asarray(data[LABELS])
        if len(images) != len(texts) or texts.ndim != 1:
            raise ShapeError(f"{len(images)} images, labels of shape {list(texts.shape)}")
        names = [str(t) for t in texts.tolist()]
        self.classes = self.classes or sorted_labels(names)
        strange = [n for n in names if n not in self.classes]
        if strange:
            raise PrepareError(f"the validation has a class that training has not: {strange[0]!r}")
        return images, np.array([self.classes.index(n) for n in names], np.int64)

    def _normal(self, images: np.ndarray) -> np.ndarray:
        """Return images from 0 to 1 as the model's own preparation has them."""
        settings = self._settings()
        mean, deviation = settings.get("image_mean"), settings.get("image_std")
        if not settings.get("do_normalize", mean is not None) or mean is None or deviation is None:
            self._note("images are numbers from 0 to 1: no preprocessor_config.json says otherwise")
            return images
        axis = 1 if self.image.shape[1] in (1, 3) else 3
        shape = [-1 if i == axis else 1 for i in range(4)]
        mean, deviation = (np.asarray(v, np.float32).reshape(shape) for v in (mean, deviation))
        return (images - mean) / deviation

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _split(self, options: FineTuneOptions) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of images to learn from, and of those held back."""
        if len(self.classes) < 2:
            raise PrepareError(f"there is one class only: {', '.join(self.classes)}")
        n, asked = len(self.labels), options.validation
        if asked is not None and not is_fraction(asked):
            images, labels = self._read(asked)
            self.images = np.concatenate([self.images, images])
            self.labels = np.concatenate([self.labels, labels])
            return np.arange(n), np.arange(n, len(self.labels))
        none = np.empty(0, np.int64)
        numbers = Examples(tuple(Example(none, none, i) for i in range(n)))
        train, held = (
            np.array([e.line for e in part], np.int64)
            for part in train_validation_split(numbers, options)
        )
        return train, held

    def model(self) -> CheckedModel:
        """Return the model with one logit per class."""
        scores = [y for y in self._graph.outputs if len(S.dims_of(y) or ()) == 2]
        if not scores:
            listing = ", ".join(S.describe_value(y) for y in self._graph.outputs)
            raise PrepareError(
                f"no output has a score per class: {listing}\n"
                "hint: onnxtrain.build takes models of other tasks, with arrays"
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
        picked = self.held if validation else self.train
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
        """Return the sizes of the largest batch, for a plan and in words."""
        rows = min(self.options.batch_size, len(self.train))
        return {"batch": rows}, f"{rows} images of {' x '.join(map(str, self.images.shape[1:]))}"

    def preview(self) -> str:
        """Return three images in words."""
        lines = []
        for i in self.train[:3]:
            image = self.images[i]
            sizes = " x ".join(map(str, image.shape))
            values = f"{image.min():.3g} to {image.max():.3g}"
            lines.append(f"{self.classes[self.labels[i]]}: {sizes}, numbers from {values}")
        return "\n".join(lines)

    def summary(self) -> str:
        """Return how many images and classes there are."""
        held = f"; {len(self.held)} for validation" if len(self.held) else "; no validation"
        names = ", ".join(self.classes[:8])
        return f"{len(self.train)} images{held}, {len(self.classes)} classes: {names}"


def _image_size(settings: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return height and width of images, if a configuration tells them."""
    size = settings.get("crop_size") or settings.get("size")
    if isinstance(size, int):
        return size, size
    if isinstance(size, Mapping):
        edge = size.get("shortest_edge")
        return size.get("height", edge), size.get("width", edge)
    return None, None
