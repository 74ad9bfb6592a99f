"""``onnxruntime.training.ortmodule``: ``ORTModule`` on :class:`onnxtrain.torch.TrainableModule`."""

from __future__ import annotations

import enum
import logging
import os
import types
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import nn

from onnxtrain.graph.io import load, save
from onnxtrain.torch import TrainableModule


class LogLevel(enum.IntEnum):
    """Log levels, from the most to the least verbose."""

    VERBOSE = 0
    DEVINFO = 1
    INFO = 2
    WARNING = 3
    ERROR = 4
    FATAL = 5


_PYTHON_LEVELS = {
    LogLevel.VERBOSE: logging.DEBUG,
    LogLevel.DEVINFO: logging.DEBUG,
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
    LogLevel.FATAL: logging.CRITICAL,
}


class DebugOptions:
    """What ``ORTModule`` logs, and which models it writes.

    With ``save_onnx``, each export writes ``<prefix>_<stage>_<mode>.onnx``, where the mode is
    ``training`` or ``inference``. Stages: ``torch_exported``; ``optimized_pre_grad``, the
    normalized graph (training only); ``optimized``, the forward pass; ``execution_model``, the
    backward pass, or in inference the forward pass.

    Args:
        log_level: level of the logger ``onnxtrain``; the variable ``ORTMODULE_LOG_LEVEL`` overrides
            it.
        save_onnx: write models.
        onnx_prefix: start of the file names.
        save_path: where to write; by default the working directory. The variable
            ``ORTMODULE_SAVE_ONNX_PATH`` overrides it.
        config: accepted without effect.

    Raises:
        TypeError: for a level or prefix of another type.
        ValueError: if models are to be written without a prefix.
        OSError: if models are to be written to a directory that is not writable.
    """

    def __init__(
        self,
        log_level: LogLevel = LogLevel.WARNING,
        save_onnx: bool = False,
        onnx_prefix: str = "",
        save_path: str = "",
        config: Any = None,
    ) -> None:
        del config
        if not isinstance(log_level, LogLevel):
            raise TypeError(f"Expected log_level of type LogLevel, got {type(log_level)}.")
        self.log_level = LogLevel[os.environ.get("ORTMODULE_LOG_LEVEL", log_level.name)]
        self.save_onnx, self.onnx_prefix = save_onnx, onnx_prefix
        self.save_path = Path(os.environ.get("ORTMODULE_SAVE_ONNX_PATH", save_path or Path.cwd()))
        if not save_onnx:
            return
        if not os.access(self.save_path, os.W_OK):
            raise OSError(
                f"Directory {self.save_path} is not writable.\n"
                "hint: set ORTMODULE_SAVE_ONNX_PATH to a directory that is"
            )
        if not isinstance(onnx_prefix, str):
            raise TypeError(f"Expected name prefix of type str, got {type(onnx_prefix)}.")
        if not onnx_prefix:
            raise ValueError("onnx_prefix must be provided when save_onnx is set.")


class ORTModule(TrainableModule):
    """Run a module on ONNX Runtime, with the constructor of onnxruntime-training.

    As there, methods of the wrapped module run with this module as ``self``, and new attributes,
    buffers and parameters are set on the wrapped module.

    Args:
        module: the module to run.
        debug_options: what to log, and which models to write.
        fallback: as in :class:`onnxtrain.torch.TrainableModule`.
        threads: as in :class:`onnxtrain.torch.TrainableModule`.
    """

    def __init__(
        self,
        module: nn.Module,
        debug_options: DebugOptions | None = None,
        **options: Any,
    ) -> None:
        super().__init__(module, **options)
        self.debug_options = debug_options or DebugOptions()
        if debug_options is not None or "ORTMODULE_LOG_LEVEL" in os.environ:
            level = _PYTHON_LEVELS[self.debug_options.log_level]
            logging.getLogger("onnxtrain").setLevel(level)
        self._initialized = True

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, types.MethodType) and value.__self__ is self.__dict__["_modules"].get(
            "module"
        ):
            return types.MethodType(value.__func__, self)  # self(...) in it runs here
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in self.__dict__ or name in self.__dict__.get("_modules", ())
        inner = self.__dict__.get("_modules", {}).get("module")
        if own or "_initialized" not in self.__dict__:
            super().__setattr__(name, value)
        elif isinstance(getattr(type(inner), name, None), types.FunctionType):
            self.__dict__[name] = value  # replaces the method here, not in the wrapped module
        else:
            setattr(inner, name, value)
            self._compiled_calls.clear()

    def register_buffer(
        self, name: str, tensor: torch.Tensor | None, persistent: bool = True
    ) -> None:
        """Register a buffer of the wrapped module."""
        self.module.register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter of the wrapped module."""
        self.module.register_parameter(name, param)

    def _is_training(self) -> bool:
        return self.training

    def _save_model(self, stage: str, model: onnx.ModelProto | ir.Model) -> None:
        options = self.debug_options
        if options.save_onnx:
            mode = "training" if self.training else "inference"
            file = f"{options.onnx_prefix}_{stage}_{mode}.onnx"
            save(load(model), options.save_path / file)


__all__ = ["DebugOptions", "LogLevel", "ORTModule"]
