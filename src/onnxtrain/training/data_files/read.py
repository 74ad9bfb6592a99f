"""One door for all kinds of data: what a path holds is told by its ending."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onnxtrain.errors import OnnxTrainError
from onnxtrain.graph.io.regular_file import open_regular
from onnxtrain.manifest import TensorSpec
from onnxtrain.training.data_files.columns import Classes, arrays_of, is_number
from onnxtrain.training.data_files.images import read_folder, read_listed
from onnxtrain.training.data_files.npz import HINT, read_npz

_LINES = (".jsonl", ".ndjson")
_COLUMNS = {".csv": ",", ".tsv": "\t"}


class DataFile(NamedTuple):
    """What a file or folder holds."""

    arrays: dict[str, np.ndarray]
    """By the names of inputs and targets."""
    classes: Classes
    """By target: the texts that its numbers stand for, if the file has texts."""


def read_data(
    path: Path, specs: Sequence[TensorSpec], classes: Mapping[str, Sequence[str]] | None = None
) -> DataFile:
    """Return the arrays of a file or folder.

    Args:
        path: ``.npz``; ``.csv`` or ``.tsv`` with names in its first line; ``.jsonl`` with an object
            in each line; or a folder that has a folder of pictures for each class.
        specs: the inputs and targets of a batch, as ``Trainer.batch_specs`` has them.
        classes: texts of labels by target, as an earlier file had them. Without, they are those of
            this file, sorted.

    Raises:
        OnnxTrainError: the file cannot be read, or does not fit; it says where.
    """
    known = {name: list(texts) for name, texts in (classes or {}).items()}
    if path.is_dir():
        return DataFile(*read_folder(path, specs, known))
    if path.suffix.lower() not in (*_COLUMNS, *_LINES):
        return DataFile(read_npz(path), known)
    columns, lines = _columns(path)
    return DataFile(*arrays_of(columns, lines, specs, known, path))


def read_pictures(
    path: Path, specs: Sequence[TensorSpec], classes: Mapping[str, Sequence[str]] | None = None
) -> DataFile:
    """Return pictures and their labels: of a folder per class, or of a table of paths.

    Args:
        path: a folder that has a folder of pictures for each class; or a ``.csv``, ``.tsv`` or
            ``.jsonl`` file with columns ``image`` (paths relative to the file) and ``label``.
        specs: the input for pictures and the target for labels.
        classes: as for :func:`read_data`.

    Raises:
        OnnxTrainError: something cannot be read, or does not fit; it says where.
    """
    known = {name: list(texts) for name, texts in (classes or {}).items()}
    if path.is_dir():
        return DataFile(*read_folder(path, specs, known))
    if path.suffix.lower() not in (*_COLUMNS, *_LINES):
        raise OnnxTrainError(
            f"{path}: no folder of pictures, and no table of them\n"
            "hint: a folder per class, or a .csv file with columns image and label"
        )
    return DataFile(*read_listed(path, *_columns(path), specs, known))


def _columns(path: Path) -> tuple[dict[str, list[Any]], list[int]]:
    """Return the columns of a table, and the line of each row."""
    kind = path.suffix.lower()
    if kind in _COLUMNS:
        return _read_table(_text(path), path, _COLUMNS[kind])
    return _read_lines(_text(path), path)


def _text(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return file.read().decode("utf-8-sig")
    except OSError as error:
        reason = error.strerror or str(error)
        raise OnnxTrainError(f"{path}: cannot be read: {reason}\n{HINT}") from error
    except UnicodeDecodeError as error:
        raise OnnxTrainError(f"{path}: not UTF-8 text: {error.reason}") from error


def _read_table(text: str, path: Path, between: str) -> tuple[dict[str, list[Any]], list[int]]:
    """Return the columns of a CSV file, and the line that each row ends in."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=between, strict=True)
    rows, lines = [], []
    try:
        for row in reader:
            if row:
                rows.append([cell.strip() for cell in row])
                lines.append(reader.line_num)
    except csv.Error as error:
        raise OnnxTrainError(f"{path}: line {reader.line_num}: {error}") from error
    if len(rows) < 2:
        raise OnnxTrainError(f"{path}: no rows\nhint: names in the first line, then a sample each")
    names, *rows = rows
    if all(is_number(name) for name in names):
        raise OnnxTrainError(f"{path}: the first line has numbers\nhint: it names the columns")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise OnnxTrainError(f"{path}: several columns are called {twice[0]!r}")
    for row, line in zip(rows, lines[1:], strict=True):
        if len(row) != len(names):
            raise OnnxTrainError(f"{path}: line {line} has {len(row)} cells, not {len(names)}")
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)), lines[1:]


def _read_lines(text: str, path: Path) -> tuple[dict[str, list[Any]], list[int]]:
    """Return the values of a JSONL file by key, and the line of each row."""
    columns: dict[str, list[Any]] = {}
    lines: list[int] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise OnnxTrainError(f"{path}: line {number} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise OnnxTrainError(f'{path}: line {number} is no object\nhint: {{"x": [1, 2]}}')
        if not lines:
            columns = {name: [] for name in row}
        if row.keys() != columns.keys():
            odd = sorted(row.keys() ^ columns.keys())
            raise OnnxTrainError(f"{path}: line {number}: {odd[0]!r} is not in every line")
        for name, value in row.items():
            columns[name].append(value)
        lines.append(number)
    if not lines:
        raise OnnxTrainError(f"{path}: no rows\nhint: a JSON object in each line")
    return columns, lines


__all__ = ["DataFile", "read_data", "read_pictures"]
