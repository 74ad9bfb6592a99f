"""The errors of ``onnxruntime.training``: of the types its users catch, and of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from onnxtrain.errors import CompatError, OnnxTrainError


class OrtError(CompatError, RuntimeError):
    """What onnxruntime-training reports as a RuntimeError."""


class OrtLookupError(CompatError, LookupError):
    """A name that the graph does not have."""


class OrtIndexError(CompatError, IndexError):
    """An optimizer without a parameter to train."""


class OrtTypeError(CompatError, TypeError):
    """An argument of the wrong type."""


@contextmanager
def as_ort_errors() -> Iterator[None]:
    """Turn our errors into RuntimeErrors, as old code expects them; the message stays."""
    try:
        yield
    except OnnxTrainError as error:
        if isinstance(error, RuntimeError | CompatError):
            raise
        raise OrtError(str(error)) from error
