"""This package under the name ``onnxruntime.training``.

Names of ``onnxruntime.training`` that are imported when somebody asks; some need torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from onnxtrain.compat.ort import agent, training_session
from onnxtrain.errors import CompatError
from onnxtrain.runtime.session import import_onnxruntime

_PACKAGE = "onnxtrain.compat.ort"
_OLD = "onnxruntime.training"
# Old programs took these from onnxruntime itself and from its binding.
_AT_TOP = ("TrainingParameters", "TrainingSession")
_IN_BINDING = (*agent.__all__, *_AT_TOP)


def install() -> None:
    """Make ``import onnxruntime.training`` and its submodules give this package.

    ``onnxruntime`` and ``onnxruntime.capi._pybind_state`` get the names of the first two training
    APIs, where they do not have them.

    Raises:
        CompatError: if onnxruntime-training itself is imported already.
    """
    ort = import_onnxruntime()
    imported = sys.modules.get(_OLD)
    if imported is not None and imported is not sys.modules[_PACKAGE]:
        raise CompatError(
            "onnxruntime.training is imported already, and is not this package\n"
            "hint: call install() before anything else imports it"
        )
    for name, module in list(sys.modules.items()):
        if name == _PACKAGE or name.startswith(f"{_PACKAGE}."):
            sys.modules[_OLD + name.removeprefix(_PACKAGE)] = module
    binding = ort.capi._pybind_state
    for name in _IN_BINDING:
        value = getattr(agent, name, None) or getattr(training_session, name)
        for place in (binding, ort) if name in _AT_TOP else (binding,):
            if not hasattr(place, name):
                setattr(place, name, value)
    ort.training = sys.modules[_PACKAGE]  # pyright: ignore[reportAttributeAccessIssue]


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
