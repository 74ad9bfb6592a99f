"""Verdicts on measurements: do losses agree, what is the ratio, is the target met."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TARGETS = Path(__file__).with_name("targets.json")
MOVED = 0.02  # losses may differ by this part of how far the reference moved
CLOSE = 1e-4  # and by this part of the loss itself
MOVES = 2e-3  # the reference has to move by this part of the loss, or comparing says nothing


def disagreement(reference: Sequence[float], losses: Sequence[float]) -> str | None:
    """Return why the losses of the first steps are not those of the reference, if so."""
    if len(reference) != len(losses):
        return f"{len(losses)} losses instead of {len(reference)}"
    moved = max(reference) - min(reference)
    allowed = MOVED * moved + CLOSE * abs(reference[0])
    for i, (a, b) in enumerate(zip(losses, reference, strict=True)):
        if not math.isfinite(a) or abs(a - b) > allowed:
            return f"loss of step {i + 1} is {a:.5f} instead of {b:.5f}"
    return None


def moves(reference: Sequence[float]) -> bool:
    """Return whether the reference moves enough for a step without update to be noticed."""
    return max(reference) - min(reference) >= MOVES * abs(reference[0])


@dataclasses.dataclass(frozen=True)
class Spread:
    """A median with the smallest and the largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return it for some values."""
        return cls(statistics.median(values), min(values), max(values))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return our time over theirs, taken in each round: what disturbs a round disturbs both."""
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


def targets() -> dict[str, Any]:
    """Return the targets as they are written down."""
    return json.loads(TARGETS.read_text())


def target(workload: str, engine: str) -> float | None:
    """Return the largest allowed ratio, if there is one."""
    return targets()["time"].get(workload, {}).get(engine)


def verdict(measured: float, allowed: float | None) -> str:
    """Return what a ratio says about its target."""
    if allowed is None:
        return ""
    if measured <= allowed:
        return "met"
    return f"missed by {100 * (measured / allowed - 1):.0f}%"


def missed(measured: float, allowed: float | None) -> bool:
    """Return whether there is a target and it is not met."""
    return allowed is not None and measured > allowed
