"""Columns of a table as the arrays that a model takes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.errors import OnnxTrainError
from onnxtrain.manifest import TensorSpec

Classes = dict[str, list[str]]
Columns = Mapping[str, list[Any]]


def arrays_of(
    columns: Columns, lines: Sequence[int], specs: Sequence[TensorSpec], known: Classes, path: Path
) -> tuple[dict[str, np.ndarray], Classes]:
    """Return an array per input and target, and the texts that labels stand for.

    A column that bears the name of an input is that input. Columns ``image.0``, ``image.1`` ... are
    ``image``. One input that is still without takes all columns that are left, in their order.
    """
    taken: dict[str, list[str]] = {s.name: _own(s.name, columns) for s in specs}
    without = [s for s in specs if not taken[s.name]]
    used = {name for names in taken.values() for name in names}
    rest = [name for name in columns if name not in used]
    if len(without) == 1 and without[0].role == "input" and rest:
        taken[without[0].name] = rest
    elif without:
        raise OnnxTrainError(
            f"{path}: no column {without[0].name!r}\n"
            f"hint: it has {_listed(list(columns))}; the model takes "
            + ", ".join(s.name for s in specs)
        )
    arrays, classes = {}, dict(known)
    for spec in specs:
        names = taken[spec.name]
        if len(names) == 1 and _has_texts(columns[names[0]], spec):
            texts = columns[names[0]]
            classes[spec.name] = known.get(spec.name) or sorted(set(texts))
            arrays[spec.name] = _labels(texts, classes[spec.name], lines, path)
        else:
            parts = [_numbers(columns[n], n, spec, lines, path) for n in names]
            arrays[spec.name] = _shaped(parts, spec, names, path)
    return arrays, classes


def _own(name: str, columns: Columns) -> list[str]:
    if name in columns:
        return [name]
    pattern = re.compile(re.escape(name) + r"(?:[._-]?(\d+)|\[(\d+)\])")
    numbered = [(m, n) for n in columns if (m := pattern.fullmatch(n))]
    return [n for _, n in sorted(numbered, key=lambda item: int(item[0][1] or item[0][2]))]


def _has_texts(values: list[Any], spec: TensorSpec) -> bool:
    if spec.role != "target" or "int" not in spec.dtype:
        return False
    # One number among texts is a slip, not a class.
    return all(isinstance(v, str) and v and not is_number(v) for v in values)


def is_number(text: str) -> bool:
    """Return whether a text reads as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _labels(
    texts: list[str], classes: Sequence[str], lines: Sequence[int], path: Path
) -> np.ndarray:
    numbers = {text: i for i, text in enumerate(classes)}
    for text, line in zip(texts, lines, strict=True):
        if text not in numbers:
            raise OnnxTrainError(
                f"{path}: line {line}: {text!r} is no class\nhint: they are {_listed(classes)}"
            )
    return np.array([numbers[text] for text in texts], np.int64)


def _numbers(
    values: list[Any], name: str, spec: TensorSpec, lines: Sequence[int], path: Path
) -> np.ndarray:
    kind = np.int64 if "int" in spec.dtype else np.float64
    try:
        array = np.array(values)
        if kind is np.float64 or array.dtype.kind in "biuU":  # floats may have fractions
            return array.astype(kind)
    except (ValueError, TypeError, OverflowError):
        pass
    for value, line in zip(values, lines, strict=True):
        try:
            np.array(value, np.float64)
        except (ValueError, TypeError) as error:
            what = "an empty cell" if value in ("", None) else f"{value!r} is no number"
            raise OnnxTrainError(
                f"{path}: line {line}, column {name!r}: {what}\n"
                f"hint: {spec.name!r} is {spec.dtype}; texts are taken as labels of classes only"
            ) from error
    try:
        array = np.array([np.array(v, np.float64) for v in values])
    except ValueError as error:
        raise OnnxTrainError(
            f"{path}: column {name!r} has rows of different shape\nhint: pad them to one length"
        ) from error
    if kind is np.int64 and not np.array_equal(array, np.round(array)):
        raise OnnxTrainError(
            f"{path}: column {name!r} has fractions; {spec.name!r} is {spec.dtype}"
        )
    return array.astype(kind)


def _shaped(parts: list[np.ndarray], spec: TensorSpec, names: list[str], path: Path) -> np.ndarray:
    """Return columns side by side, in the shape that the input has."""
    if len(parts) == 1 and parts[0].ndim > 1:
        return parts[0]
    rows, sizes = len(parts[0]), spec.shape[1:]
    fixed = [d for d in sizes if isinstance(d, int)]
    free = len(sizes) - len(fixed)
    fits = len(parts) == math.prod(fixed) if not free else len(parts) % math.prod(fixed) == 0
    if any(p.ndim > 1 for p in parts) or free > 1 or not fits:
        shape = ", ".join(map(str, spec.shape))
        raise OnnxTrainError(
            f"{path}: {len(parts)} columns for {spec.name!r}, which is {spec.dtype}[{shape}]\n"
            f"hint: they are {_listed(names)}"
        )
    return np.stack(parts, 1).reshape(rows, *(d if isinstance(d, int) else -1 for d in sizes))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:8])) + (" ..." if len(names) > 8 else "")
