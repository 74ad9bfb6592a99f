"""Learning rates as functions of the step number.

The learning rate is an input of the training step, so a schedule is plain Python and nothing
is rebuilt. Steps count from 1: step 1 uses what ``torch.optim.lr_scheduler`` gives before its first
``step()``.

>>> schedule = resolve_schedule("cosine", total=100, warmup=10)
>>> [round(schedule.lr(0.1, step), 4) for step in (1, 6, 11, 56, 101)]
[0.0, 0.05, 0.1, 0.05, 0.0]
>>> from_dict(schedule.to_dict()) == schedule
True
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, cast

from onnxtrain.named import parse_options, unknown
from onnxtrain.optim.schedules.formulas import SCHEDULES, Constant, Schedule, need


@SCHEDULES.named("warmup")
@dataclasses.dataclass(frozen=True)
class Warmup(Schedule):
    """A line from ``start * base`` to ``base`` in ``steps`` steps, then another schedule.

    With ``start=0``, the default, the first step has a learning rate of 0, as in transformers.
    """

    steps: int
    after: Schedule = dataclasses.field(default_factory=Constant)
    start: float = 0.0

    def __post_init__(self) -> None:
        need(self.steps >= 0, f"warmup needs a number of steps: {self.steps}")

    def at(self, base: float, t: int) -> float:
        """Interpolate, then ask the other schedule."""
        if t < self.steps:
            return base * (self.start + (1.0 - self.start) * t / self.steps)
        return self.after.at(base, t - self.steps)

    def update(self, metric: float) -> None:
        """Pass the metric on."""
        self.after.update(metric)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the other schedule."""
        return self.after.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the other schedule."""
        self.after.load_state_dict(state)


@SCHEDULES.named("chain")
@dataclasses.dataclass(frozen=True)
class Chain(Schedule):
    """One schedule after the other; each begins at its milestone, counting from its own start.

    The same as SequentialLR.
    """

    schedules: tuple[Schedule, ...]
    milestones: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedules", tuple(self.schedules))
        object.__setattr__(self, "milestones", tuple(self.milestones))
        need(
            len(self.schedules) == len(self.milestones) + 1,
            f"{len(self.schedules)} schedules need {len(self.schedules) - 1} milestones, "
            f"got {len(self.milestones)}",
        )

    def at(self, base: float, t: int) -> float:
        """Ask the current schedule."""
        i = bisect.bisect_right(self.milestones, t)
        return self.schedules[i].at(base, t - (self.milestones[i - 1] if i else 0))

    def update(self, metric: float) -> None:
        """Pass the metric on to all."""
        for schedule in self.schedules:
            schedule.update(metric)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of those that have one, by position."""
        states = {str(i): s.state_dict() for i, s in enumerate(self.schedules)}
        return {i: state for i, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the states."""
        for i, schedule in enumerate(self.schedules):
            schedule.load_state_dict(state.get(str(i), {}))


@SCHEDULES.named("reduce_on_plateau")
@dataclasses.dataclass
class ReduceOnPlateau(Schedule):
    """Multiply by ``factor`` when a metric has not improved for ``patience`` updates.

    The same as ReduceLROnPlateau: call :meth:`update` once per validation.

    >>> schedule = ReduceOnPlateau(factor=0.5, patience=1)
    >>> for loss in (1.0, 1.0, 1.0):
    ...     schedule.update(loss)
    >>> schedule.lr(0.1, step=300)
    0.05
    """

    mode: str = "min"
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    threshold_mode: str = "rel"
    cooldown: int = 0
    min_lr: float = 0.0
    eps: float = 1e-8
    best: float | None = dataclasses.field(default=None, init=False)
    bad: int = dataclasses.field(default=0, init=False)
    resting: int = dataclasses.field(default=0, init=False)
    reductions: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        need(self.mode in ("min", "max"), f"mode is min or max, not {self.mode!r}")
        need(
            self.threshold_mode in ("rel", "abs"),
            f"threshold_mode is rel or abs, not {self.threshold_mode!r}",
        )
        need(0.0 <= self.factor < 1.0, f"factor must be in [0, 1): {self.factor}")

    def at(self, base: float, t: int) -> float:
        """Apply the reductions made so far."""
        lr = base
        for _ in range(self.reductions):
            lower = max(lr * self.factor, self.min_lr)
            if lr - lower <= self.eps:
                break
            lr = lower
        return lr

    def update(self, metric: float) -> None:
        """Compare with the best metric so far."""
        metric = float(metric)
        if self._better(metric):
            self.best, self.bad = metric, 0
        else:
            self.bad += 1
        if self.resting > 0:
            self.resting, self.bad = self.resting - 1, 0
        if self.bad > self.patience:
            self.reductions += 1
            self.resting, self.bad = self.cooldown, 0

    def _better(self, metric: float) -> bool:
        if self.best is None:
            return not math.isnan(metric)
        sign = 1.0 if self.mode == "max" else -1.0
        if self.threshold_mode == "rel":
            bound = self.best * (1.0 + sign * self.threshold)
        else:
            bound = self.best + sign * self.threshold
        return metric > bound if self.mode == "max" else metric < bound

    def state_dict(self) -> dict[str, Any]:
        """Return the best metric and the counters."""
        return {key: getattr(self, key) for key in _PLATEAU}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the best metric and the counters."""
        need(
            set(state) == set(_PLATEAU),
            f"the state of reduce_on_plateau has {', '.join(_PLATEAU)}, "
            f"but got {', '.join(sorted(state)) or 'nothing'}",
        )
        for key in _PLATEAU:
            setattr(self, key, state[key])


_PLATEAU = ("best", "bad", "resting", "reductions")


def from_dict(data: Mapping[str, Any]) -> Schedule:
    """Return the schedule that :meth:`Schedule.to_dict` described."""
    settings = dict(data)
    name = settings.pop("name", None)
    if name not in SCHEDULES:
        raise unknown(str(name), SCHEDULES, "schedule")
    for key, value in settings.items():
        if isinstance(value, Mapping):
            settings[key] = from_dict(cast(Mapping[str, Any], value))
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            settings[key] = tuple(from_dict(v) for v in cast(list[Mapping[str, Any]], value))
    return SCHEDULES.make(name, settings)


def stretched(data: Mapping[str, Any], old: int | None, new: int | None) -> dict[str, Any]:
    """Return the form of ``to_dict`` where what ended with step ``old`` ends with ``new``.

    A warm-up and the schedules of a chain before the last one stay as they are.

    >>> schedule = resolve_schedule("cosine", total=10, warmup=2)
    >>> stretched(schedule.to_dict(), 10, 30)["after"]["total"]
    28
    """
    settings = dict(data)
    if old is None or new is None:
        return settings
    name = settings.get("name")
    if name == "warmup":
        before = settings["steps"]
        settings["after"] = stretched(settings["after"], old - before, new - before)
    elif name == "chain":
        before = (0, *settings["milestones"])[-1]
        *first, last = settings["schedules"]
        settings["schedules"] = [*first, stretched(last, old - before, new - before)]
    elif settings.get("total") == old:
        settings["total"] = new
    return settings


def resolve_schedule(
    schedule: str | Schedule | Mapping[str, Any] | None,
    *,
    total: int | None = None,
    warmup: float | None = None,
    **options: Any,
) -> Schedule:
    """Return the schedule that a name, a name with options, a dict or an object stands for.

    Args:
        schedule: ``"cosine"``, ``"cosine:warmup=10,total=100"``, the form of ``to_dict``, or an
            object, which is returned. ``None`` stands for a constant.
        total: how many steps there are, the warm-up included, for schedules that need it.
        warmup: a number of steps, or a part of ``total`` if it is below 1.
        options: further options of the schedule; those in the string come first.
    """
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, Mapping):
        return from_dict(schedule)
    text = "constant" if schedule is None else schedule
    name, given = parse_options(text)
    kind = SCHEDULES.find(name)
    if kind is None or kind in (Warmup, Chain):
        simple = [n for n, k in SCHEDULES.items() if k not in (Warmup, Chain)]
        raise unknown(name, simple, "schedule")
    total = given.pop("total", total)
    warmup = given.pop("warmup", warmup)
    warmup = 0 if warmup is None else warmup
    if 0 < warmup < 1:
        need(total is not None, f"a warm-up of {warmup} of all steps needs total")
        warmup = round(warmup * (total or 0))
    need(warmup >= 0 and int(warmup) == warmup, f"warmup is a number of steps: {warmup}")
    takes_total = any(f.name == "total" for f in dataclasses.fields(kind))  # pyright: ignore[reportArgumentType]
    if takes_total and total is not None:
        need(not warmup or total > warmup, f"a warm-up of {warmup} steps leaves nothing of {total}")
        options["total"] = total - int(warmup)
    after_warmup = SCHEDULES.make(name, {**options, **given})
    return Warmup(int(warmup), after_warmup) if warmup else after_warmup


__all__ = ["Chain", "ReduceOnPlateau", "Warmup", "from_dict", "resolve_schedule", "stretched"]
