"""Alias this package as ``onnxruntime.training``; import modules that need torch on first use."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from onnxtrain.compat.ort import agent, training_session
from onnxtrain.errors import CompatError
from onnxtrain.runtime.session import import_onnxruntime

_PACKAGE = "onnxtrain.compat.ort"
_ALIAS = "onnxruntime.training"
# The first training API exported these from onnxruntime itself and from its binding.
_TOP_LEVEL_NAMES = ("TrainingParameters", "TrainingSession")
_BINDING_NAMES = (*agent.__all__, *_TOP_LEVEL_NAMES)

# Imported on first use: some of these modules need torch, `import onnxtrain.compat.ort` does not.
_LAZY_MODULES = (
    "agent",
    "amp",
    "experimental",
    "optim",
    "ortmodule",
    "orttrainer",
    "training_session",
)
_MODULE_BY_NAME = {
    "ORTModule": "ortmodule",
    "ORTTrainer": "orttrainer",
    "ORTTrainerOptions": "orttrainer",
    "TrainStepInfo": "optim",
    "TrainingParameters": "training_session",
    "TrainingSession": "training_session",
}


def install() -> None:
    """Alias ``onnxruntime.training`` and its submodules to this package.

    Also add the names of the first two training APIs to ``onnxruntime`` and
    ``onnxruntime.capi._pybind_state``, where they are missing.

    Raises:
        CompatError: if another ``onnxruntime.training`` is already imported.
    """
    ort = import_onnxruntime()
    imported = sys.modules.get(_ALIAS)
    if imported is not None and imported is not sys.modules[_PACKAGE]:
        raise CompatError(
            "onnxruntime.training is already imported from onnxruntime-training\n"
            "hint: call onnxtrain.compat.ort.install() first, or uninstall onnxruntime-training"
        )
    for name, module in list(sys.modules.items()):
        if name == _PACKAGE or name.startswith(f"{_PACKAGE}."):
            sys.modules[_ALIAS + name.removeprefix(_PACKAGE)] = module
    binding = ort.capi._pybind_state
    for name in _BINDING_NAMES:
        value = getattr(agent, name, None) or getattr(training_session, name)
        for module in (binding, ort) if name in _TOP_LEVEL_NAMES else (binding,):
            if not hasattr(module, name):
                setattr(module, name, value)
    ort.training = sys.modules[_PACKAGE]  # pyright: ignore[reportAttributeAccessIssue]


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    if name in _MODULE_BY_NAME:
        return getattr(importlib.import_module(f"{_PACKAGE}.{_MODULE_BY_NAME[name]}"), name)
    raise AttributeError(f"module 'onnxtrain.compat.ort' has no attribute {name!r}")


def is_ortmodule_available() -> bool:
    """Return whether ORTModule can be imported: it needs torch and nothing else."""
    return importlib.util.find_spec("torch") is not None
