"""Counterpart of ``onnxcustom.training``."""

from onnxtrain.compat.onnxcustom.training.excs import (
    ConvergenceError,
    ConvergenceWarning,
    EvaluationError,
    ProviderError,
)

__all__ = ["ConvergenceError", "ConvergenceWarning", "EvaluationError", "ProviderError"]
