"""Names of ``onnxruntime.training`` that are imported when somebody asks; some need torch."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

_HOMES = {
    "ORTModule": "ortmodule",
    "ORTTrainer": "orttrainer",
    "ORTTrainerOptions": "orttrainer",
    "TrainStepInfo": "optim",
    "TrainingParameters": "training_session",
    "TrainingSession": "training_session",
}
_MODULES = (
    "agent",
    "amp",
    "experimental",
    "optim",
    "ortmodule",
    "orttrainer",
    "training_session",
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"onnxtrain.compat.ort.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"onnxtrain.compat.ort.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'onnxtrain.compat.ort' has no attribute {name!r}")


def is_ortmodule_available() -> bool:
    """Return whether torch is there, which is all that ORTModule needs."""
    return importlib.util.find_spec("torch") is not None
