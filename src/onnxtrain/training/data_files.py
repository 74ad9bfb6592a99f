"""Training data from files: .npz, .csv, .tsv, .jsonl, and folders of images.

:func:`read_data` and :func:`read_images` choose a reader by the ending of the path. The rest of the
file is one section per reader: tables of text, columns to arrays, images, .npz files.
"""

from __future__ import annotations

import csv
import difflib
import importlib.util
import io
import json
import math
import os
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from onnxtrain.errors import LoadError, OnnxTrainError
from onnxtrain.graph.io.limits import (
    ARCHIVE_BYTES,
    ARCHIVE_RATIO,
    STACKED_BYTES,
    TABLE_BYTES,
    open_regular,
    quote,
    read_regular,
    resolve_within,
)
from onnxtrain.manifest import TensorSpec
from onnxtrain.training.columns import (
    Classes,
    Columns,
    Origin,
    arrays_of,
    is_number,
    label_indices,
    quote_names,
)

_JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
DELIMITERS = {".csv": ",", ".tsv": "\t"}


class DataFile(NamedTuple):
    """The content of a file or folder."""

    arrays: dict[str, np.ndarray]
    """Arrays by the names of inputs and targets."""
    classes: Classes
    """Class names by target, in the order of their indices, if the file has text labels."""
    origin: Origin = Origin()
    """Where rows come from, for messages."""


def read_data(
    path: str | os.PathLike[str],
    specs: Sequence[TensorSpec],
    classes: Mapping[str, Sequence[str]] | None = None,
) -> DataFile:
    """Return the arrays of a file or folder.

    Args:
        path: an ``.npz`` file; a ``.csv`` or ``.tsv`` file with column names in the first line; a
            ``.jsonl`` file with an object per line; or a folder with a folder of images per class.
        specs: the inputs and targets of a batch: ``Trainer.batch_specs``.
        classes: class names by target, from an earlier file; by default the sorted labels of this
            file.

    Raises:
        OnnxTrainError: if the file cannot be read or does not fit the model, with the line.
    """
    path, known = Path(path), {name: list(texts) for name, texts in (classes or {}).items()}
    if path.is_dir():
        return DataFile(*read_image_folder(path, specs, known))
    columns, origin = read_columns(path)
    return DataFile(*arrays_of(columns, specs, known, origin), origin)


def read_columns(path: Path) -> tuple[Columns, Origin]:
    """Return the columns of a table or an .npz file, as they are, and where its rows are."""
    if not path.exists():
        raise OnnxTrainError(f"{path}: no such file or folder\nhint: {_nearby(path)}")
    if path.suffix.lower() not in (*DELIMITERS, *_JSON_LINES_SUFFIXES):
        return read_npz(path), Origin(str(path))
    columns, lines = _columns(path)
    return columns, Origin(str(path), lines)


def _nearby(path: Path) -> str:
    """Return the data files beside a path that does not exist, similar names first."""
    folder = path.parent
    known = (".npz", *DELIMITERS, *_JSON_LINES_SUFFIXES)
    try:
        names = sorted(p.name for p in folder.iterdir() if p.suffix.lower() in known)
    except OSError:
        return f"{folder} is not a folder"
    if not names:
        return f"data is a file ({', '.join(known)}) or a folder of images per class"
    near = difflib.get_close_matches(path.name, names, n=len(names))
    return f"{folder.resolve()} has {quote_names(list(dict.fromkeys([*near, *names])))}"


def read_images(
    path: str | os.PathLike[str],
    specs: Sequence[TensorSpec],
    classes: Mapping[str, Sequence[str]] | None = None,
    skipped: list[str] | None = None,
) -> DataFile:
    """Return images and their labels, from a folder per class or a table of paths.

    Args:
        path: a folder with a folder of images per class; or a ``.csv``, ``.tsv`` or ``.jsonl`` file
            with columns ``image`` (paths relative to the file) and ``label``.
        specs: the input for images and the target for labels.
        classes: as for :func:`read_data`.
        skipped: receives the reason for each file that is not an image; without a list, the first
            one is an error.

    Raises:
        OnnxTrainError: if a file cannot be read or does not fit the model, with the line, or more
            images are skipped than read.
    """
    path, known = Path(path), {name: list(texts) for name, texts in (classes or {}).items()}
    if path.is_dir():
        return DataFile(*read_image_folder(path, specs, known, skipped))
    if path.suffix.lower() not in (*DELIMITERS, *_JSON_LINES_SUFFIXES):
        raise OnnxTrainError(
            f"{path}: neither a folder of images nor a table of image paths\n"
            "hint: use a folder per class, or a .csv file with columns image and label"
        )
    return DataFile(*read_image_table(path, *_columns(path), specs, known, skipped))


def _columns(path: Path) -> tuple[dict[str, list[Any]], list[int]]:
    """Return the columns of a table, and the line of each row."""
    if path.suffix.lower() in DELIMITERS:
        return _read_table(path)
    return _read_lines(read_text(path), path)


def read_text(path: Path) -> str:
    """Return the content of a text file.

    Raises:
        LoadError: if it cannot be read, is over the limit or not UTF-8, with the line.
    """
    data = b""
    try:
        data = read_regular(path, TABLE_BYTES)
        return data.decode("utf-8-sig")
    except OSError as error:
        reason = error.strerror or str(error)
        raise LoadError(f"{path}: cannot be read: {reason}") from error
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise LoadError(
            f"{path}: not UTF-8, first invalid byte in line {line}\nhint: save it as UTF-8"
        ) from error


def read_csv(path: Path) -> list[tuple[int, list[str]]]:
    """Return the rows of a CSV or TSV file that are not empty, each with its first line.

    Raises:
        LoadError: if the file cannot be read, or has a quote that is not closed.
    """
    text, delimiter = read_text(path), DELIMITERS[path.suffix.lower()]
    # Not splitlines(): quoted cells may contain newlines.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows, first = list[tuple[int, list[str]]](), 1
    try:
        for row in reader:
            if row:
                rows.append((first, row))
            first = reader.line_num + 1
    except csv.Error as error:
        raise LoadError(
            f"{path}: line {first}: {error}\n"
            'hint: a quoted cell ends with a quote; write a quote inside of it as ""'
        ) from error
    return rows


def _read_table(path: Path) -> tuple[dict[str, list[Any]], list[int]]:
    """Return the columns of a CSV file, and the first line of each row."""
    numbered = read_csv(path)
    rows = [[cell.strip() for cell in row] for _, row in numbered]
    lines = [line for line, _ in numbered]
    if len(rows) < 2:
        raise OnnxTrainError(
            f"{path}: no rows\nhint: the first line has column names, each further line a sample"
        )
    names, *rows = rows
    if all(is_number(name) for name in names):
        raise OnnxTrainError(
            f"{path}: the first line has numbers\nhint: it must have the column names"
        )
    duplicates = sorted(name for name, count in Counter(names).items() if count > 1)
    if duplicates:
        raise OnnxTrainError(f"{path}: duplicate column {duplicates[0]!r}")
    for row, line in zip(rows, lines[1:], strict=True):
        if len(row) != len(names):
            raise OnnxTrainError(f"{path}: line {line} has {len(row)} cells, expected {len(names)}")
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)), lines[1:]


def _read_lines(text: str, path: Path) -> tuple[dict[str, list[Any]], list[int]]:
    """Return the values of a JSONL file by key, and the line of each row."""
    columns: dict[str, list[Any]] = {}
    lines: list[int] = []
    # Not splitlines(), which also splits at U+2028 and U+0085: JSON texts may contain them.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise OnnxTrainError(f"{path}: line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise OnnxTrainError(
                f'{path}: line {number} is not an object\nhint: write {{"x": [1, 2]}}'
            )
        if not lines:
            columns = {name: [] for name in row}
        if row.keys() != columns.keys():
            names = sorted(row.keys() ^ columns.keys())
            raise OnnxTrainError(f"{path}: line {number}: {names[0]!r} is not in every line")
        for name, value in row.items():
            columns[name].append(value)
        lines.append(number)
    if not lines:
        raise OnnxTrainError(f"{path}: no rows\nhint: write one JSON object per line")
    return columns, lines


IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP")
_MAX_DIGITS = 18  # of labels that are sorted by number
_PATHS, _LABELS = ("image", "path", "file"), ("label", "class")
_HINT = "hint: use a folder per class, such as images/cat/1.jpg, images/dog/1.jpg"


class ImageLayout(NamedTuple):
    """How an input represents an image."""

    mode: str
    """Pillow's mode: L is grayscale, RGB is color."""
    size: tuple[int, int] | None
    """Width and height if the input fixes them."""
    order: str
    """Order of the axes: CHW, HWC, HW, or flat."""


def read_image_folder(
    folder: Path, specs: Sequence[TensorSpec], known: Classes, skipped: list[str] | None = None
) -> tuple[dict[str, np.ndarray], Classes]:
    """Return images and labels; class indices follow the sorted names of the folders.

    Images are resized to the input's size (bilinear), converted to grayscale or color by its
    channels, and scaled to [0, 1] (integers to 255 for an integer input).
    """
    inputs = [s for s in specs if s.role == "input"]
    targets = [s for s in specs if s.role == "target"]
    if len(inputs) != 1 or len(targets) != 1 or "int" not in targets[0].dtype:
        raise OnnxTrainError(
            f"{folder}: images need a model with one input and class labels; this one takes "
            + ", ".join(f"{s.name} {s.dtype}" for s in specs)
        )
    (image,), (label,) = inputs, targets
    folders = {p.name: p for p in _list_folder(folder, folder) if p.is_dir()}
    classes = known.get(label.name) or list(folders)
    indices = {name: i for i, name in enumerate(classes)}
    unknown = [name for name in folders if name not in indices]
    if unknown:
        raise OnnxTrainError(
            f"{folder}: unknown class {unknown[0]!r}\nhint: expected one of {quote_names(classes)}"
        )
    files = [(p, indices[n]) for n, sub in folders.items() for p in _image_files(sub, folder)]
    if not files:
        raise OnnxTrainError(f"{folder}: no images ({', '.join(IMAGE_SUFFIXES)})\n{_HINT}")
    images, read = _read_images([p for p, _ in files], image, folder, skipped)
    labels = np.array([index for _, index in files], np.int64)[read]
    return {image.name: images, label.name: labels}, {**known, label.name: list(classes)}


def read_image_table(
    path: Path,
    columns: Columns,
    lines: Sequence[int],
    specs: Sequence[TensorSpec],
    known: Classes,
    skipped: list[str] | None = None,
) -> tuple[dict[str, np.ndarray], Classes]:
    """Return images and labels of a table of paths, which are relative to the table's folder.

    Args:
        path: of the table.
        columns: its columns; ``image``, ``path`` or ``file``, and ``label`` or ``class`` are read.
        lines: line of each row.
        specs: the input for images and the target for labels.
        known: class names from an earlier table; by default the sorted labels of this one.
        skipped: as for :func:`read_images`.
    """
    image, label = specs
    name = next((n for n in (*_PATHS, image.name) if n in columns), None)
    texts = next((columns[n] for n in (*_LABELS, label.name) if n in columns), None)
    if name is None or texts is None:
        raise OnnxTrainError(
            f"{path}: no columns image and label\nhint: its columns are {', '.join(columns)}"
        )
    texts = [str(t) for t in texts]
    classes = known.get(label.name) or sorted_labels(texts)
    labels = label_indices(texts, classes, Origin(str(path), lines))
    files = []
    for value, line in zip(columns[name], lines, strict=True):
        file = path.parent / str(value)
        try:
            open_regular(file, within=path.parent).close()
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            reason = "does not exist" if missing else f"cannot be read: {error.strerror}"
            raise OnnxTrainError(
                f"{path}: line {line}: image {quote(str(value))} {reason}\n"
                "hint: paths are relative to the folder of the table, and stay in it"
            ) from error
        files.append(file)
    images, read = _read_images(files, image, path.parent, skipped)
    labels = labels[read]
    return {image.name: images, label.name: labels}, {**known, label.name: list(classes)}


def sorted_labels(labels: Iterable[str]) -> list[str]:
    """Return the distinct labels: numbers by value, then texts.

    >>> sorted_labels(["10", "9", "b", "9"])
    ['9', '10', 'b']
    """

    def order(label: str) -> tuple[bool, int, str]:
        # isdigit() also holds for texts such as "²", which are not integers.
        number = label.isdecimal() and len(label) <= _MAX_DIGITS
        return not number, int(label) if number else 0, label

    return sorted(set(labels), key=order)


def _image_files(folder: Path, root: Path) -> list[Path]:
    return [
        p for p in _list_folder(folder, root) if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file()
    ]


def _list_folder(folder: Path, root: Path) -> list[Path]:
    """Return the content of a folder, which a link must not lead out of ``root``."""
    try:
        if folder != root:
            resolve_within(folder, root)
        return sorted(folder.iterdir())
    except OSError as error:
        raise OnnxTrainError(f"{folder}: cannot be read: {error.strerror}") from error


def image_layout(spec: TensorSpec) -> ImageLayout:
    """Return the layout of an image input: [N, C, H, W], [N, H, W, C], [N, H, W] or [N, H * W].

    Raises:
        OnnxTrainError: if the input has another shape.
    """
    sizes = spec.shape[1:]
    shape = tuple(d if isinstance(d, int) else -1 for d in sizes)
    if len(sizes) == 3 and shape[0] in (1, 3):
        return ImageLayout("L" if shape[0] == 1 else "RGB", _size(*shape[1:]), "CHW")
    if len(sizes) == 3 and shape[2] in (1, 3):
        return ImageLayout("L" if shape[2] == 1 else "RGB", _size(*shape[:2]), "HWC")
    if len(sizes) == 2:
        return ImageLayout("L", _size(*shape), "HW")
    side = math.isqrt(shape[0]) if len(shape) == 1 and shape[0] > 0 else 0
    if side and side * side == shape[0]:
        return ImageLayout("L", (side, side), "flat")
    listing = ", ".join(map(str, spec.shape))
    raise OnnxTrainError(
        f"{spec.name!r} is {spec.dtype}[{listing}], which is not an image shape\n"
        "hint: use [N, C, H, W] or [N, H, W, C] with 1 or 3 channels, [N, H, W], or [N, H * H]"
    )


def _size(height: int, width: int) -> tuple[int, int] | None:
    return (width, height) if height > 0 and width > 0 else None


def _read_images(
    paths: list[Path], spec: TensorSpec, folder: Path, skipped: list[str] | None
) -> tuple[np.ndarray, list[int]]:
    """Return the images that can be read, and their indices among the paths."""
    if importlib.util.find_spec("PIL") is None:
        raise OnnxTrainError('images require Pillow\nhint: pip install "onnxtrain[images]"')
    layout, images, read = image_layout(spec), list[np.ndarray](), list[int]()
    for i, path in enumerate(paths):
        try:
            image = _read_image(path, layout, folder)
        except OnnxTrainError as error:
            if skipped is None:
                raise
            skipped.append(str(error))
            continue
        if images and image.shape != images[0].shape:
            raise OnnxTrainError(
                f"{path} has shape {image.shape}, {paths[read[0]]} has {images[0].shape}\n"
                "hint: the model fixes no image size, so all images must have the same"
            )
        if image.size * 4 * len(paths) > STACKED_BYTES:
            raise OnnxTrainError(
                f"{folder}: {len(paths)} images do not fit into 4 GiB\n"
                "hint: train from Python, where fit takes a Stream or a DataLoader"
            )
        images.append(image)
        read.append(i)
    if skipped and len(skipped) > len(images):
        listing = "\n  ".join(skipped[:5])
        raise OnnxTrainError(
            f"{folder}: {len(skipped)} images cannot be read, {len(images)} can:\n  {listing}"
        )
    stacked = np.stack(images)
    if "int" not in spec.dtype:
        stacked = stacked.astype(np.float32) / np.float32(255)
    return stacked, read


def _read_image(path: Path, layout: ImageLayout, folder: Path) -> np.ndarray:
    """Return an image of a folder, which a link must not lead out of."""
    from PIL import Image

    try:
        with (
            open_regular(path, within=folder) as data,
            Image.open(data, formats=_FORMATS) as file,
        ):
            image: Any = file.convert(layout.mode)
            if layout.size is not None and image.size != layout.size:
                image = image.resize(layout.size, Image.Resampling.BILINEAR)
            array = np.asarray(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise OnnxTrainError(f"{path}: not a readable image: {error}") from error
    if layout.order == "flat":
        return array.reshape(-1)
    if layout.order == "HW":
        return array
    array = array if array.ndim == 3 else array[..., None]
    return array.transpose(2, 0, 1) if layout.order == "CHW" else array


HINT = "hint: numpy.savez('train.npz', x=..., labels=...)"
_NPY, _ZIP = b"\x93NUMPY", b"PK"


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file by name.

    Raises:
        OnnxTrainError: if it cannot be read or is not an .npz file.
    """
    try:
        with open_regular(path) as raw:
            return _arrays(raw, path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OnnxTrainError(f"{path}: cannot be read: {reason}\n{HINT}") from error


def _arrays(raw: BinaryIO, path: Path) -> dict[str, np.ndarray]:
    start = raw.read(len(_NPY))
    raw.seek(0)
    if start == _NPY:
        raise OnnxTrainError(f"{path}: an .npy file, whose array has no name\n{HINT}")
    if not start.startswith(_ZIP):
        raise OnnxTrainError(
            f"{path}: not an .npz file\n"
            f"{HINT}, or use a .csv file, a .jsonl file or a folder of images"
        )
    try:
        with np.load(raw, allow_pickle=False) as file:
            _check_unpacked_size(file.zip, os.fstat(raw.fileno()).st_size, path)
            arrays = {name: file[name] for name in file.files}
    except OnnxTrainError:
        raise
    except Exception as error:  # damaged zip files raise anything
        reason = str(error) or type(error).__name__
        raise OnnxTrainError(f"{path}: not an .npz file of arrays: {reason}\n{HINT}") from error
    others = [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]
    if others:
        raise OnnxTrainError(f"{path}: {others[0]!r} is not an array\n{HINT}")
    return arrays


def _check_unpacked_size(archive: zipfile.ZipFile, size: int, path: Path) -> None:
    unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > max(ARCHIVE_BYTES, ARCHIVE_RATIO * size):
        raise OnnxTrainError(
            f"{path}: {unpacked:,} bytes once unpacked, {unpacked // size} times its size\n"
            "hint: if you trust the file: save it with numpy.savez, without compression"
        )
