"""``onnxruntime.training.ortmodule``: ``ORTModule`` on :class:`onnxtrain.torch.TrainableModule`."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from torch import nn

from onnxtrain.torch import TrainableModule


class LogLevel(enum.IntEnum):
    """Log levels; accepted without effect."""

    VERBOSE = 0
    DEVINFO = 1
    INFO = 2
    WARNING = 3
    ERROR = 4
    FATAL = 5


@dataclasses.dataclass
class DebugOptions:
    """Debug options; accepted without effect."""

    log_level: LogLevel = LogLevel.WARNING
    save_onnx: bool = False
    onnx_prefix: str = ""


class ORTModule(TrainableModule):
    """Run a module on ONNX Runtime, with the constructor of onnxruntime-training.

    Args:
        module: the module to run.
        debug_options: accepted without effect.
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
        self.debug_options = debug_options


__all__ = ["DebugOptions", "LogLevel", "ORTModule"]
