"""Alias this package as ``onnxruntime.training``; import modules that need torch on first use.

``install`` adds a finder for the import paths of all releases that had the training API. A path
whose content moved leads to the module that has it now. A path without counterpart raises
ImportError, with the replacement.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from onnxtrain.compat.ort import agent, training_session
from onnxtrain.errors import CompatError
from onnxtrain.runtime.devices import import_onnxruntime

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
    "fused_adam",
    "optim",
    "ortmodule",
    "orttrainer",
    "training_session",
    "utils",
)
_MODULE_BY_NAME = {
    "ORTModule": "ortmodule",
    "ORTTrainer": "orttrainer",
    "ORTTrainerOptions": "orttrainer",
    "TrainStepInfo": "optim",
    "TrainingParameters": "training_session",
    "TrainingSession": "training_session",
}
_MODULE_BY_OLD_PATH = {
    "onnxruntime.capi.ort_trainer": "orttrainer",
    "onnxruntime.capi.training": "training_session",
    "onnxruntime.capi.training.training_session": "training_session",
    f"{_ALIAS}.amp.loss_scaler": "amp",
    f"{_ALIAS}.api.checkpoint_state": "api",
    f"{_ALIAS}.api.lr_scheduler": "api",
    f"{_ALIAS}.api.module": "api",
    f"{_ALIAS}.api.optimizer": "api",
    f"{_ALIAS}.experimental.gradient_graph": "experimental",
    f"{_ALIAS}.onnxblock.model_accessor": "onnxblock.model",
    f"{_ALIAS}.onnxblock.onnxblock": "onnxblock.models",
    f"{_ALIAS}.optim.config": "optim",
    f"{_ALIAS}.optim.fused_adam": "fused_adam",
    f"{_ALIAS}.optim.lr_scheduler": "optim",
    f"{_ALIAS}.ortmodule.debug_options": "ortmodule",
    f"{_ALIAS}.ortmodule.options": "ortmodule",
    f"{_ALIAS}.ortmodule.ortmodule": "ortmodule",
    f"{_ALIAS}.orttrainer_options": "orttrainer",
    f"{_ALIAS}.utils.torch_type_map": "utils",
}
_CHECKPOINTS = "use ORTTrainer.save_checkpoint and ORTTrainer.load_checkpoint"
_HINTS = {
    "onnxruntime.capi.checkpointing_utils": _CHECKPOINTS,
    f"{_ALIAS}.checkpoint": _CHECKPOINTS,
    f"{_ALIAS}.model_desc_validation": "delete this import: ORTTrainer checks the description",
    f"{_ALIAS}.optim.fp16_optimizer": "use torch.amp.GradScaler",
    f"{_ALIAS}.ort_triton": "delete this import: stock onnxruntime has its own kernels",
    f"{_ALIAS}.ortmodule": "use the public methods of ORTModule; its internals do not exist here",
    f"{_ALIAS}.ortmodule.experimental": "use ORTModule(module, fallback=True)",
    f"{_ALIAS}.ortmodule.torch_cpp_extensions": "delete this import: nothing needs to be compiled",
    f"{_ALIAS}.utils.data": "use torch.utils.data.DistributedSampler",
    f"{_ALIAS}.utils.hooks": "use torch.nn.Module.register_forward_hook",
}
"""What replaces modules that do not exist here, and their submodules."""


class _OldPaths(MetaPathFinder, Loader):
    """Find the modules of onnxruntime-training among ours."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del target
        if fullname.startswith(f"{_PACKAGE}.") and path == []:
            # `from onnxruntime.training.utils import hooks` asks under the name of our module.
            raise _no_counterpart(_ALIAS + fullname.removeprefix(_PACKAGE))
        known = fullname in _MODULE_BY_OLD_PATH or fullname in _HINTS
        if not known and not f"{fullname}.".startswith(f"{_ALIAS}."):
            return None
        module = _module_at(fullname)
        if module is None:
            raise _no_counterpart(fullname)
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> None:
        del spec

    def exec_module(self, module: ModuleType) -> None:
        # The import system returns what sys.modules has: our module, under its own name and spec.
        path = module.__name__
        ours = importlib.import_module(_module_at(path) or "")
        if not hasattr(ours, "__path__"):
            ours.__path__ = []  # some old packages are single modules here; ask us for their parts
        sys.modules[path] = ours


def _module_at(path: str) -> str | None:
    """Return the name of our module for an old path; ``None`` if there is none."""
    if path in _MODULE_BY_OLD_PATH:
        return f"{_PACKAGE}.{_MODULE_BY_OLD_PATH[path]}"
    name = _PACKAGE + path.removeprefix(_ALIAS)
    if not path.startswith(_ALIAS):
        return None
    return name if importlib.util.find_spec(name) is not None else None


def _no_counterpart(path: str) -> ImportError:
    parts = path.split(".")
    prefixes = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    default = "see docs/coming-from-onnxruntime-training.md for what exists"
    hint = next((_HINTS[p] for p in prefixes if p in _HINTS), default)
    return ImportError(f"{path} has no counterpart in onnxtrain\nhint: {hint}", name=path)


def install() -> None:
    """Alias ``onnxruntime.training`` and its submodules to this package.

    Also add the names of the first two training APIs to ``onnxruntime`` and its binding, where they
    are missing. Old paths without counterpart raise ImportError, with the replacement.

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
    if not any(isinstance(finder, _OldPaths) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OldPaths())
    for name in _BINDING_NAMES:
        value = getattr(agent, name, None) or getattr(training_session, name)
        modules = [ort.capi._pybind_state, ort.capi.onnxruntime_pybind11_state]
        for module in [*modules, ort] if name in _TOP_LEVEL_NAMES else modules:
            if not hasattr(module, name):
                setattr(module, name, value)
    _add_training_mode(ort.RunOptions)
    sys.modules[_ALIAS] = sys.modules[_PACKAGE]
    ort.training = sys.modules[_PACKAGE]  # pyright: ignore[reportAttributeAccessIssue]


def _add_training_mode(options: Any) -> None:
    """Add ``RunOptions.training_mode``, which graphs here do not depend on, where it is missing."""
    if hasattr(options, "training_mode"):
        return
    entry = "onnxtrain.training_mode"

    def read(self: Any) -> bool:
        try:
            return self.get_run_config_entry(entry) == "1"
        except RuntimeError:
            return False

    def write(self: Any, value: bool) -> None:
        self.add_run_config_entry(entry, str(int(value)))

    options.training_mode = property(read, write)


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    if name in _MODULE_BY_NAME:
        return getattr(importlib.import_module(f"{_PACKAGE}.{_MODULE_BY_NAME[name]}"), name)
    if f"{_ALIAS}.{name}" in _HINTS:
        raise _no_counterpart(f"{_ALIAS}.{name}")
    raise AttributeError(f"module 'onnxtrain.compat.ort' has no attribute {name!r}")


def is_ortmodule_available() -> bool:
    """Return whether ORTModule can be imported: it needs torch and nothing else."""
    return importlib.util.find_spec("torch") is not None
