"""What a resumed run takes over from the run that it goes on with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from onnxtrain.errors import CheckpointError, OnnxTrainError
from onnxtrain.optim.schedules import Schedule, from_dict, resolve_schedule, stretched
from onnxtrain.training.fit_options import FitOptions

_ORDER = ("batch_size", "shuffle", "drop_last")
"""Settings that decide which rows the batches of an epoch hold."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """The part of a checkpoint that belongs to the run."""

    epoch: int
    batch: int
    base_lr: float
    first_step: int
    best: Mapping[str, Any]
    means: Mapping[str, Any]
    callbacks: Mapping[str, Any]
    schedule: Mapping[str, Any]
    schedule_state: Mapping[str, Any]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of ``fit``, by name."""
    batches: int | None = None
    """Of an epoch."""
    total: int | None = None
    """Steps that the run was to make."""
    validated: bool = False

    @classmethod
    def read(cls, meta: Mapping[str, Any], label: str) -> Stored:
        """Return what the metadata of a checkpoint tells.

        Raises:
            CheckpointError: if it is not a checkpoint of a run.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        try:
            stored = cls(**{n: v for n, v in meta["run"].items() if n in names})
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{label}: not a checkpoint of a run: {error}") from error
        counts = (stored.epoch, stored.batch, stored.first_step)
        parts = (stored.best, stored.means, stored.callbacks, stored.schedule, stored.settings)
        if any(type(c) is not int or c < 0 for c in counts):
            raise CheckpointError(f"{label}: epoch, batch and first_step are {counts}")
        if not all(isinstance(p, Mapping) for p in parts):
            raise CheckpointError(f"{label}: not a checkpoint of a run: a part is no object")
        return stored

    def check_order(self, options: FitOptions, batches: int | None) -> None:
        """Refuse other batches in the middle of an epoch: rows would be left out or come twice."""
        if not self.batch:
            return
        changed = {
            n: (self.settings[n], getattr(options, n))
            for n in _ORDER
            if n in self.settings and self.settings[n] != getattr(options, n)
        }
        if not changed and self.batches is not None and batches != self.batches:
            changed["batches of an epoch"] = (self.batches, batches)
        if changed:
            listing = ", ".join(f"{n} was {a}, not {b}" for n, (a, b) in changed.items())
            raise OnnxTrainError(
                f"the run stopped in epoch {self.epoch + 1}, after {self.batch} of its batches: "
                f"{listing}\n"
                "hint: end this epoch with the batches that it began with, then change them"
            )

    def new_schedule(self, options: FitOptions, total: int | None) -> Schedule:
        """Return the schedule to go on with: the one given, or the run's own over all steps."""
        given = options.schedule is not None
        if given:
            schedule = resolve_schedule(options.schedule, total=total, warmup=options.warmup)
        elif options.warmup != self.settings.get("warmup", options.warmup):
            schedule = self._other_warmup(options.warmup, total)
        else:
            schedule = from_dict(stretched(self.schedule, self.total, total))
        if given and schedule.to_dict() != self.schedule:
            return schedule  # a state of another one says nothing to it
        schedule.load_state_dict(self.schedule_state)
        return schedule

    def _other_warmup(self, warmup: float | None, total: int | None) -> Schedule:
        inner, steps = self.schedule, 0
        if inner["name"] == "warmup":
            inner, steps = inner["after"], inner["steps"]
        first = resolve_schedule(None, total=total, warmup=warmup).to_dict()
        new_steps = first["steps"] if first["name"] == "warmup" else 0
        left = None if self.total is None else self.total - steps
        inner = stretched(inner, left, None if total is None else total - new_steps)
        return from_dict({**first, "after": inner} if new_steps else inner)

    def taken_over(self, given: FitOptions, seed: int, schedule: Schedule) -> str:
        """Return in words what was not given anew."""
        parts = [
            f"{n} {v}"
            for n, v in sorted(self.settings.items())
            if v is not None and getattr(given, n) is None and n != "warmup"
        ]
        if given.lr is None:
            parts.append(f"lr {self.base_lr:g}")
        if given.schedule is None:
            now = schedule.to_dict()
            stretch = f" over {_total(now)} steps" if _total(now) is not None else ""
            if _total(now) != _total(self.schedule):
                stretch += f" (before: {_total(self.schedule)})"
            parts.append(f"schedule {_inner(now)['name']}{stretch}")
        return ", ".join([*parts, f"seed {seed}"])


def refuse_rest(schedule: Schedule, base: float, done: int, total: int | None) -> None:
    """Refuse to go on where the learning rate is 0 from now to the end."""
    if total is None or total <= done:
        return
    if not any(schedule.lr(base, step) for step in range(done + 1, total + 1)):
        raise OnnxTrainError(
            f"the learning rate would be 0 from step {done + 1} to the last one, {total}\n"
            "hint: the schedule is over; give another one, such as schedule='cosine'"
        )


def _inner(schedule: Mapping[str, Any]) -> Mapping[str, Any]:
    return schedule["after"] if schedule["name"] == "warmup" else schedule


def _total(schedule: Mapping[str, Any]) -> int | None:
    total = _inner(schedule).get("total")
    return total if total is None or schedule["name"] != "warmup" else total + schedule["steps"]
