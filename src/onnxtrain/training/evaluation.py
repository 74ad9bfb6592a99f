"""Means over batches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onnxtrain.errors import LabelError, ShapeError
from onnxtrain.runtime.feeds import feed
from onnxtrain.training.data import Source, as_source
from onnxtrain.training.guards.labels import explained
from onnxtrain.training.results import StepResult

if TYPE_CHECKING:
    from onnxtrain.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Loss and metrics of a data set; ``float(evaluation)`` is the loss."""

    loss: float
    metrics: dict[str, float]
    samples: int

    def __float__(self) -> float:
        return self.loss

    def to_dict(self) -> dict[str, float]:
        """Return loss and metrics by name."""
        return {"loss": self.loss, **self.metrics}


class Mean:
    """Loss and metrics, each batch weighted by its samples; perplexities by their logarithm."""

    def __init__(self) -> None:
        self.samples = 0
        self._sums: dict[str, float] = {}

    def add(self, result: StepResult, samples: int) -> None:
        """Take in a batch."""
        self.samples += samples
        for name, value in {"loss": result.loss, **result.metrics}.items():
            self._sums[name] = self._sums.get(name, 0.0) + samples * _inner(name, value)

    def values(self) -> dict[str, float]:
        """Return the means by name."""
        return {n: _outer(n, s / self.samples) for n, s in self._sums.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, ready for JSON."""
        return {"samples": self.samples, "sums": dict(self._sums)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Mean:
        """Restore what :meth:`state_dict` gave."""
        mean = cls()
        mean.samples, mean._sums = int(state["samples"]), dict(state["sums"])
        return mean


def _inner(name: str, value: float) -> float:
    return math.log(value) if name.startswith("perplexity") and value > 0 else value


def _outer(name: str, value: float) -> float:
    try:
        return math.exp(value) if name.startswith("perplexity") else value
    except OverflowError:
        return math.inf


def evaluate(trainer: Trainer, source: Source) -> Evaluation:
    """Return loss and metrics over all batches, in evaluation mode."""
    mean = Mean()
    for batch in source.batches(0):
        try:
            result = trainer.evaluate_batch(*batch.positional, **batch.named)
        except LabelError as error:
            feeds = feed(trainer.batch_specs, batch.positional, batch.named)
            raise explained(trainer, error, feeds, batch.rows) from error
        mean.add(result, batch.size)
    if not mean.samples:
        raise ShapeError("there is nothing to evaluate on: the data has no batch")
    values = mean.values()
    return Evaluation(values.pop("loss"), values, mean.samples)


def evaluate_on(trainer: Trainer, data: Any, *, batch_size: int | None = None) -> Evaluation:
    """Return loss and metrics over all of ``data``, in evaluation mode.

    Args:
        trainer: whose weights are used.
        data: as in :meth:`Trainer.fit`.
        batch_size: of arrays.
    """
    fixed = trainer.fixed_batch
    size = batch_size or fixed or 256
    source = as_source(data, batch_size=size, drop_last=fixed is not None, columns=trainer.inputs)
    return evaluate(trainer, source)
