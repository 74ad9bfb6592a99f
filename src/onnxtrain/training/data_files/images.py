"""A folder of pictures for each class, as arrays."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onnxtrain.errors import OnnxTrainError
from onnxtrain.manifest import TensorSpec
from onnxtrain.training.data_files.columns import Classes, Columns

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP")
_MOST_BYTES = 4 << 30
_PATHS, _LABELS = ("image", "path", "file"), ("label", "class")
_HINT = "hint: a folder per class, as in pictures/cat/1.jpg, pictures/dog/1.jpg"


class Layout(NamedTuple):
    """How an input holds a picture."""

    mode: str
    """Pillow's: L is grey, RGB has colours."""
    size: tuple[int, int] | None
    """Width and height, if the input has fixed ones."""
    order: str
    """Of the axes: CHW, HWC, HW, or flat."""


def read_folder(
    folder: Path, specs: Sequence[TensorSpec], known: Classes
) -> tuple[dict[str, np.ndarray], Classes]:
    """Return pictures and labels; numbers of classes follow from the sorted names of folders.

    Pictures become as large as the input is (bilinear), grey or coloured as its channels are, and
    floats from 0 to 1 (whole numbers to 255 for an integer input).
    """
    inputs = [s for s in specs if s.role == "input"]
    targets = [s for s in specs if s.role == "target"]
    if len(inputs) != 1 or len(targets) != 1 or "int" not in targets[0].dtype:
        raise OnnxTrainError(
            f"{folder}: pictures need a model of one input and labels of classes; it takes "
            + ", ".join(f"{s.name} {s.dtype}" for s in specs)
        )
    (image,), (label,) = inputs, targets
    there = {p.name: p for p in sorted(folder.iterdir()) if p.is_dir()}
    classes = known.get(label.name) or list(there)
    strange = [name for name in there if name not in classes]
    if strange:
        raise OnnxTrainError(
            f"{folder}: {strange[0]!r} is no class\nhint: they are {', '.join(classes)}"
        )
    files = [(p, classes.index(n)) for n, sub in there.items() for p in _pictures(sub)]
    if not files:
        raise OnnxTrainError(f"{folder}: no pictures ({', '.join(ENDINGS)})\n{_HINT}")
    pictures = _read_all([p for p, _ in files], layout_of(image), image, folder)
    labels = np.array([number for _, number in files], np.int64)
    return {image.name: pictures, label.name: labels}, {**known, label.name: list(classes)}


def read_listed(
    path: Path,
    columns: Columns,
    lines: Sequence[int],
    specs: Sequence[TensorSpec],
    known: Classes,
) -> tuple[dict[str, np.ndarray], Classes]:
    """Return pictures and labels of a table with paths, relative to where it lies.

    Args:
        path: of the table.
        columns: its columns; ``image``, or ``path`` or ``file``, and ``label`` are read.
        lines: where each row stands.
        specs: the input for pictures and the target for labels.
        known: texts of labels, as an earlier table had them; without, they are those of this one.
    """
    image, label = specs
    name = next((n for n in (*_PATHS, image.name) if n in columns), None)
    texts = next((columns[n] for n in (*_LABELS, label.name) if n in columns), None)
    if name is None or texts is None:
        raise OnnxTrainError(
            f"{path}: no columns image and label\nhint: it has {', '.join(columns)}"
        )
    texts = [str(t) for t in texts]
    classes = known.get(label.name) or in_order(texts)
    for text, line in zip(texts, lines, strict=True):
        if text not in classes:
            raise OnnxTrainError(
                f"{path}: line {line}: {text!r} is no class\nhint: they are {', '.join(classes)}"
            )
    files = [path.parent / str(value) for value in columns[name]]
    for file, line in zip(files, lines, strict=True):
        if not file.is_file():
            raise OnnxTrainError(f"{path}: line {line}: there is no picture {str(file)!r}")
    pictures = _read_all(files, layout_of(image), image, path)
    labels = np.array([classes.index(t) for t in texts], np.int64)
    return {image.name: pictures, label.name: labels}, {**known, label.name: list(classes)}


def in_order(labels: Iterable[str]) -> list[str]:
    """Return each label once: numbers by their size, then texts.

    >>> in_order(["10", "9", "b", "9"])
    ['9', '10', 'b']
    """
    return sorted(set(labels), key=lambda c: (not c.isdigit(), int(c) if c.isdigit() else 0, c))


def _pictures(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in ENDINGS and p.is_file())


def layout_of(spec: TensorSpec) -> Layout:
    """Return how an input holds a picture: [N, C, H, W], [N, H, W, C], [N, H, W] or [N, H * W].

    Raises:
        OnnxTrainError: if it is none of these.
    """
    sizes = spec.shape[1:]
    shape = tuple(d if isinstance(d, int) else -1 for d in sizes)
    if len(sizes) == 3 and shape[0] in (1, 3):
        return Layout("L" if shape[0] == 1 else "RGB", _size(*shape[1:]), "CHW")
    if len(sizes) == 3 and shape[2] in (1, 3):
        return Layout("L" if shape[2] == 1 else "RGB", _size(*shape[:2]), "HWC")
    if len(sizes) == 2:
        return Layout("L", _size(*shape), "HW")
    side = math.isqrt(shape[0]) if len(shape) == 1 and shape[0] > 0 else 0
    if side and side * side == shape[0]:
        return Layout("L", (side, side), "flat")
    listing = ", ".join(map(str, spec.shape))
    raise OnnxTrainError(
        f"{spec.name!r} is {spec.dtype}[{listing}], which holds no pictures\n"
        "hint: [N, C, H, W] or [N, H, W, C] with 1 or 3 channels, [N, H, W], or [N, H * H]"
    )


def _size(height: int, width: int) -> tuple[int, int] | None:
    return (width, height) if height > 0 and width > 0 else None


def _read_all(paths: list[Path], layout: Layout, spec: TensorSpec, folder: Path) -> np.ndarray:
    if importlib.util.find_spec("PIL") is None:
        raise OnnxTrainError('pictures need Pillow\nhint: pip install "onnxtrain[images]"')
    first = _read(paths[0], layout)
    if first.size * 4 * len(paths) > _MOST_BYTES:
        raise OnnxTrainError(
            f"{folder}: {len(paths)} pictures do not fit into 4 GiB\n"
            "hint: train from Python: fit takes an iterable of batches, such as a DataLoader"
        )
    pictures = [first, *(_read(path, layout) for path in paths[1:])]
    for path, picture in zip(paths, pictures, strict=True):
        if picture.shape != first.shape:
            raise OnnxTrainError(
                f"{path} is {picture.shape}, {paths[0]} is {first.shape}\n"
                "hint: the model has no fixed size, so all pictures must have one"
            )
    stacked = np.stack(pictures)
    if "int" not in spec.dtype:
        stacked = stacked.astype(np.float32) / np.float32(255)
    return stacked


def _read(path: Path, layout: Layout) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(path, formats=_FORMATS) as picture:
            plain: Any = picture.convert(layout.mode)
            if layout.size is not None and plain.size != layout.size:
                plain = plain.resize(layout.size, Image.Resampling.BILINEAR)
            array = np.asarray(plain)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise OnnxTrainError(f"{path}: not a picture that can be read: {error}") from error
    if layout.order == "flat":
        return array.reshape(-1)
    if layout.order == "HW":
        return array
    array = array if array.ndim == 3 else array[..., None]
    return array.transpose(2, 0, 1) if layout.order == "CHW" else array
