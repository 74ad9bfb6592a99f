"""Convert batches to the arrays that a model reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from onnxtrain.errors import ShapeError, argument, by_caller
from onnxtrain.manifest import TensorSpec


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the numpy dtype of a dtype in a manifest."""
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def to_array(value: Any, name: str | None = None) -> np.ndarray:
    """Return an array for anything array-like, including torch tensors.

    Raises:
        ShapeError: if rows have different lengths, or values are masked.
    """
    label = "the batch" if name is None else repr(name)
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ma.MaskedArray):
        if np.ma.is_masked(value):
            raise ShapeError(
                f"{label}: {np.ma.count_masked(value)} values are masked; models have no masks\n"
                "hint: fill them with x.filled(0), and pass the mask as an input if it matters"
            )
        value = value.data
    try:
        return np.asarray(value)
    except ValueError as error:
        if not isinstance(value, list | tuple):
            raise
        raise ShapeError(
            f"{label}: rows have different lengths: {str(error).splitlines()[0]}\n"
            "hint: pad them to one length"
        ) from error


def feed(
    specs: Sequence[TensorSpec], positional: Sequence[Any], named: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Return a batch by input name, after lossless type conversion and shape checks.

    Raises:
        ShapeError: with the tensor, and the expected and actual type and shape.
    """
    names = [s.name for s in specs]
    if len(positional) > len(names):
        raise ShapeError(f"got {len(positional)} tensors, the model takes {', '.join(names)}")
    given = dict(zip(names, positional, strict=False))
    duplicates = [n for n in named if n in given]
    unknown = [n for n in named if n not in names]
    if duplicates:
        raise ShapeError(f"given by position and by name: {', '.join(duplicates)}")
    if unknown:
        expected = ", ".join(map(repr, names))
        listing = ", ".join(map(repr, unknown))
        raise ShapeError(f"unknown input: {listing} (expected one of {expected})")
    given.update(named)
    missing = [n for n in names if n not in given]
    if missing:
        raise ShapeError(f"missing from the batch: {', '.join(missing)}")
    sizes: dict[str, tuple[int, str]] = {}
    return {s.name: _match_input(s, to_array(given[s.name], s.name), sizes) for s in specs}


class Feeder:
    """Converts batches for the same inputs; batches like the last one skip all checks."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = specs
        self._names = [s.name for s in specs]
        self._types = [numpy_dtype(s.dtype) for s in specs]
        self._shapes: list[tuple[int, ...]] = []

    def __call__(self, positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of :func:`feed`."""
        if not named and len(positional) == len(self._shapes):
            wanted = zip(positional, self._types, self._shapes, strict=True)
            if all(
                type(a) is np.ndarray and a.dtype == t and a.shape == s and a.flags.c_contiguous
                for a, t, s in wanted
            ):
                return dict(zip(self._names, positional, strict=True))
        arrays = feed(self._specs, positional, named)
        self._shapes = [a.shape for a in arrays.values()]
        return arrays


def _match_input(
    spec: TensorSpec, array: np.ndarray, sizes: dict[str, tuple[int, str]]
) -> np.ndarray:
    if spec.role == "target":
        array = match_target(spec, array)
    expected = f"{spec.name!r} is {spec.dtype}[{', '.join(map(str, spec.shape))}]"
    if array.ndim != len(spec.shape):
        raise ShapeError(f"{expected}, got shape {list(array.shape)}{_shape_hint(spec, array)}")
    array = _convert(spec, array)
    for axis, (have, dim) in enumerate(zip(array.shape, spec.shape, strict=True)):
        if isinstance(dim, int):
            if have != dim:
                hint = _shape_hint(spec, array) if axis else _fixed_hint(spec, dim)
                raise ShapeError(f"{expected}, got shape {list(array.shape)}{hint}")
        elif dim.isidentifier():
            known = sizes.setdefault(dim, (have, spec.name))
            if known[0] != have:
                raise ShapeError(
                    f"{expected}, but {dim} is {have} here and {known[0]} in {known[1]!r}"
                )
    return np.ascontiguousarray(array).reshape(array.shape)


def _fixed_hint(spec: TensorSpec, size: int) -> str:
    free = by_caller(
        f"build(..., dims={{'{spec.name}[0]': 'batch'}})",
        f"onnxtrain build ... --dim {spec.name}[0]=batch",
    )
    return (
        f"\nhint: the model fixes the batch size: use {argument('batch_size', size)}, or build "
        f"without fixed {by_caller('dims=', '--dim')}"
        + (f"; {free} frees a size that the file fixes" if spec.role == "input" else "")
    )


def _shape_hint(spec: TensorSpec, array: np.ndarray) -> str:
    """Return the call that gives an array the shape of an input, if there is one."""
    sizes = spec.shape[1:]
    if spec.shape and has_shape(array, sizes):
        return f"\nhint: this is one row; a batch of one is {spec.name}[np.newaxis]"
    fixed = [d for d in sizes if isinstance(d, int)]
    if len(fixed) == len(sizes) and array.ndim and math.prod(fixed) == math.prod(array.shape[1:]):
        return f"\nhint: {spec.name}.reshape({', '.join(map(str, (-1, *fixed)))})"
    if spec.role == "target" and "int" in spec.dtype and array.ndim == len(spec.shape) + 1:
        return (
            "\nhint: the target is a class index per row; for probabilities, build with "
            "loss=CrossEntropy(probabilities=True)"
        )
    return ""


def has_shape(array: np.ndarray, sizes: Sequence[int | str]) -> bool:
    """Return whether an array has these sizes; symbolic ones are any number."""
    return array.ndim == len(sizes) and all(
        isinstance(d, str) or d == n for d, n in zip(sizes, array.shape, strict=True)
    )


def match_target(spec: TensorSpec, array: np.ndarray, where: str = " of the batch") -> np.ndarray:
    """Return a target as the loss reads it.

    Data sets omit a last axis of size 1 that the model has, or have one that the model omits. Rows
    of one-hot labels become class indices.

    Args:
        spec: of the target.
        array: its values.
        where: what rows are counted in, for messages.

    Raises:
        ShapeError: if class indices are NaN or have fractions, with the row.
    """
    rank = len(spec.shape)
    if spec.shape[-1:] == (1,) and array.ndim == rank - 1:
        return array[..., np.newaxis]
    if array.ndim == rank + 1 and array.shape[-1] == 1:
        array = array[..., 0]
    elif array.ndim == rank + 1 and "int" in spec.dtype and _is_one_hot(array):
        return array.argmax(-1)
    if "int" in spec.dtype and _is_float(array.dtype) and array.ndim == rank:
        _check_integers(spec, array, where)
    return array


def _is_one_hot(array: np.ndarray) -> bool:
    if not (_is_float(array.dtype) or array.dtype.kind in "iub"):
        return False
    return bool(((array == 0) | (array == 1)).all() and (array.sum(-1) == 1).all())


def _check_integers(spec: TensorSpec, array: np.ndarray, where: str) -> None:
    """Raise an error for the first value that is not an integer."""
    values = array.astype(np.float64)
    bad = ~np.isfinite(values) | (values != np.round(values))
    if not bad.any():
        return
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    row = f" in row {index[0]}{where}" if index else ""
    many = f" (and {int(bad.sum()) - 1} more)" if bad.sum() > 1 else ""
    value = values[index]
    text = "NaN" if np.isnan(value) else repr(float(value))
    hint = (
        "drop these rows, or give them a label that the loss ignores"
        if np.isnan(value)
        else "class labels are integers"
    )
    raise ShapeError(f"{spec.name!r} is {spec.dtype}, got {text}{row}{many}\nhint: {hint}")


def _convert(spec: TensorSpec, array: np.ndarray) -> np.ndarray:
    """Return the array in the input's type; floats may be rounded, nothing else may change."""
    want = numpy_dtype(spec.dtype)
    if array.dtype == want:
        return array
    mismatch = f"{spec.name!r} is {spec.dtype}, got {array.dtype}"
    if not (_is_float(array.dtype) or array.dtype.kind in "iub"):
        texts = array.dtype.kind in "UT" and spec.role == "target"
        hint = "\nhint: fit and evaluate accept class names; a step takes class indices"
        raise ShapeError(mismatch + (hint if texts else ""))
    with np.errstate(over="ignore", invalid="ignore"):
        converted = array.astype(want)
    if _is_float(want) and _is_float(array.dtype):
        if np.isinf(converted.astype(np.float64)).sum() > np.isinf(array).sum():
            raise ShapeError(f"{mismatch} with values that are too large")
    elif not np.array_equal(converted.astype(array.dtype), array) or (
        array.dtype.kind in "iu" and want.kind in "iu" and not np.array_equal(converted, array)
    ):
        raise ShapeError(f"{mismatch} with values that do not fit")
    return converted


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype == ml_dtypes.bfloat16
