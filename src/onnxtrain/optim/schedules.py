"""Learning-rate schedules as functions of the step number.

The learning rate is an input of the training step, so a schedule is plain Python and changes no
graph. Steps count from 1: step 1 has the rate that ``torch.optim.lr_scheduler`` has before its
first ``step()``. The names and arguments are those of torch, given in each docstring.

The file in order: the base class and the registry, one class per schedule, and functions that make
schedules from text, from JSON, or for another number of steps.

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
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, cast

from onnxtrain.errors import PrepareError
from onnxtrain.registry import Registry, parse_options, unknown_name_error


class Schedule:
    """Base of all schedules."""

    name: ClassVar[str]
    """The name in the registry."""

    def lr(self, base: float, step: int) -> float:
        """Return the learning rate of a step, from 1; ``base`` is the ``lr`` of the optimizer."""
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
        """Pass a validation metric to the schedule; only ``ReduceOnPlateau`` uses it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that changes during training; empty for most schedules."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
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


SCHEDULES: Registry[Schedule] = Registry("schedule", attribute="name")
"""Schedules by name; ``@SCHEDULES.named("cosine")`` adds one."""


def _plain(value: Any) -> Any:
    if isinstance(value, Schedule):
        return value.to_dict()
    if isinstance(value, tuple | list):
        return [_plain(v) for v in cast(Iterable[Any], value)]
    return value


def require(condition: bool, message: str) -> None:
    """Raise PrepareError with a message unless the condition holds."""
    if not condition:
        raise PrepareError(message)


@SCHEDULES.named("constant")
@dataclasses.dataclass(frozen=True)
class Constant(Schedule):
    """The base learning rate, times ``factor``."""

    factor: float = 1.0

    def at(self, base: float, t: int) -> float:
        """Return the same rate for all steps."""
        return base * self.factor


@SCHEDULES.named("linear")
@dataclasses.dataclass(frozen=True)
class Linear(Schedule):
    """A line from ``start * base`` to ``end * base``, then constant (LinearLR)."""

    total: int
    start: float = 1.0
    end: float = 0.0

    def __post_init__(self) -> None:
        require(self.total > 0, f"linear needs total above 0: {self.total}")

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
        require(self.total > 0, f"cosine needs total above 0: {self.total}")

    def at(self, base: float, t: int) -> float:
        """Follow the cosine."""
        return _cosine(base, self.eta_min, min(t, self.total) / self.total)


def _cosine(high: float, low: float, part: float) -> float:
    return low + (high - low) * (1.0 + math.cos(math.pi * part)) / 2.0


@SCHEDULES.named("cosine_restarts")
@dataclasses.dataclass(frozen=True)
class CosineRestarts(Schedule):
    """Cosines of ``period`` steps, each ``mult`` times as long as the one before.

    Equals CosineAnnealingWarmRestarts.
    """

    period: int
    mult: int = 1
    eta_min: float = 0.0

    def __post_init__(self) -> None:
        require(self.period > 0, f"cosine_restarts: period must be positive: {self.period}")
        require(self.mult >= 1, f"cosine_restarts: mult must be at least 1: {self.mult}")

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
        require(self.total > 0, f"polynomial needs total above 0: {self.total}")

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
        require(self.step_size > 0, f"step: step_size must be positive: {self.step_size}")

    def at(self, base: float, t: int) -> float:
        """Multiply by ``gamma`` once per ``step_size`` steps."""
        return base * self.gamma ** (t // self.step_size)


@SCHEDULES.named("multi_step")
@dataclasses.dataclass(frozen=True)
class MultiStep(Schedule):
    """Multiply by ``gamma`` after each of ``milestones`` steps (MultiStepLR)."""

    milestones: tuple[int, ...]
    gamma: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "milestones", tuple(self.milestones))
        require(
            list(self.milestones) == sorted(self.milestones),
            f"milestones must be in increasing order: {list(self.milestones)}",
        )

    def at(self, base: float, t: int) -> float:
        """Multiply by ``gamma`` once per milestone passed."""
        return base * self.gamma ** bisect.bisect_right(self.milestones, t)


@SCHEDULES.named("exponential")
@dataclasses.dataclass(frozen=True)
class Exponential(Schedule):
    """Multiply by ``gamma`` after every step (ExponentialLR)."""

    gamma: float

    def at(self, base: float, t: int) -> float:
        """Multiply by ``gamma`` once per step."""
        return base * self.gamma**t


@SCHEDULES.named("one_cycle")
@dataclasses.dataclass(frozen=True)
class OneCycle(Schedule):
    """Rise to the base learning rate and fall to almost 0 in ``total`` steps (OneCycleLR).

    The optimizer's ``lr`` is the peak, torch's ``max_lr``.
    """

    total: int
    pct_start: float = 0.3
    anneal_strategy: str = "cos"
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    three_phase: bool = False

    def __post_init__(self) -> None:
        require(self.total > 0, f"one_cycle needs total above 0: {self.total}")
        require(0.0 <= self.pct_start <= 1.0, f"pct_start must be in [0, 1]: {self.pct_start}")
        require(
            self.anneal_strategy in ("cos", "linear"),
            f"one_cycle: unknown anneal_strategy: {self.anneal_strategy!r}\nhint: cos or linear",
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


@SCHEDULES.named("cyclic")
@dataclasses.dataclass(frozen=True)
class Cyclic(Schedule):
    """Rise from ``base_lr`` to the optimizer's ``lr`` and fall back, again and again (CyclicLR).

    The optimizer's ``lr`` is the peak, torch's ``max_lr``. With ``mode="triangular2"`` each cycle
    is half as high as the one before; with ``"exp_range"`` the height is ``gamma`` to the power of
    the step.
    """

    base_lr: float
    step_size_up: int = 2000
    step_size_down: int | None = None
    mode: str = "triangular"
    gamma: float = 1.0

    def __post_init__(self) -> None:
        down = self.step_size_down
        require(
            self.step_size_up > 0 and (down is None or down > 0),
            f"cyclic: step sizes must be positive: {self.step_size_up}, {down}",
        )
        modes = ("triangular", "triangular2", "exp_range")
        require(
            self.mode in modes,
            f"cyclic: unknown mode: {self.mode!r}\nhint: {', '.join(modes)}",
        )

    def at(self, base: float, t: int) -> float:
        """Follow the current cycle."""
        down = self.step_size_up if self.step_size_down is None else self.step_size_down
        cycle, position = divmod(t, self.step_size_up + down)
        rising = position <= self.step_size_up
        part = position / self.step_size_up if rising else 1 - (position - self.step_size_up) / down
        height = {"triangular": 1.0, "triangular2": 0.5**cycle, "exp_range": self.gamma**t}
        return self.base_lr + (base - self.base_lr) * part * height[self.mode]


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
        require(self.steps >= 0, f"warmup: steps must not be negative: {self.steps}")

    def at(self, base: float, t: int) -> float:
        """Interpolate, then follow the other schedule."""
        if t < self.steps:
            return base * (self.start + (1.0 - self.start) * t / self.steps)
        return self.after.at(base, t - self.steps)

    def update(self, metric: float) -> None:
        """Pass the metric to the other schedule."""
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
    """A sequence of schedules; each starts at its milestone and counts steps from there.

    Equals SequentialLR.
    """

    schedules: tuple[Schedule, ...]
    milestones: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedules", tuple(self.schedules))
        object.__setattr__(self, "milestones", tuple(self.milestones))
        require(
            len(self.schedules) == len(self.milestones) + 1,
            f"{len(self.schedules)} schedules need {len(self.schedules) - 1} milestones, "
            f"got {len(self.milestones)}",
        )

    def at(self, base: float, t: int) -> float:
        """Follow the current schedule."""
        i = bisect.bisect_right(self.milestones, t)
        return self.schedules[i].at(base, t - (self.milestones[i - 1] if i else 0))

    def update(self, metric: float) -> None:
        """Pass the metric to all schedules."""
        for schedule in self.schedules:
            schedule.update(metric)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the schedules that have one, by position."""
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

    Equals ReduceLROnPlateau; call :meth:`update` once per validation.

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
        require(self.mode in ("min", "max"), f"mode must be 'min' or 'max': {self.mode!r}")
        require(
            self.threshold_mode in ("rel", "abs"),
            f"threshold_mode must be 'rel' or 'abs': {self.threshold_mode!r}",
        )
        require(0.0 <= self.factor < 1.0, f"factor must be in [0, 1): {self.factor}")

    def at(self, base: float, t: int) -> float:
        """Apply the reductions so far."""
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
        require(
            set(state) == set(_PLATEAU),
            f"reduce_on_plateau: expected a state with {', '.join(_PLATEAU)}, "
            f"got {', '.join(sorted(state)) or 'nothing'}",
        )
        for key in _PLATEAU:
            setattr(self, key, state[key])


_PLATEAU = ("best", "bad", "resting", "reductions")


class Function(Schedule):
    """The learning rate that a function of the step returns; steps count from 1.

    >>> resolve_schedule(lambda step: 0.01 / step).lr(0.1, 4)
    0.0025
    """

    name = "function"

    def __init__(self, function: Callable[[int], float]) -> None:
        self.function = function

    def to_dict(self) -> dict[str, Any]:
        """Return the name: a function has no JSON."""
        return {"name": self.name}

    def at(self, base: float, t: int) -> float:
        """Call the function."""
        return self.function(t + 1)


ScheduleLike = str | Schedule | Mapping[str, Any] | Callable[[int], float]
"""A name, an object, its dict, or a function from the step to the learning rate."""


def from_dict(data: Mapping[str, Any]) -> Schedule:
    """Return the schedule that :meth:`Schedule.to_dict` described."""
    settings = dict(data)
    name = settings.pop("name", None)
    if name == Function.name:
        raise PrepareError(
            "the run's schedule is a function, which a checkpoint cannot contain\n"
            "hint: pass it again: schedule=function"
        )
    if name not in SCHEDULES:
        raise unknown_name_error(str(name), SCHEDULES, "schedule")
    for key, value in settings.items():
        if isinstance(value, Mapping):
            settings[key] = from_dict(cast(Mapping[str, Any], value))
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            settings[key] = tuple(from_dict(v) for v in cast(list[Mapping[str, Any]], value))
    return SCHEDULES.make(name, settings)


def rescale_schedule(data: Mapping[str, Any], old: int | None, new: int | None) -> dict[str, Any]:
    """Return the dict of a schedule that ended at step ``old`` so that it ends at step ``new``.

    Warmup, and all schedules of a chain but the last, keep their lengths.

    >>> schedule = resolve_schedule("cosine", total=10, warmup=2)
    >>> rescale_schedule(schedule.to_dict(), 10, 30)["after"]["total"]
    28
    """
    settings = dict(data)
    if old is None or new is None:
        return settings
    name = settings.get("name")
    if name == "warmup":
        before = settings["steps"]
        settings["after"] = rescale_schedule(settings["after"], old - before, new - before)
    elif name == "chain":
        before = (0, *settings["milestones"])[-1]
        *first, last = settings["schedules"]
        settings["schedules"] = [*first, rescale_schedule(last, old - before, new - before)]
    elif settings.get("total") == old:
        settings["total"] = new
    return settings


def resolve_schedule(
    schedule: ScheduleLike | None,
    *,
    total: int | None = None,
    warmup: float | None = None,
    **options: Any,
) -> Schedule:
    """Return the schedule of a name, a name with options, a dict or an object.

    Args:
        schedule: ``"cosine"``, ``"cosine:warmup=10,total=100"``, the result of ``to_dict``, an
            object, or a function from the step to the learning rate. ``None`` is a constant rate.
        total: number of steps including warmup, for schedules that need it.
        warmup: number of warmup steps, or a fraction of ``total`` if it is below 1.
        options: more options of the schedule; options in the string win.
    """
    if isinstance(schedule, Mapping):
        schedule = from_dict(cast(Mapping[str, Any], schedule))
    if isinstance(schedule, Schedule):
        steps = _warmup_steps(warmup, total)
        return Warmup(steps, schedule) if steps else schedule
    if callable(schedule):
        require(
            not warmup,
            "warmup= has no effect on a function\nhint: let the function rise in its first steps",
        )
        return Function(schedule)
    text = "constant" if schedule is None else schedule
    name, given = parse_options(text)
    kind = SCHEDULES.find(name)
    if kind is None or kind in (Warmup, Chain):
        simple = [n for n, k in SCHEDULES.items() if k not in (Warmup, Chain)]
        raise unknown_name_error(name, simple, "schedule")
    total = given.pop("total", total)
    warmup = given.pop("warmup", warmup)
    warmup = _warmup_steps(warmup, total)
    takes_total = any(f.name == "total" for f in dataclasses.fields(kind))  # pyright: ignore[reportArgumentType]
    if takes_total and total is not None:
        require(
            not warmup or total > warmup,
            f"warmup ({warmup} steps) must be shorter than the schedule ({total} steps)",
        )
        options["total"] = total - warmup
    after_warmup = SCHEDULES.make(name, {**options, **given})
    return Warmup(warmup, after_warmup) if warmup else after_warmup


def _warmup_steps(warmup: float | None, total: int | None) -> int:
    warmup = 0 if warmup is None else warmup
    if 0 < warmup < 1:
        require(total is not None, f"warmup={warmup} is a fraction and needs total=")
        warmup = round(warmup * (total or 0))
    require(
        warmup >= 0 and int(warmup) == warmup, f"warmup must be a whole number of steps: {warmup}"
    )
    return int(warmup)
