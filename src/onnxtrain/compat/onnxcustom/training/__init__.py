"""Counterpart of ``onnxcustom.training``."""

from onnxtrain.compat.onnxcustom.training.errors import (
    ConvergenceError,
    ConvergenceWarning,
    EvaluationError,
    ProviderError,
)

__all__ = ["ConvergenceError", "ConvergenceWarning", "EvaluationError", "ProviderError"]
