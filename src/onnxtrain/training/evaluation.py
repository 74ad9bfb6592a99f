"""Evaluate a data set: means of loss and metrics over its batches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain.errors import LabelError, ShapeError
from onnxtrain.runtime.feeds import feed
from onnxtrain.training.data import Source
from onnxtrain.training.distributed import Workers
from onnxtrain.training.labels import explain_label_error
from onnxtrain.training.metrics import Metrics
from onnxtrain.training.results import Outputs, StepResult

if TYPE_CHECKING:
    from onnxtrain.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Loss and metrics of a data set; ``float(evaluation)`` is the loss."""

    loss: float
    metrics: dict[str, Any]
    """Numbers, and lists for arrays such as a confusion matrix."""
    samples: int

    def __float__(self) -> float:
        return self.loss

    def to_dict(self) -> dict[str, Any]:
        """Return loss and metrics by name."""
        return {"loss": self.loss, **self.metrics}


class Mean:
    """Means of loss and metrics, weighted by samples; perplexities are averaged as logarithms."""

    def __init__(self) -> None:
        self.samples: float = 0
        self._sums: dict[str, float] = {}

    def add(self, result: StepResult, samples: float) -> None:
        """Add a batch."""
        self.samples += samples
        for name, value in {"loss": result.loss, **result.metrics}.items():
            self._sums[name] = self._sums.get(name, 0.0) + samples * _to_log_perplexity(name, value)

    def values(self) -> dict[str, float]:
        """Return the means by name."""
        return {n: _from_log_perplexity(n, s / self.samples) for n, s in self._sums.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, as JSON values."""
        return {"samples": self.samples, "sums": dict(self._sums)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Mean:
        """Return the means of a :meth:`state_dict`."""
        mean = cls()
        mean.samples, mean._sums = state["samples"], dict(state["sums"])
        return mean


def mean_over(
    workers: Workers, names: Outputs, outputs: Mapping[str, Any], weight: float
) -> tuple[float, bool, dict[str, Any]]:
    """Return rows, loss and metrics of a batch, whose parts several workers have computed.

    Args:
        workers: compute a part each.
        names: of loss and metrics.
        outputs: of this part.
        weight: of this part: its rows or tokens; 0 if it is empty.

    Returns:
        The rows of the batch, whether all parts have equally many, and the means by name.
    """
    mean = Mean()
    if weight:
        mean.add(names.result(outputs, 0, updated=False), weight)
    sums = mean.state_dict()["sums"]
    named = ["loss", *names.metrics]
    own = [weight, weight**2, workers.stop, *(sums.get(n, 0.0) for n in named)]
    total, squares, stops, *totals = workers.add(own)
    workers.all_stop = stops > 0
    if not total:
        raise ShapeError("no worker has a row of this batch")
    values = Mean.from_dict({"samples": total, "sums": dict(zip(named, totals, strict=True))})
    means = values.values()
    means[names.loss] = means.pop("loss")
    equal = squares * workers.size == total**2
    return total, equal, {n: np.float64(v) for n, v in means.items()}


def _to_log_perplexity(name: str, value: float) -> float:
    return math.log(value) if name.startswith("perplexity") and value > 0 else value


def _from_log_perplexity(name: str, value: float) -> float:
    try:
        return math.exp(value) if name.startswith("perplexity") else value
    except OverflowError:
        return math.inf


def evaluate(trainer: Trainer, source: Source, metrics: Metrics | None = None) -> Evaluation:
    """Return loss and metrics over all batches, in evaluation mode."""
    mean = Mean()
    if metrics is not None:
        metrics.reset()
    for batch in source.batches(0):
        feeds = feed(trainer.batch_specs, (), batch.arrays)
        try:
            result = trainer.evaluate_batch(**feeds)
        except LabelError as error:
            raise explain_label_error(trainer, error, feeds, batch) from error
        mean.add(result, batch.size)
        if metrics is not None:
            metrics.add(feeds)
    if not mean.samples:
        raise ShapeError("the data has no batch to evaluate")
    values = mean.values()
    loss = values.pop("loss")
    return Evaluation(loss, values | (metrics.values() if metrics else {}), round(mean.samples))
