"""Convert batches to the arrays that a model reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from onnxtrain.errors import ShapeError
from onnxtrain.manifest import TensorSpec

_FIXED = (
    "\nhint: the model fixes the batch size: use batch_size={size} (--batch-size {size}), or build "
    "from a model with a symbolic batch size"
)


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
    want = numpy_dtype(spec.dtype)
    if array.dtype != want:
        array = _convert(spec, array, want)
    expected = f"{spec.name!r} is {spec.dtype}[{', '.join(map(str, spec.shape))}]"
    if spec.role == "target" and spec.shape[-1:] == (1,) and array.ndim == len(spec.shape) - 1:
        array = array[..., np.newaxis]  # data sets often omit the axis of size 1
    if array.ndim != len(spec.shape):
        raise ShapeError(f"{expected}, got shape {list(array.shape)}")
    for axis, (have, dim) in enumerate(zip(array.shape, spec.shape, strict=True)):
        if isinstance(dim, int):
            if have != dim:
                hint = "" if axis else _FIXED.format(size=dim)
                raise ShapeError(f"{expected}, got shape {list(array.shape)}{hint}")
        elif dim.isidentifier():
            known = sizes.setdefault(dim, (have, spec.name))
            if known[0] != have:
                raise ShapeError(
                    f"{expected}, but {dim} is {have} here and {known[0]} in {known[1]!r}"
                )
    return np.ascontiguousarray(array).reshape(array.shape)


def _convert(spec: TensorSpec, array: np.ndarray, want: np.dtype[Any]) -> np.ndarray:
    """Return the array in another type; floats may be rounded, nothing else may change."""
    mismatch = f"{spec.name!r} is {spec.dtype}, got {array.dtype}"
    if not (_is_float(array.dtype) or array.dtype.kind in "iub"):
        raise ShapeError(mismatch)
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
