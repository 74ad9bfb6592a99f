"""Pictures: a model learns their classes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import PrepareError, ShapeError
from onnxtrain.finetuning.heads import head_weights, with_head
from onnxtrain.finetuning.options import FineTuneOptions
from onnxtrain.finetuning.tasks import Task, is_part, split
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io import load
from onnxtrain.manifest import TensorSpec
from onnxtrain.text.batches import Epoch, TokenBatches
from onnxtrain.text.examples import Example, Examples
from onnxtrain.text.folder import ModelFolder
from onnxtrain.training.data import Batch, shuffled
from onnxtrain.training.data_files import read_pictures
from onnxtrain.training.data_files.images import in_order

LABELS = "labels"
_SIZE = 224  # of pictures, where nothing tells it


class PictureBatches(TokenBatches):
    """Batches of pictures with a label each.

    Args:
        pictures: all of them.
        labels: one for each.
        names: the input of the model, and the target.
        batch_size: pictures of a batch.
        seed: of the order; ``None`` keeps it.
    """

    unit = "pictures"

    def __init__(
        self,
        pictures: np.ndarray,
        labels: np.ndarray,
        names: Sequence[str],
        *,
        batch_size: int,
        seed: int | None = 0,
    ) -> None:
        super().__init__([], names, batch_size=batch_size, seed=seed)
        self.pictures, self.labels = pictures, labels

    def __call__(self, epoch: int) -> Epoch:
        """Return the batches of an epoch."""
        n = len(self.labels)
        return Epoch(self, np.arange(n) if self.seed is None else shuffled(n, self.seed, epoch))

    def batch(self, picked: Sequence[int]) -> Batch:
        """Return some pictures as a batch."""
        rows = np.asarray(picked)
        self.tokens += len(rows)
        image = next(n for n in self.names if n != LABELS)
        arrays = {image: self.pictures[rows], LABELS: self.labels[rows]}
        return Batch((), arrays, rows, len(rows))


class VisionTask(Task):
    """A model learns classes of pictures: from folders, a table of paths, or arrays."""

    loss = "cross_entropy"
    metrics = ("accuracy",)

    def __init__(self, folder: ModelFolder, options: FineTuneOptions, data: Any) -> None:
        super().__init__(folder, options)
        self._source = load(folder.path)
        self.image = self._input()
        self.classes: list[str] = []
        self.pictures, self.labels = self._read(data)
        self.train, self.held = self._split(options)

    def _input(self) -> TensorSpec:
        """Return the input for pictures; open sizes are those of the configuration."""
        inputs = [x for x in self._source.graph.inputs if len(S.dims_of(x) or ()) == 4]
        if len(self._source.graph.inputs) != 1 or not inputs:
            listing = ", ".join(S.describe_value(x) for x in self._source.graph.inputs)
            raise PrepareError(f"a vision model takes pictures only, this one {listing}")
        (x,) = inputs
        sides = _side(self._settings())
        known = (None, 3, *sides)
        dims = [
            d if isinstance(d, int) else k for d, k in zip(S.dims_of(x) or (), known, strict=True)
        ]
        shape = ("batch", *(d if d is not None else _SIZE for d in dims[1:]))
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
                f"pictures are a folder, a table of paths, or arrays, not {type(data).__name__}"
            )
        target = TensorSpec(LABELS, "int64", ("batch",), "target")
        classes = {LABELS: self.classes} if self.classes else {}
        read = read_pictures(Path(data), (self.image, target), classes)
        self.classes = list(read.classes[LABELS])
        return self._normal(read.arrays[self.image.name]), read.arrays[LABELS]

    def _arrays(self, data: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return arrays as they are given: pictures as the model takes them."""
        wanted = {self.image.name, LABELS}
        if set(data) != wanted:
            raise PrepareError(f"arrays must be called {', '.join(sorted(wanted))}")
        pictures, texts = np.asarray(data[self.image.name], np.float32), np.asarray(data[LABELS])
        if len(pictures) != len(texts) or texts.ndim != 1:
            raise ShapeError(f"{len(pictures)} pictures, labels of shape {list(texts.shape)}")
        names = [str(t) for t in texts.tolist()]
        self.classes = self.classes or in_order(names)
        strange = [n for n in names if n not in self.classes]
        if strange:
            raise PrepareError(f"the validation has a class that training has not: {strange[0]!r}")
        return pictures, np.array([self.classes.index(n) for n in names], np.int64)

    def _normal(self, pictures: np.ndarray) -> np.ndarray:
        """Return pictures from 0 to 1 as the model's own preparation has them."""
        settings = self._settings()
        mean, deviation = settings.get("image_mean"), settings.get("image_std")
        if not settings.get("do_normalize", mean is not None) or mean is None or deviation is None:
            self._note(
                "pictures are numbers from 0 to 1: no preprocessor_config.json says otherwise"
            )
            return pictures
        axis = 1 if self.image.shape[1] in (1, 3) else 3
        shape = [-1 if i == axis else 1 for i in range(4)]
        mean, deviation = (np.asarray(v, np.float32).reshape(shape) for v in (mean, deviation))
        return (pictures - mean) / deviation

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _split(self, options: FineTuneOptions) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of pictures to learn from, and of those held back."""
        if len(self.classes) < 2:
            raise PrepareError(f"there is one class only: {', '.join(self.classes)}")
        n, asked = len(self.labels), options.validation
        if asked is not None and not is_part(asked):
            pictures, labels = self._read(asked)
            self.pictures = np.concatenate([self.pictures, pictures])
            self.labels = np.concatenate([self.labels, labels])
            return np.arange(n), np.arange(n, len(self.labels))
        none = np.empty(0, np.int64)
        numbers = Examples(tuple(Example(none, none, i) for i in range(n)))
        train, held = (
            np.array([e.line for e in part], np.int64) for part in split(numbers, options)
        )
        return train, held

    def model(self) -> ir.Model:
        """Return the model with a score per class."""
        scores = [y for y in self._source.graph.outputs if len(S.dims_of(y) or ()) == 2]
        if not scores:
            listing = ", ".join(S.describe_value(y) for y in self._source.graph.outputs)
            raise PrepareError(
                f"no output has a score per class: {listing}\n"
                "hint: onnxtrain.build takes models of other tasks, with arrays"
            )
        named = next((y for y in scores if y.name == "logits"), scores[0])
        model, note = with_head(
            load(self.folder.path), named.name or "", len(self.classes), seed=self.options.seed
        )
        if note:
            self._note(note)
        self.trained = head_weights(model)
        return model

    def batches(self, names: Sequence[str], *, validation: bool = False) -> TokenBatches | None:
        """Return the batches."""
        picked = self.held if validation else self.train
        if not len(picked):
            return None
        return PictureBatches(
            self.pictures[picked],
            self.labels[picked],
            names,
            batch_size=self.options.batch_size,
            seed=None if validation else self.options.seed,
        )

    def memory_sizes(self) -> tuple[dict[str, Any], str]:
        """Return the sizes of the largest batch, for a plan and in words."""
        rows = min(self.options.batch_size, len(self.train))
        return {
            "batch": rows
        }, f"{rows} pictures of {' x '.join(map(str, self.pictures.shape[1:]))}"

    def preview(self) -> str:
        """Return three pictures in words."""
        lines = []
        for i in self.train[:3]:
            picture = self.pictures[i]
            sizes = " x ".join(map(str, picture.shape))
            values = f"{picture.min():.3g} to {picture.max():.3g}"
            lines.append(f"{self.classes[self.labels[i]]}: {sizes}, numbers from {values}")
        return "\n".join(lines)

    def summary(self) -> str:
        """Return how many pictures and classes there are."""
        held = f"; {len(self.held)} for validation" if len(self.held) else "; no validation"
        names = ", ".join(self.classes[:8])
        return f"{len(self.train)} pictures{held}, {len(self.classes)} classes: {names}"


def _side(settings: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return height and width of pictures, if a configuration tells them."""
    size = settings.get("crop_size") or settings.get("size")
    if isinstance(size, int):
        return size, size
    if isinstance(size, Mapping):
        edge = size.get("shortest_edge")
        return size.get("height", edge), size.get("width", edge)
    return None, None


__all__ = ["PictureBatches", "VisionTask"]
