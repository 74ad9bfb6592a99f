"""Values of onnxruntime of either kind, arrays and tensors, in and out of old calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from onnxtrain.compat.ort.errors import OrtError, OrtTypeError
from onnxtrain.runtime import session as runtime


def items(values: Iterable[Any]) -> list[Any]:
    """Return the elements of a list or of onnxruntime's vector."""
    if hasattr(values, "__getitem__") and hasattr(values, "__len__"):
        vector: Any = values  # onnxruntime's vectors want to be indexed
        return [vector[i] for i in range(len(vector))]
    return list(values)


def as_value(value: Any, device: str) -> Any:
    """Return a Python OrtValue for a value of either kind, an array or a tensor of DLPack."""
    kind = runtime.runtime().OrtValue
    if isinstance(value, kind):
        return value
    if type(value).__name__ == "OrtValue":
        return kind(value)
    if isinstance(value, np.ndarray | np.generic):
        return kind.ortvalue_from_numpy(np.ascontiguousarray(value), device)
    if hasattr(value, "__dlpack__"):
        return kind.from_dlpack(value)
    raise OrtTypeError(
        f"neither an OrtValue nor an array: {type(value).__name__}\n"
        "hint: onnxruntime.OrtValue.ortvalue_from_numpy makes one of an array"
    )


def check_value(value: Any, wanted: Any, what: str) -> None:
    """Refuse a value that an input of a session cannot take.

    Args:
        value: an OrtValue.
        wanted: the session's description of the input.
        what: ``forward`` or ``backward``, for the message.
    """
    shape, dims = list(value.shape()), list(wanted.shape)
    given = f"{value.data_type()} {shape}"
    if value.data_type() != wanted.type:
        raise OrtError(
            f"Error in {what} pass execution: {wanted.name!r} is {given}\n"
            f"hint: the model takes {wanted.type} {dims}"
        )
    fixed = zip(shape, dims, strict=False)
    if len(shape) != len(dims) or any(isinstance(d, int) and s != d for s, d in fixed):
        raise OrtError(
            f"Error in {what} pass execution: {wanted.name!r} has shape {shape}\n"
            f"hint: the model takes {dims}"
        )


def deliver(fetches: Any, values: list[Any]) -> None:
    """Add values to a list, or to onnxruntime's vector."""
    for value in values:
        if hasattr(fetches, "push_back"):
            fetches.push_back(value._ortvalue)
        else:
            fetches.append(value)
