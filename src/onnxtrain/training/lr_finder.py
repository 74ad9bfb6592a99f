"""Find a learning rate: a short run whose learning rate grows from step to step (LR range test)."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import itertools
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from onnxtrain.artifacts.display import Row, SummaryRepr
from onnxtrain.errors import OnnxTrainError, by_caller
from onnxtrain.graph.io.writer import bytes_writer, write_files
from onnxtrain.runtime.feeds import feed
from onnxtrain.training.checks import check_lr, is_finite
from onnxtrain.training.data import Batch, Source, as_source
from onnxtrain.training.trainer import Trainer

_SMOOTHING = 0.9  # of the moving average that decides about divergence
_DIVERGENCE_FACTOR = 4.0  # the run stops at this multiple of the best loss
_MIN_STEPS = 5
_NEIGHBORS = 8


@dataclasses.dataclass(frozen=True, repr=False)
class LrCurve(SummaryRepr):
    """The losses of a run whose learning rate grows from step to step."""

    lrs: list[float]
    losses: list[float]
    smoothed: list[float]
    suggestion: float
    """Where the smoothed loss falls most steeply."""

    def summary(self) -> tuple[str, list[Row]]:
        """Return the class name and the rows of ``repr``."""
        rows = [
            ("suggestion", f"{self.suggestion:.2g}"),
            ("range", f"{self.lrs[0]:.2g} to {self.lrs[-1]:.2g} in {len(self.lrs)} steps"),
            ("lowest loss", f"{min(self.smoothed):.5g}"),
        ]
        return "LrCurve", rows

    def save(self, path: str | os.PathLike[str]) -> None:
        """Plot the curve to a PNG or SVG file.

        Raises:
            OnnxTrainError: if matplotlib is not installed.
        """
        if importlib.util.find_spec("matplotlib") is None:
            raise OnnxTrainError(
                'plotting requires matplotlib\nhint: pip install "onnxtrain[plot]"'
            )
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(self.lrs, self.losses, linewidth=0.6, alpha=0.4, label="loss")
        axes.plot(self.lrs, self.smoothed, linewidth=1.6, label="smoothed")
        axes.axvline(self.suggestion, color="tab:red", linestyle="--")
        top = min(
            1.1 * max(self.smoothed), 1.6 * self.smoothed[0]
        )  # the end of the run may be far above
        axes.annotate(f" {self.suggestion:.2g}", (self.suggestion, 0.95 * top))
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        axes.set_ylim(0.9 * min(self.smoothed), top)
        axes.grid(alpha=0.3)
        axes.legend()
        image = io.BytesIO()
        name = os.path.abspath(os.fsdecode(path))
        figure.savefig(image, format="svg" if name.lower().endswith(".svg") else "png")
        write_files(name, {name: bytes_writer(image.getvalue())})


def find_lr(
    trainer: Trainer,
    data: Any,
    *,
    batch_size: int | None = None,
    lowest: float = 1e-6,
    highest: float = 1.0,
    steps: int = 100,
) -> LrCurve:
    """Return the loss as the learning rate grows; the trainer is restored afterwards.

    Args:
        trainer: the trainer to try learning rates with.
        data: as in :meth:`Trainer.fit`.
        batch_size: for arrays; 32, or the fixed batch size of the model.
        lowest: lowest learning rate to try.
        highest: highest learning rate to try; the run stops earlier if the loss diverges.
        steps: number of batches; the data is repeated if it has fewer.

    Raises:
        OnnxTrainError: if accumulated gradients are pending, or the loss is infinite or NaN from
            the start.
    """
    if not 0 < check_lr(lowest, "lowest") < check_lr(highest, "highest"):
        raise OnnxTrainError(f"lowest must be between 0 and highest ({highest}), got {lowest}")
    if steps < _MIN_STEPS:
        raise OnnxTrainError(f"steps must be at least {_MIN_STEPS}, got {steps}")
    if trainer.accumulating:
        raise OnnxTrainError("gradients are accumulated but not applied\nhint: call flush() first")
    fixed = trainer.fixed_batch
    source = as_source(
        data,
        trainer.batch_specs,
        batch_size=batch_size or fixed or 32,
        shuffle=True,
        seed=trainer.seed,
        drop_last=fixed is not None,
        classes=trainer.classes,
    )
    before = trainer.state_dict(), trainer.lr, trainer.global_step
    rates = np.geomspace(lowest, highest, steps).tolist()
    try:
        losses = list(_losses(trainer, source, rates))
    finally:
        trainer.load_state_dict(before[0])
        trainer.lr, trainer.global_step = before[1:]
    if len(losses) < _MIN_STEPS:
        raise OnnxTrainError(
            f"the loss is not finite after {len(losses)} steps at learning rate {lowest:g}\n"
            "hint: pass a smaller "
            + by_caller("lowest=; fit(debug_nan=True)", "--lowest; train --debug-nan")
            + " finds the node"
        )
    smoothed = _smooth(losses)
    rates = rates[: len(losses)]
    return LrCurve(rates, losses, smoothed, _steepest(rates, smoothed))


def _losses(trainer: Trainer, source: Source, rates: list[float]) -> Iterator[float]:
    """Yield the loss before each step, until it diverges."""
    best, smoothed = math.inf, 0.0
    for number, (rate, batch) in enumerate(zip(rates, _repeat_epochs(source), strict=False), 1):
        trainer.lr = rate
        outputs = trainer.compute(feed(trainer.batch_specs, (), batch.arrays))
        if not is_finite(outputs[trainer.loss_name]):
            return
        loss = trainer.commit(outputs).loss
        yield loss
        smoothed = _SMOOTHING * smoothed + (1 - _SMOOTHING) * loss
        now = smoothed / (1 - _SMOOTHING**number)
        best = min(best, now)
        if number > _MIN_STEPS and best > 0 and now > _DIVERGENCE_FACTOR * best:
            return


def _repeat_epochs(source: Source) -> Iterator[Batch]:
    for epoch in itertools.count():
        yield from source.batches(epoch)


def _smooth(losses: list[float]) -> list[float]:
    """Return means over neighbors on both sides, which do not lag; nearer ones weigh more."""
    near = min(_NEIGHBORS, len(losses) // 2)
    weights = near + 1.0 - np.abs(np.arange(-near, near + 1))
    total = np.convolve(losses, weights, "same")
    return (total / np.convolve(np.ones(len(losses)), weights, "same")).tolist()


def _steepest(rates: list[float], smoothed: list[float]) -> float:
    """Return the rate at which the loss falls fastest before its minimum."""
    end = int(np.argmin(smoothed)) + 1
    if end < 3:
        return rates[max(end - 1, 0)] / 10
    derivatives = np.gradient(np.array(smoothed[:end]), np.log(rates[:end]))
    return rates[int(np.argmin(derivatives))]


__all__ = ["LrCurve", "find_lr"]
