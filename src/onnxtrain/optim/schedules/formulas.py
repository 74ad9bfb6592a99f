"""Schedules that are a formula of the step number."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, cast

from onnxtrain.errors import PrepareError
from onnxtrain.named import Named


class Schedule:
    """Base of all schedules."""

    name: ClassVar[str]
    """What it is registered as."""

    def lr(self, base: float, step: int) -> float:
        """Return the learning rate of a step, counted from 1, for an optimizer's own ``base``."""
        if step < 1:
            raise PrepareError(f"steps count from 1: {step}")
        return self.at(base, step - 1)

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step relative to the base."""
        return self.lr(1.0, step)

    def at(self, base: float, t: int) -> float:
        """Return the learning rate after ``t`` steps."""
        raise NotImplementedError

    def update(self, metric: float) -> None:
        """Tell the schedule how a validation went; only some look at it."""

    def state_dict(self) -> dict[str, Any]:
        """Return what changes while training, to be saved; most schedules have nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        if state:
            raise PrepareError(f"{self.name} has no state, but got {', '.join(sorted(state))}")

    def to_dict(self) -> dict[str, Any]:
        """Return name and settings, ready for JSON."""
        settings = {
            f.name: _plain(getattr(self, f.name))
            for f in dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
            if f.init
        }
        return {"name": self.name, **settings}


SCHEDULES: Named[Schedule] = Named("schedule", attribute="name")
"""Schedules by name; ``@SCHEDULES.named("cosine")`` adds one."""


def _plain(value: Any) -> Any:
    if isinstance(value, Schedule):
        return value.to_dict()
    if isinstance(value, tuple | list):
        return [_plain(v) for v in cast(Iterable[Any], value)]
    return value


def need(condition: bool, message: str) -> None:
    """Refuse a setting."""
    if not condition:
        raise PrepareError(message)


@SCHEDULES.named("constant")
@dataclasses.dataclass(frozen=True)
class Constant(Schedule):
    """The base learning rate, times ``factor``."""

    factor: float = 1.0

    def at(self, base: float, t: int) -> float:
        """Always the same."""
        return base * self.factor


@SCHEDULES.named("linear")
@dataclasses.dataclass(frozen=True)
class Linear(Schedule):
    """A line from ``start * base`` to ``end * base``, then constant (LinearLR)."""

    total: int
    start: float = 1.0
    end: float = 0.0

    def __post_init__(self) -> None:
        need(self.total > 0, f"linear needs total above 0: {self.total}")

    def at(self, base: float, t: int) -> float:
        """Interpolate."""
        return base * (self.start + (self.end - self.start) * min(t, self.total) / self.total)


@SCHEDULES.named("cosine")
@dataclasses.dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from ``base`` down to ``eta_min`` (CosineAnnealingLR), then constant."""

    total: int
    eta_min: float = 0.0

    def __post_init__(self) -> None:
        need(self.total > 0, f"cosine needs total above 0: {self.total}")

    def at(self, base: float, t: int) -> float:
        """Follow the cosine."""
        return _cosine(base, self.eta_min, min(t, self.total) / self.total)


def _cosine(high: float, low: float, part: float) -> float:
    return low + (high - low) * (1.0 + math.cos(math.pi * part)) / 2.0


@SCHEDULES.named("cosine_restarts")
@dataclasses.dataclass(frozen=True)
class CosineRestarts(Schedule):
    """Cosines of ``period`` steps, each ``mult`` times as long as the one before.

    The same as CosineAnnealingWarmRestarts.
    """

    period: int
    mult: int = 1
    eta_min: float = 0.0

    def __post_init__(self) -> None:
        need(self.period > 0, f"cosine_restarts needs a period above 0: {self.period}")
        need(self.mult >= 1, f"cosine_restarts needs mult of at least 1: {self.mult}")

    def at(self, base: float, t: int) -> float:
        """Follow the cosine of the current period."""
        period = self.period
        if self.mult == 1:
            t %= period
        while t >= period:
            t, period = t - period, period * self.mult
        return _cosine(base, self.eta_min, t / period)


@SCHEDULES.named("polynomial")
@dataclasses.dataclass(frozen=True)
class Polynomial(Schedule):
    """``(base - end) (1 - t / total)^power + end`` (PolynomialLR), then constant."""

    total: int
    power: float = 1.0
    end: float = 0.0

    def __post_init__(self) -> None:
        need(self.total > 0, f"polynomial needs total above 0: {self.total}")

    def at(self, base: float, t: int) -> float:
        """Follow the polynomial."""
        left = 1.0 - min(t, self.total) / self.total
        return (base - self.end) * left**self.power + self.end


@SCHEDULES.named("step")
@dataclasses.dataclass(frozen=True)
class Step(Schedule):
    """Multiply by ``gamma`` every ``step_size`` steps (StepLR)."""

    step_size: int
    gamma: float = 0.1

    def __post_init__(self) -> None:
        need(self.step_size > 0, f"step needs step_size above 0: {self.step_size}")

    def at(self, base: float, t: int) -> float:
        """Count the drops."""
        return base * self.gamma ** (t // self.step_size)


@SCHEDULES.named("multi_step")
@dataclasses.dataclass(frozen=True)
class MultiStep(Schedule):
    """Multiply by ``gamma`` after each of ``milestones`` steps (MultiStepLR)."""

    milestones: tuple[int, ...]
    gamma: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "milestones", tuple(self.milestones))
        need(
            list(self.milestones) == sorted(self.milestones),
            f"milestones must be in increasing order: {list(self.milestones)}",
        )

    def at(self, base: float, t: int) -> float:
        """Count the milestones passed."""
        return base * self.gamma ** bisect.bisect_right(self.milestones, t)


@SCHEDULES.named("exponential")
@dataclasses.dataclass(frozen=True)
class Exponential(Schedule):
    """Multiply by ``gamma`` after every step (ExponentialLR)."""

    gamma: float

    def at(self, base: float, t: int) -> float:
        """Return the power."""
        return base * self.gamma**t


@SCHEDULES.named("one_cycle")
@dataclasses.dataclass(frozen=True)
class OneCycle(Schedule):
    """Up to the base learning rate and down to nearly nothing, in ``total`` steps (OneCycleLR).

    The optimizer's ``lr`` is the peak, torch's ``max_lr``.
    """

    total: int
    pct_start: float = 0.3
    anneal_strategy: str = "cos"
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    three_phase: bool = False

    def __post_init__(self) -> None:
        need(self.total > 0, f"one_cycle needs total above 0: {self.total}")
        need(0.0 <= self.pct_start <= 1.0, f"pct_start must be in [0, 1]: {self.pct_start}")
        need(
            self.anneal_strategy in ("cos", "linear"),
            f"one_cycle has no anneal_strategy {self.anneal_strategy!r}\nhint: cos or linear",
        )

    def at(self, base: float, t: int) -> float:
        """Interpolate within the current phase."""
        first = base / self.div_factor
        last = first / self.final_div_factor
        up = self.pct_start * self.total - 1.0
        ends = [(up, first, base)]
        if self.three_phase:
            ends.append((2.0 * self.pct_start * self.total - 2.0, base, first))
            ends.append((self.total - 1.0, first, last))
        else:
            ends.append((self.total - 1.0, base, last))
        begin = 0.0
        for end, low, high in ends:
            if t <= end:
                return self._between(low, high, (t - begin) / (end - begin) if end > begin else 1.0)
            begin = end
        return last

    def _between(self, start: float, end: float, part: float) -> float:
        if self.anneal_strategy == "linear":
            return start + (end - start) * part
        return _cosine(start, end, part)
