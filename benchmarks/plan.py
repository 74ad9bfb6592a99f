"""Which cells to measure, in which order, and the time budget of each."""

from __future__ import annotations

import dataclasses
import time

from benchmarks import verdicts
from benchmarks.peers import PEERS, Peer
from benchmarks.workloads import WORKLOADS

OPTIMIZERS = ("sgd", "adamw")
COMPILE = "compile"
LEAST = 3.0  # seconds of timing that a cell gets in any case


@dataclasses.dataclass(frozen=True)
class Task:
    """A cell to measure, with the engines that take part."""

    workload: str
    optimizer: str
    threads: int
    peers: tuple[str, ...]


def tasks(
    workloads: list[str], optimizers: list[str], threads: list[int], peers: list[str]
) -> list[Task]:
    """Return the cells; where ``torch.compile`` has no target it is shown with SGD only."""
    planned = []
    for workload in workloads:
        bound = verdicts.target(workload, COMPILE) is not None
        for optimizer in optimizers:
            taken = tuple(p for p in peers if p != COMPILE or bound or optimizer == "sgd")
            planned += [Task(workload, optimizer, n, taken) for n in threads]
    return planned


def chosen(names: list[str] | None, known: list[str], what: str) -> list[str]:
    """Return what was asked for, all if nothing was.

    Raises:
        SystemExit: if the name is unknown.
    """
    unknown = [n for n in names or () if n not in known]
    if unknown:
        raise SystemExit(f"no such {what}: {', '.join(unknown)}; there are {', '.join(known)}")
    return list(names or known)


def engines(task: Task) -> list[Peer]:
    """Return the engines of a cell."""
    return [PEERS[n] for n in task.peers]


def all_workloads() -> list[str]:
    """Return the names of the table's rows."""
    return list(WORKLOADS)


class Clock:
    """Shares the time that is left among the cells that are left."""

    def __init__(self, budget: float, compiling: float, cells: int) -> None:
        self.end = time.monotonic() + budget
        self.compiling = compiling
        self.cells = cells
        self.overhead: list[float] = []

    def share(self) -> float:
        """Return the seconds of timing of the next cell."""
        left = self.end - time.monotonic()
        overhead = sum(self.overhead) / len(self.overhead) if self.overhead else 0.0
        return max(LEAST, left / max(1, self.cells) - overhead)

    def done(self, spent: float, timing: float, compiling: float) -> None:
        """Note what a cell took: in all, for timing, and for getting compiled."""
        self.cells -= 1
        self.compiling -= compiling
        self.overhead.append(max(0.0, spent - timing))
