"""Progress displays of a run: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import time
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LINE_INTERVAL = 10.0  # seconds between lines
_BAR_AND_TIME = 8 + 7 + 4  # columns of a short bar, of the time left, and of the gaps
_SMOOTHING = 0.95  # decay of the moving averages of speed and loss


class Display(Protocol):
    """The interface of a progress display."""

    def start(self, epochs: int, total: int | None, done: int) -> None:
        """Start the display; ``total`` steps if known, of which ``done`` are done."""
        ...

    def step(self, epoch: int, loss: float, lr: float, samples: int) -> None:
        """Show a batch."""
        ...

    def line(self, text: str) -> None:
        """Print a message."""
        ...

    def stop(self) -> None:
        """Close the display."""
        ...


def display(
    progress: bool | str | Display, console: Console | None = None, *, unit: str = "samples"
) -> Display:
    """Return a display.

    Args:
        progress: ``True`` for a bar in a terminal and lines elsewhere, ``"bar"``, ``"plain"``,
            ``False``, or a display object, which is returned as it is.
        console: where to print.
        unit: what the speed counts.
    """
    if not progress:
        return Silent()
    if not isinstance(progress, bool | str):
        return progress
    console = console or Console()
    bar = progress == "bar" or (progress is True and console.is_terminal)
    return Bar(console, unit) if bar else Lines(console, unit)


class Silent:
    """Displays nothing."""

    def start(self, epochs: int, total: int | None, done: int) -> None:
        """Do nothing."""

    def step(self, epoch: int, loss: float, lr: float, samples: int) -> None:
        """Do nothing."""

    def line(self, text: str) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


class _Throughput:
    """Moving averages of loss and speed."""

    def __init__(self) -> None:
        self.loss: float | None = None
        self._last = time.perf_counter()
        self._samples = self._seconds = 0.0

    def add(self, loss: float, samples: int) -> None:
        now = time.perf_counter()
        self._samples = self._samples * _SMOOTHING + samples
        self._seconds = self._seconds * _SMOOTHING + (now - self._last)
        self._last = now
        self.loss = loss if self.loss is None else self.loss * _SMOOTHING + loss * (1 - _SMOOTHING)

    @property
    def speed(self) -> float:
        return self._samples / max(self._seconds, 1e-9)


class Bar:
    """A progress bar: epoch, steps, loss, learning rate, samples per second, time left.

    In a narrow terminal it leaves out speed and learning rate, so that nothing is cut.
    """

    def __init__(self, console: Console, unit: str = "samples") -> None:
        self._console, self._throughput, self._unit = console, _Throughput(), unit
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
            refresh_per_second=8,
        )
        self._task: Any = None
        self._epochs, self._total = 0, 0

    def start(self, epochs: int, total: int | None, done: int) -> None:
        """Start the display."""
        self._epochs, self._total = epochs, total or 0
        self._task = self._progress.add_task(
            "training", total=total, completed=done, metrics="", start=True
        )
        self._progress.start()

    def step(self, epoch: int, loss: float, lr: float, samples: int) -> None:
        """Advance by one step."""
        self._throughput.add(loss, samples)
        description = f"epoch {epoch}/{self._epochs}"
        self._progress.update(
            self._task, advance=1, description=description, metrics=self._metrics(description, lr)
        )

    def _metrics(self, description: str, lr: float) -> str:
        """Return the values that fit beside the other columns."""
        loss = f"loss {self._throughput.loss:.4f}"
        speed = f"{self._throughput.speed:,.0f} {self._unit}/s"
        counts = 2 * max(len(str(self._total)), 6) + 1
        left = self._console.width - len(description) - counts - _BAR_AND_TIME
        for parts in ((loss, f"lr {lr:.2e}", speed), (loss, speed), (loss,)):
            text = "  ".join(parts)
            if len(text) <= left:
                return text
        return ""

    def line(self, text: str) -> None:
        """Print above the bar, folded between values if it is longer than the terminal is wide."""
        self._progress.console.print(
            _fold(text, self._console.width), highlight=False, markup=False
        )

    def stop(self) -> None:
        """Stop updating the bar."""
        self._progress.stop()


def _fold(text: str, width: int) -> str:
    """Break a line between values, which two spaces separate, so that no value is broken.

    >>> print(_fold("epoch 1/3  loss 0.5  val_loss 0.6", 24))
    epoch 1/3  loss 0.5
      val_loss 0.6
    """
    lines = [""]
    for part in text.split("  "):
        if lines[-1] and len(lines[-1]) + 2 + len(part) > width:
            lines.append(f"  {part}")
        else:
            lines[-1] += f"  {part}" if lines[-1] else part
    return "\n".join(lines)


class Lines:
    """A line every ten seconds, for logs."""

    def __init__(self, console: Console, unit: str = "samples") -> None:
        self._console, self._throughput, self._unit = console, _Throughput(), unit
        self._epochs, self._total, self._done = 0, None, 0
        self._started = self._last_printed = time.perf_counter()
        self._first = 0

    def start(self, epochs: int, total: int | None, done: int) -> None:
        """Start the display."""
        self._epochs, self._total, self._done, self._first = epochs, total, done, done
        self._started = self._last_printed = time.perf_counter()

    def step(self, epoch: int, loss: float, lr: float, samples: int) -> None:
        """Print a line if the last one is ten seconds old."""
        self._throughput.add(loss, samples)
        self._done += 1
        now = time.perf_counter()
        if now - self._last_printed < _LINE_INTERVAL:
            return
        self._last_printed = now
        where = f"step {self._done}" + (f"/{self._total}" if self._total else "")
        left = ""
        if self._total:
            each = (now - self._started) / (self._done - self._first)
            left = f"  eta {_format_seconds(each * (self._total - self._done))}"
        self.line(
            f"epoch {epoch}/{self._epochs}  {where}  loss {self._throughput.loss:.4f}  lr {lr:.2e}"
            f"  {self._throughput.speed:,.0f} {self._unit}/s{left}"
        )

    def line(self, text: str) -> None:
        """Print a message."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Do nothing."""


def _format_seconds(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
