"""How a run shows where it is: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import time
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LINE_INTERVAL = 10.0  # seconds between lines
_SMOOTHING = 0.95  # how slowly the speed and the loss shown follow the last ones


class Display(Protocol):
    """What a run tells."""

    def start(self, epochs: int, total: int | None, done: int) -> None:
        """Begin; ``total`` steps if that is known, ``done`` of them already."""
        ...

    def step(self, epoch: int, loss: float, lr: float, samples: int) -> None:
        """Show a batch."""
        ...

    def line(self, text: str) -> None:
        """Show a message that stays."""
        ...

    def stop(self) -> None:
        """End."""
        ...


def display(
    progress: bool | str | Display, console: Console | None = None, *, unit: str = "samples"
) -> Display:
    """Return a display: ``True`` picks by the terminal, ``"bar"`` and ``"plain"`` are fixed.

    A display of the caller's own is taken as it is. Speed is in ``unit`` per second.
    """
    if not progress:
        return Silent()
    if not isinstance(progress, bool | str):
        return progress
    console = console or Console()
    bar = progress == "bar" or (progress is True and console.is_terminal)
    return Bar(console, unit) if bar else Lines(console, unit)


class Silent:
    """Shows nothing."""

    def start(self, epochs: int, total: int | None, done: int) -> None:
        """Nothing."""

    def step(self, epoch: int, loss: float, lr: float, samples: int) -> None:
        """Nothing."""

    def line(self, text: str) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""


class _Throughput:
    """Smoothed loss and speed."""

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
    """A progress bar: epoch, steps, loss, learning rate, samples per second, time left."""

    def __init__(self, console: Console, unit: str = "samples") -> None:
        self._console, self._pace, self._unit = console, _Throughput(), unit
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
            refresh_per_second=8,
        )
        self._task: Any = None
        self._epochs = 0

    def start(self, epochs: int, total: int | None, done: int) -> None:
        """Begin."""
        self._epochs = epochs
        self._task = self._progress.add_task(
            "training", total=total, completed=done, numbers="", start=True
        )
        self._progress.start()

    def step(self, epoch: int, loss: float, lr: float, samples: int) -> None:
        """Advance by one."""
        self._pace.add(loss, samples)
        numbers = f"loss {self._pace.loss:.4f}  lr {lr:.2e}  {self._pace.speed:,.0f} {self._unit}/s"
        self._progress.update(
            self._task, advance=1, description=f"epoch {epoch}/{self._epochs}", numbers=numbers
        )

    def line(self, text: str) -> None:
        """Print above the bar."""
        self._progress.console.print(text, highlight=False, markup=False)

    def stop(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()


class Lines:
    """A line now and then, for logs."""

    def __init__(self, console: Console, unit: str = "samples") -> None:
        self._console, self._pace, self._unit = console, _Throughput(), unit
        self._epochs, self._total, self._done = 0, None, 0
        self._started = self._last_printed = time.perf_counter()
        self._first = 0

    def start(self, epochs: int, total: int | None, done: int) -> None:
        """Begin."""
        self._epochs, self._total, self._done, self._first = epochs, total, done, done
        self._started = self._last_printed = time.perf_counter()

    def step(self, epoch: int, loss: float, lr: float, samples: int) -> None:
        """Print if the last line is long ago."""
        self._pace.add(loss, samples)
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
            f"epoch {epoch}/{self._epochs}  {where}  loss {self._pace.loss:.4f}  lr {lr:.2e}"
            f"  {self._pace.speed:,.0f} {self._unit}/s{left}"
        )

    def line(self, text: str) -> None:
        """Print."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Nothing is left to do."""


def _format_seconds(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
