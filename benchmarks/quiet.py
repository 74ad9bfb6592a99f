"""Measure the CPU load of other processes: pages are written only from runs on an idle machine.

The load average includes the benchmark's own work of the last minutes. So samples are taken while
the benchmark is idle: before a run, between its cells and after it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 2.0  # of a sample
PATIENCE = 60.0  # seconds to wait for what was started before to end
MOST = 0.1  # part of all processor time that others may take, on average over the samples


def _ticks(stat: Path = Path("/proc/stat")) -> tuple[int, int]:
    """Return busy ticks and all ticks of all cores; what other virtual machines take is busy."""
    user, nice, system, idle, waiting, *rest = map(int, stat.read_text().split("\n")[0].split()[1:])
    busy = user + nice + system + sum(rest[:3])
    return busy, busy + idle + waiting


def others(seconds: float = SECONDS) -> float:
    """Return the part of the machine's processor time that is used while we sleep."""
    if not Path("/proc/stat").exists():
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    busy, every = _ticks()
    time.sleep(seconds)
    busy_after, every_after = _ticks()
    return round((busy_after - busy) / max(1, every_after - every), 3)


def begin(
    *, strict: bool, sample: Callable[[], float] = others, patience: float = PATIENCE
) -> list[float]:
    """Return a first sample, the first quiet one within the patience.

    Raises:
        SystemExit: if there is none, and the run is to be written into a page.
    """
    end = time.monotonic() + patience
    part = sample()
    while part > MOST and time.monotonic() < end:
        part = sample()
    if strict and part > MOST:
        raise SystemExit(
            f"other work takes {part:.0%} of the machine: nothing is measured for a page. "
            "End it, or leave out --write"
        )
    return [part]


def busy(machine: dict[str, Any]) -> bool:
    """Return whether other processes loaded the machine during a run."""
    return statistics.mean(machine["others"]) > MOST


def refuse_busy(machine: dict[str, Any]) -> None:
    """Refuse to write a page from a run on a loaded machine.

    Raises:
        SystemExit: if the machine was loaded.
    """
    if busy(machine):
        part = statistics.mean(machine["others"])
        raise SystemExit(f"other processes took {part:.0%} of the machine: the page is not changed")


def summary(machine: dict[str, Any]) -> str:
    """Return a sentence on the CPU load of other processes."""
    parts = machine["others"]
    average, most = statistics.mean(parts), max(parts)
    return (
        f"other processes took {average:.1%} of the machine, "
        f"at most {most:.1%} ({len(parts)} samples)"
    )
