"""Errors and warnings of onnxcustom."""

from __future__ import annotations


class ConvergenceError(RuntimeError):
    """The training loss is not a finite number."""


class ConvergenceWarning(UserWarning):
    """The training loss is not a finite number, but training continues."""


class EvaluationError(RuntimeError):
    """The validation loss is not a finite number."""


class ProviderError(RuntimeError):
    """The provider or device is not available."""
