"""Named columns to the arrays of a batch: one set of rules for files, tables, dicts and rows.

Columns map names to lists of cells or to arrays. :func:`arrays_of` finds the columns of each input
and target by name and converts them:

- a column with the name of an input or target belongs to it; ``label`` is ``labels``;
- ``image.0``, ``image.1`` ... are the parts of ``image``, in the order of their numbers;
- one input without a column takes all remaining columns; other columns are not read;
- texts are class names of integer targets: their indices follow the sorted names.

Shapes and types of arrays are checked where they become a batch: :mod:`onnxtrain.runtime.feeds`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from onnxtrain.errors import ShapeError
from onnxtrain.graph.io.limits import quote
from onnxtrain.manifest import TensorSpec
from onnxtrain.runtime.feeds import to_array

Classes = dict[str, list[str]]
"""Class names by target, in the order of their indices."""
Columns = Mapping[str, Any]
"""A list of cells, or anything array-like, by name."""


_CLASSES = "classes:"


def class_names(properties: Mapping[str, Any]) -> Classes:
    """Return the class names in the properties of a checkpoint."""
    return {
        name.removeprefix(_CLASSES): json.loads(str(names))
        for name, names in properties.items()
        if name.startswith(_CLASSES)
    }


def class_properties(classes: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return class names as properties of a checkpoint."""
    return {_CLASSES + name: json.dumps(list(names)) for name, names in classes.items()}


class Origin(NamedTuple):
    """Where columns come from, for messages."""

    source: str = ""
    """Path of the file; empty for data in memory."""
    lines: Sequence[int] = ()
    """Line of each row in a text file."""

    @property
    def prefix(self) -> str:
        """The beginning of a message."""
        return f"{self.source}: " if self.source else ""

    def row(self, row: int) -> str:
        """Return the place of a row."""
        return self.rows([row])

    def rows(self, rows: Sequence[int]) -> str:
        """Return the places of rows.

        >>> Origin().rows([4, 9]), Origin("a.csv", [2, 3, 5]).row(2)
        ('rows 4, 9', 'a.csv: line 5')
        """
        noun, numbers = ("line", [self.lines[r] for r in rows]) if self.lines else ("row", rows)
        plural, more = "s" if len(rows) > 1 else "", f" and {len(rows) - 5} more"
        listing = ", ".join(map(str, numbers[:5])) + (more if len(rows) > 5 else "")
        return f"{self.prefix}{noun}{plural} {listing}"


def arrays_of(
    columns: Columns,
    specs: Sequence[TensorSpec],
    known: Mapping[str, Sequence[str]],
    origin: Origin = Origin(),  # noqa: B008
    *,
    whole: bool = True,
    others: Sequence[TensorSpec] = (),
) -> tuple[dict[str, np.ndarray], Classes]:
    """Return an array per input and target, and the class names of text labels.

    Args:
        columns: lists of cells or arrays, by name.
        specs: the inputs and targets to return.
        known: class names by target.
        origin: where the columns come from.
        whole: whether the columns are the whole data set, so that unknown class names follow from
            its labels; otherwise they are an error.
        others: targets whose columns are not features, although they are not returned.
    """
    matched = _match(list(columns), specs, others, origin)
    arrays: dict[str, np.ndarray] = {}
    classes = {name: list(names) for name, names in known.items()}
    for spec in specs:
        names = matched[spec.name]
        texts = _class_names(columns[names[0]], names[0], spec, origin) if len(names) == 1 else None
        if texts is None:
            parts = [_numbers(columns[n], n, spec, origin) for n in names]
            arrays[spec.name] = _stack(parts, spec, names, origin)
            continue
        if spec.name not in classes:
            if not whole:
                raise ShapeError(
                    f"{spec.name!r} has texts, and the class names are unknown\n"
                    f"hint: trainer.classes = {{{spec.name!r}: [{texts[0]!r}, ...]}}, all of them"
                )
            classes[spec.name] = sorted(set(texts))
        arrays[spec.name] = label_indices(texts, classes[spec.name], origin)
    return arrays, classes


def _match(
    names: Sequence[str], specs: Sequence[TensorSpec], others: Sequence[TensorSpec], origin: Origin
) -> dict[str, list[str]]:
    """Return the names of the columns of each input and target."""
    every = [*specs, *others]
    matched = {s.name: _columns_of_input(s.name, names) for s in every}
    used = {name for found in matched.values() for name in found}
    for spec in every:
        singular = spec.name.removesuffix("s")
        near = singular if singular != spec.name else f"{spec.name}s"
        if spec.role == "target" and not matched[spec.name] and near in {*names} - used:
            matched[spec.name] = [near]
            used.add(near)
    missing = [s for s in specs if not matched[s.name]]
    rest = [name for name in names if name not in used]
    if len(missing) == 1 and missing[0].role == "input" and rest:
        matched[missing[0].name] = rest
    elif missing:
        raise ShapeError(
            f"{origin.prefix}no column {missing[0].name!r}\n"
            f"hint: the columns are {quote_names(names)}; the model needs "
            + ", ".join(s.name for s in specs)
        )
    return matched


def _columns_of_input(name: str, columns: Sequence[str]) -> list[str]:
    if name in columns:
        return [name]
    pattern = re.compile(re.escape(name) + r"(?:[._-]?([0-9]{1,9})|\[([0-9]{1,9})\])")
    numbered = [(m, n) for n in columns if (m := pattern.fullmatch(n))]
    return [n for _, n in sorted(numbered, key=lambda item: int(item[0][1] or item[0][2]))]


def _class_names(values: Any, name: str, spec: TensorSpec, origin: Origin) -> list[str] | None:
    """Return the labels of an integer target if they are texts."""
    if spec.role != "target" or "int" not in spec.dtype:
        return None
    if not isinstance(values, list):
        array = to_array(values, name)
        if array.dtype.kind not in "OUT" or array.ndim != 1:
            return None
        values = array.tolist()
    texts = [v for v in values if not _is_missing(v)]
    # A number among texts is more likely a mistake than a class.
    if not texts or not all(isinstance(v, str) and not is_number(v) for v in texts):
        return None
    if len(texts) < len(values):
        row = next(i for i, v in enumerate(values) if _is_missing(v))
        raise ShapeError(
            f"{origin.row(row)}, column {name!r}: empty cell\nhint: every row needs a class name"
        )
    return texts


def _is_missing(value: Any) -> bool:
    """Return whether a cell is empty: None, an empty text, NaN, or pandas' NA."""
    return value is None or (isinstance(value, str) and not value) or str(value) in ("nan", "<NA>")


def is_number(text: str) -> bool:
    """Return whether a text can be parsed as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def label_indices(texts: Sequence[str], classes: Sequence[str], origin: Origin) -> np.ndarray:
    """Return the index of each label among the class names."""
    indices = {text: i for i, text in enumerate(classes)}
    for row, text in enumerate(texts):
        if text not in indices:
            raise ShapeError(
                f"{origin.row(row)}: unknown class {text!r}\n"
                f"hint: expected one of {quote_names(classes)}"
            )
    return np.array([indices[text] for text in texts], np.int64)


def _numbers(values: Any, name: str, spec: TensorSpec, origin: Origin) -> np.ndarray:
    """Return a column of numbers; an array keeps its type, which the checks of a batch convert."""
    if not isinstance(values, list) or not origin.lines:
        array = to_array(values, name)
        if array.dtype.kind not in "OUT":
            return array
        values = [
            v if isinstance(v, str) or np.ndim(v) == 0 else to_array(v, name)
            for v in array.tolist()
        ]
        if values and all(isinstance(v, np.ndarray) for v in values):
            if len({v.shape for v in values}) > 1:
                raise ShapeError(
                    f"column {name!r} has rows of different shapes\nhint: pad them to one length"
                )
            return np.stack(values)
    return _numeric_array(values, name, spec, origin)


def _numeric_array(values: list[Any], name: str, spec: TensorSpec, origin: Origin) -> np.ndarray:
    try:
        return _to_numbers(values, spec)
    except (ValueError, TypeError, OverflowError):
        pass  # find the row
    for row, value in enumerate(values):
        place = f"{origin.row(row)}, column {name!r}"
        try:
            _to_numbers(value, spec)
        except _RangeError as error:
            raise ShapeError(f"{place} {error}, but {spec.name!r} is {spec.dtype}") from error
        except (ValueError, TypeError, OverflowError) as error:
            problem = "empty cell" if _is_missing(value) else f"{quote(value)} is not a number"
            raise ShapeError(
                f"{place}: {problem}\n"
                f"hint: {spec.name!r} is {spec.dtype}; only class labels can be texts"
            ) from error
    raise ShapeError(
        f"{origin.prefix}column {name!r} has rows of different shapes\nhint: pad them to one length"
    )


class _RangeError(ValueError):
    """A number does not fit the integers of a tensor."""


_EXACT = 2.0**53  # float64 represents every integer below


def _to_numbers(value: Any, spec: TensorSpec) -> np.ndarray:
    """Return cells, which may be texts, as float64, or as int64 for a tensor of integers."""
    # A type is given: numpy would give every text of a column the length of the longest.
    array = np.array(value, np.float64)
    if np.isnan(array).any() and any(v is None for v in np.array(value, object).flat):
        raise TypeError("null")
    if "int" not in spec.dtype:
        return array
    if not np.isfinite(array).all():
        raise _RangeError("has infinity or NaN")
    if (array != np.round(array)).any():
        raise _RangeError("has fractions")
    limits = np.iinfo(spec.dtype)
    fits = (np.abs(array) < 2.0**63).all()
    integers = array.astype(np.int64) if fits else np.empty(0, np.int64)
    if not (np.abs(array) < _EXACT).all():
        try:
            integers = np.array(value, object).astype(np.int64)
            fits = True
        except OverflowError:
            fits = False
        except ValueError:  # a text such as 1e17, which is exact in float64
            pass
    if not fits or (integers < limits.min).any() or (integers > limits.max).any():
        raise _RangeError(f"has integers outside [{limits.min}, {limits.max}]")
    return integers


def _stack(
    parts: list[np.ndarray], spec: TensorSpec, names: Sequence[str], origin: Origin
) -> np.ndarray:
    """Return columns side by side, in the shape of the input."""
    if len(parts) == 1 and parts[0].ndim > 1:
        return parts[0]
    rows, sizes = len(parts[0]) if parts[0].ndim else 0, spec.shape[1:]
    fixed = [d for d in sizes if isinstance(d, int)]
    free = len(sizes) - len(fixed)
    fits = len(parts) == math.prod(fixed) if not free else len(parts) % math.prod(fixed) == 0
    if any(p.ndim != 1 for p in parts) or free > 1 or not fits:
        if len(parts) == 1 and not origin.lines:
            return parts[0]  # the checks of a batch say more about the shape of an array
        shape = ", ".join(map(str, spec.shape))
        raise ShapeError(
            f"{origin.prefix}{len(parts)} columns do not fit {spec.name!r}, which is "
            f"{spec.dtype}[{shape}]\nhint: the columns are {quote_names(names)}"
        )
    return np.stack(parts, 1).reshape(rows, *(d if isinstance(d, int) else -1 for d in sizes))


def quote_names(names: Sequence[str]) -> str:
    """Return the first names in quotes."""
    return ", ".join(map(repr, names[:8])) + (" ..." if len(names) > 8 else "")
