"""Errors with the types of onnxruntime-training that are also ``CompatError``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from onnxtrain.errors import CompatError, OnnxTrainError


class OrtError(CompatError, RuntimeError):
    """An error that onnxruntime-training reports as RuntimeError."""


class OrtLookupError(CompatError, LookupError):
    """A name that the graph does not have."""


class OrtIndexError(CompatError, IndexError):
    """An optimizer without a parameter to train."""


class OrtTypeError(CompatError, TypeError):
    """An argument of the wrong type."""


@contextmanager
def as_ort_errors() -> Iterator[None]:
    """Convert onnxtrain's errors to RuntimeError, as in onnxruntime-training."""
    try:
        yield
    except OnnxTrainError as error:
        if isinstance(error, RuntimeError | CompatError):
            raise
        raise OrtError(str(error)) from error
