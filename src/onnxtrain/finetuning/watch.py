"""What a run shows on the way: tokens per second, time of a step, perplexity."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from onnxtrain.text.batches import TokenBatches
from onnxtrain.training.callbacks import Callback, Record
from onnxtrain.training.reports.progress import Display

if TYPE_CHECKING:
    from onnxtrain.training.results import StepResult
    from onnxtrain.training.run import Run

_FIRST = 2  # steps that are slower than the others


class TokenDisplay:
    """A display that counts tokens where others count samples."""

    def __init__(self, inner: Display, batches: TokenBatches) -> None:
        self._inner, self._batches, self._seen = inner, batches, 0

    def start(self, epochs: int, total: int | None, done: int) -> None:
        """Begin."""
        self._seen = self._batches.tokens
        self._inner.start(epochs, total, done)

    def step(self, epoch: int, loss: float, lr: float, samples: int) -> None:
        """Show a batch."""
        new, self._seen = self._batches.tokens - self._seen, self._batches.tokens
        self._inner.step(epoch, loss, lr, new)

    def line(self, text: str) -> None:
        """Show a message."""
        self._inner.line(text)

    def stop(self) -> None:
        """End."""
        self._inner.stop()


class Pace(Callback):
    """Tells after the first steps how long a step takes, and all of them."""

    def __init__(self, batches: TokenBatches) -> None:
        self._batches = batches
        self._started = self._steps = self._tokens = 0.0
        self.seconds: float | None = None
        """Of a step."""
        self.tokens_per_second: float | None = None
        self._told = False

    def on_start(self, run: Run) -> None:
        """Begin."""
        self._steps = 0

    def on_step(self, run: Run, result: StepResult) -> None:
        """Measure from the third step on."""
        self._steps += 1
        now = time.perf_counter()
        if self._steps == _FIRST:
            self._started, self._tokens = now, self._batches.tokens
        if self._steps <= _FIRST:
            return
        done = self._steps - _FIRST
        self.seconds = (now - self._started) / done
        self.tokens_per_second = (self._batches.tokens - self._tokens) / (now - self._started)
        if not self._told and self._steps == _FIRST + 2:
            self._told = True
            left = "" if run.batches is None else self._left(run)
            run.show.line(
                f"{self.seconds:.2f} s per batch, {self.tokens_per_second:,.0f} "
                f"{self._batches.unit}/s{left}"
            )

    def _left(self, run: Run) -> str:
        assert run.batches is not None
        rest = run.batches * run.epochs - (run.epoch * run.batches + run.batch)
        minutes, seconds = divmod(round(rest * (self.seconds or 0.0)), 60)
        return f", {minutes} min {seconds:02d} s to go"


def tell_perplexity(run: Run, record: Record) -> None:
    """Show the perplexity of an epoch's validation."""
    if "val_loss" in record:
        run.show.line(f"  validation: perplexity {perplexity(record['val_loss']):.4g}")


def perplexity(loss: float) -> float:
    """Return ``e^loss``; infinity where that is too large.

    >>> perplexity(0.0), perplexity(1e9)
    (1.0, inf)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


Say = Callable[[str], None]
"""Takes a line for the user."""

__all__ = ["Pace", "Say", "TokenDisplay", "perplexity", "tell_perplexity"]
