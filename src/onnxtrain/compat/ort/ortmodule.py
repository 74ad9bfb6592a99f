"""``onnxruntime.training.ortmodule``: the old names of :class:`onnxtrain.torch.TrainableModule`."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from torch import nn

from onnxtrain.torch import TrainableModule


class LogLevel(enum.IntEnum):
    """How much the old module said while it worked; nothing reads it here."""

    VERBOSE = 0
    DEVINFO = 1
    INFO = 2
    WARNING = 3
    ERROR = 4
    FATAL = 5


@dataclasses.dataclass
class DebugOptions:
    """Accepted as before; there is nothing left to debug with it."""

    log_level: LogLevel = LogLevel.WARNING
    save_onnx: bool = False
    onnx_prefix: str = ""


class ORTModule(TrainableModule):
    """A module on ONNX Runtime, with the old constructor.

    Args:
        module: what to run.
        debug_options: accepted, and without effect.
        fallback: as in :class:`onnxtrain.torch.TrainableModule`.
        threads: as there.
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
