"""What the graphs of a training run are made from: a request, resolved for a model."""

from __future__ import annotations

import dataclasses
from typing import Any

from onnxtrain.artifacts.precision import Precision
from onnxtrain.optim import Optimizer
from onnxtrain.optim.clip import Clip
from onnxtrain.targets import TARGETS, Target

GRAD_NORM = "grad_norm"
"""The metric that looks at gradients."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """What the update of the parameters depends on, resolved."""

    optimizer: Optimizer
    clip: Clip = dataclasses.field(default_factory=Clip)
    ema: float | None = None
    precision: Precision = dataclasses.field(default_factory=Precision)
    target: Target = TARGETS["cpu"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildOptions(UpdateOptions):
    """What was asked for, resolved."""

    loss: Any
    metrics: tuple[Any, ...] = ()
    outputs: tuple[str, ...] = ()
    candidates: tuple[str, ...]
    chosen_by_user: bool
    buffers: tuple[str, ...]
    mode: str
    randomness: str
    recompute: str | tuple[str, ...] = ()

    @property
    def graph_metrics(self) -> tuple[Any, ...]:
        """Metrics of predictions; the norm of the gradients is none."""
        return tuple(m for m in self.metrics if m != GRAD_NORM)
