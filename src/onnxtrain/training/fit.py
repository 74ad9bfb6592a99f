"""Training for some epochs.

The options of :meth:`onnxtrain.Trainer.fit`, declared once for API and command line.

The course of a training run: epochs, validation, schedules, checkpoints, resuming.

What a resumed run takes over from the run that it goes on with.

The checkpoints of a run: the last few, and the best.

A directory serves one run at a time.

The lock is the operating system's: it ends with the process, so that a killed run blocks nobody.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain.artifacts.directory import Row, SummaryRepr, format_record, svg_curve
from onnxtrain.errors import (
    BusyError,
    CheckpointError,
    LabelError,
    NonFiniteError,
    OnnxTrainError,
    ShapeError,
)
from onnxtrain.graph.io.writer import as_save_error
from onnxtrain.optim.schedules import Schedule, from_dict, rescale_schedule, resolve_schedule
from onnxtrain.options import Flag, option
from onnxtrain.runtime.feeds import feed
from onnxtrain.training.callbacks import Best, Callback, EarlyStopping, Record
from onnxtrain.training.checks import (
    LoadedCheckpoint,
    check_lr,
    explain_nonfinite_loss,
    explain_nonfinite_update,
    is_finite,
    nonfinite_weights,
)
from onnxtrain.training.data import Batch, Source, as_source, explain_label_error, length
from onnxtrain.training.metrics import Mean, MetricsWriter, evaluate
from onnxtrain.training.progress import Display, display
from onnxtrain.training.results import StepResult

if TYPE_CHECKING:
    from onnxtrain.training.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitOptions:
    """How a run goes; the docstring of ``fit`` tells what each option means."""

    epochs: int | None = option(None, Flag(int, "How often to go through the data; 1."))
    batch_size: int | None = option(None, Flag(int, "32, or what the model is fixed to."))
    lr: float | None = option(None, Flag(float, "Learning rate; else that of the build."))
    validation: Any = option(None, Flag(Path, "Data to validate on, as --data."))
    schedule: str | Schedule | Mapping[str, Any] | None = option(
        None, Flag(str, "cosine, one_cycle, step:step_size=10 ...")
    )
    warmup: float | None = option(None, Flag(float, "Steps, or a part of all steps if below 1."))
    callbacks: Sequence[Callback | Callable[[Any, Record], None]] = option(())
    progress: bool | str | Display = option(True)
    directory: Path | None = option(
        None,
        Flag(Path, "Where records and checkpoints go; DIRECTORY/run by default.", name="out"),
    )
    resume: bool = option(
        False, Flag(bool, "Go on from the last checkpoint; what is not given stays as it was.")
    )
    checkpoint_every: int | None = option(None, Flag(int, "Steps between checkpoints."))
    keep: int | None = option(None, Flag(int, "How many of the last checkpoints stay; 3."))
    monitor: str | None = option(None, Flag(str, "By what the best epoch is chosen."))
    patience: int | None = option(None, Flag(int, "End after so many epochs without a better one."))
    shuffle: bool | None = option(None)
    drop_last: bool | None = option(None)
    debug_nan: bool = option(False, Flag(bool, "Find the node that makes the first NaN."))
    tensorboard: bool | None = option(None)

    def __post_init__(self) -> None:
        if self.directory is not None:
            object.__setattr__(self, "directory", Path(self.directory))
        if self.directory is None and (self.resume or self.checkpoint_every):
            raise OnnxTrainError("checkpoints need a place\nhint: fit(..., directory='runs/first')")
        for name in ("epochs", "batch_size", "keep", "checkpoint_every", "patience"):
            value = getattr(self, name)
            if value is not None and (not _is_integer(value) or value < 1):
                raise OnnxTrainError(f"{name} must be a whole number, at least 1: {value!r}")
        if self.lr is not None:
            check_lr(self.lr, "lr")

    def completed(self, stored: Mapping[str, Any], fixed_batch: int | None) -> FitOptions:
        """Return the options with those left out as a stored run has them, else by default.

        Args:
            stored: what :meth:`settings` gave.
            fixed_batch: the batch size that the model is fixed to, if it is.
        """
        usual = {**_DEFAULTS, "batch_size": fixed_batch or 32}
        left_out = {n: usual.get(n) for n in _RESUMED_OPTIONS if getattr(self, n) is None}
        left_out |= {n: v for n, v in stored.items() if n in left_out and v is not None}
        return dataclasses.replace(self, **left_out)

    def settings(self) -> dict[str, Any]:
        """Return the options that a resumed run keeps, by name, ready for JSON."""
        values = {n: getattr(self, n) for n in _RESUMED_OPTIONS}
        return {n: v.item() if isinstance(v, np.generic) else v for n, v in values.items()}


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


_RESUMED_OPTIONS = (
    *("batch_size", "checkpoint_every", "drop_last", "epochs", "keep", "monitor", "patience"),
    *("shuffle", "warmup"),
)
_DEFAULTS = {"drop_last": False, "epochs": 1, "keep": 3, "shuffle": True, "warmup": 0}


_ORDER_OPTIONS = ("batch_size", "shuffle", "drop_last")
"""Settings that decide which rows the batches of an epoch hold."""


@dataclasses.dataclass(frozen=True)
class ResumeState:
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
    def read(cls, meta: Mapping[str, Any], label: str) -> ResumeState:
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
            for n in _ORDER_OPTIONS
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
            schedule = self._warmup_differs(options.warmup, total)
        else:
            schedule = from_dict(rescale_schedule(self.schedule, self.total, total))
        if given and schedule.to_dict() != self.schedule:
            return schedule  # a state of another one says nothing to it
        schedule.load_state_dict(self.schedule_state)
        return schedule

    def _warmup_differs(self, warmup: float | None, total: int | None) -> Schedule:
        inner, steps = self.schedule, 0
        if inner["name"] == "warmup":
            inner, steps = inner["after"], inner["steps"]
        first = resolve_schedule(None, total=total, warmup=warmup).to_dict()
        new_steps = first["steps"] if first["name"] == "warmup" else 0
        left = None if self.total is None else self.total - steps
        inner = rescale_schedule(inner, left, None if total is None else total - new_steps)
        return from_dict({**first, "after": inner} if new_steps else inner)

    def overridden_options(self, given: FitOptions, seed: int, schedule: Schedule) -> str:
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
            stretch = (
                f" over {_schedule_total(now)} steps" if _schedule_total(now) is not None else ""
            )
            if _schedule_total(now) != _schedule_total(self.schedule):
                stretch += f" (before: {_schedule_total(self.schedule)})"
            parts.append(f"schedule {_without_warmup(now)['name']}{stretch}")
        return ", ".join([*parts, f"seed {seed}"])


def check_remaining_schedule(schedule: Schedule, base: float, done: int, total: int | None) -> None:
    """Refuse to go on where the learning rate is 0 from now to the end."""
    if total is None or total <= done:
        return
    if not any(schedule.lr(base, step) for step in range(done + 1, total + 1)):
        raise OnnxTrainError(
            f"the learning rate would be 0 from step {done + 1} to the last one, {total}\n"
            "hint: the schedule is over; give another one, such as schedule='cosine'"
        )


def _without_warmup(schedule: Mapping[str, Any]) -> Mapping[str, Any]:
    return schedule["after"] if schedule["name"] == "warmup" else schedule


def _schedule_total(schedule: Mapping[str, Any]) -> int | None:
    total = _without_warmup(schedule).get("total")
    return total if total is None or schedule["name"] != "warmup" else total + schedule["steps"]


_CHECKPOINT_NAME = re.compile(r"step-(\d{9,})\.safetensors")
BEST = "best.safetensors"


class CheckpointRotation:
    """A directory of checkpoints, named after their step.

    Args:
        folder: made when the first checkpoint is written.
        keep: how many of the last ones stay.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        if keep < 1:
            raise OnnxTrainError(f"keep must be at least 1: {keep}")
        self.folder, self.keep = folder, keep

    def all(self) -> list[Path]:
        """Return the checkpoints, oldest first."""
        try:
            paths = list(self.folder.iterdir()) if self.folder.is_dir() else []
        except OSError as error:
            raise CheckpointError(f"{self.folder}: cannot be read: {error.strerror}") from error
        checkpoints = [(m, p) for p in paths if (m := _CHECKPOINT_NAME.fullmatch(p.name))]
        return [p for _, p in sorted(checkpoints, key=lambda item: int(item[0][1]))]

    def newest(self) -> Path | None:
        """Return the last checkpoint."""
        return next(reversed(self.all()), None)

    def save(self, trainer: Trainer, extra: dict[str, Any]) -> Path:
        """Write a checkpoint, then remove what is too old."""
        self._make_folder()
        path = self.folder / f"step-{trainer.global_step:09d}.safetensors"
        trainer.save(path, extra)
        logger.info("wrote checkpoint %s", path)
        self._prune()
        return path

    def save_best(self, trainer: Trainer, extra: dict[str, Any]) -> Path:
        """Write the best checkpoint over the last best one."""
        self._make_folder()
        trainer.save(self.folder / BEST, extra)
        return self.folder / BEST

    def _make_folder(self) -> None:
        with as_save_error(str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)

    def sweep(self) -> None:
        """Remove what a killed run was writing, and what it had no time to remove."""
        if self.folder.is_dir():
            for path in self.folder.glob(".*.tmp"):
                with suppress(OSError):
                    path.unlink()
        self._prune()

    def _prune(self) -> None:
        for old in self.all()[: -self.keep]:
            with suppress(OSError):
                old.unlink()
                logger.info("removed checkpoint %s: the last %d are kept", old, self.keep)


CHECKPOINTS = "checkpoints"


@dataclasses.dataclass(repr=False)
class History(SummaryRepr):
    """What a run was."""

    steps: list[Record]
    """One record per batch: step, epoch, lr, loss, metrics."""
    epochs: list[Record]
    """One record per epoch: means, and ``val_...`` where there was a validation."""
    stopped: str
    """Why the run ended before its last epoch; empty if it did not."""
    best: Record | None
    """The record of the best epoch."""

    @property
    def losses(self) -> list[float]:
        """The loss of every batch."""
        return [r["loss"] for r in self.steps]

    def summary(self) -> tuple[str, list[Row]]:
        """Return what a shell shows: first and last loss, the last and the best epoch."""
        rows = [("steps", str(len(self.steps))), ("epochs", str(len(self.epochs)))]
        if self.steps:
            rows.append(("loss", f"{self.losses[0]:.5g} at first, {self.losses[-1]:.5g} at last"))
        for name, record in (("last epoch", self.epochs[-1:]), ("best epoch", [self.best])):
            if record and record[0]:
                rows.append((name, format_record(record[0])))
        return "History", [*rows, *([("stopped", self.stopped)] if self.stopped else [])]

    def _repr_html_(self) -> str:
        return super()._repr_html_() + svg_curve(self.losses, "loss")


class Run:
    """A training run, as callbacks see it."""

    def __init__(self, trainer: Trainer, data: Any, options: FitOptions) -> None:
        self.trainer = trainer
        path = self._last_checkpoint(options)
        # Nothing changes until all that a checkpoint says is known to fit.
        loaded = None if path is None else trainer.read(path)
        stored = None if loaded is None else ResumeState.read(loaded.meta, str(path))
        self.options = options.completed(stored.settings if stored else {}, trainer.fixed_batch)
        self.epoch = 0
        """The epoch that is going on, from 0."""
        self.batch = 0
        """How many batches of it are done."""
        self.stop = ""
        """Set to a reason to end the run after this step."""
        self.best = Best(self.options.monitor)
        self.callbacks: list[Callback] = [_as_callback(c) for c in options.callbacks]
        if self.options.patience is not None:
            self.callbacks.append(EarlyStopping(self.options.patience, self.options.monitor))
        self.base_lr = trainer.lr if options.lr is None else options.lr
        self.first_step = trainer.global_step
        self.rotation: CheckpointRotation | None = None
        if options.directory is not None:
            self.rotation = CheckpointRotation(
                options.directory / CHECKPOINTS, self.options.keep or 1
            )
        self.means = Mean()
        self.history = History([], [], "", None)
        self.records: MetricsWriter | None = None
        self.show = display(False)
        seed = trainer.seed if loaded is None else loaded.progress.seed
        self.source, self.validation = self._sources(data, seed)
        self.batches = length(self.source)
        """Of an epoch, if that is known."""
        self._before = (0, 0)
        self.resumed = ""
        """What was taken over from the checkpoint of an earlier run."""
        if loaded is None or stored is None:
            self.schedule = resolve_schedule(
                options.schedule, total=self.total_steps, warmup=self.options.warmup
            )
        else:
            self._restore(stored, loaded, str(path))
            self.resumed = stored.overridden_options(options, seed, self.schedule)
            if stored.validated and self.validation is None:
                self.resumed += "; without the validation that the run had"
            trainer.restore(loaded)
        self._odd = set(nonfinite_weights(trainer))
        """Weights that are infinite on purpose, as in a mask."""
        if self.rotation is not None:
            self.rotation.sweep()  # after all refusals: another run's files are not ours to remove

    def _sources(self, data: Any, seed: int) -> tuple[Source, Source | None]:
        options, fixed = self.options, self.trainer.fixed_batch is not None
        size = options.batch_size or 0
        source = as_source(
            data,
            batch_size=size,
            shuffle=bool(options.shuffle),
            seed=seed,
            drop_last=bool(options.drop_last) or fixed,
            columns=self.trainer.inputs,
        )
        validation = options.validation
        if validation is not None:
            validation = as_source(
                validation, batch_size=size, drop_last=fixed, columns=self.trainer.inputs
            )
        return source, validation

    @property
    def epochs(self) -> int:
        """How often the run goes through the data, epochs before a resumption included."""
        return self.options.epochs or 0

    @property
    def total_steps(self) -> int | None:
        """How many updates the run makes in all, if that is known."""
        if self.batches is None:
            return None
        epochs, steps = self._before
        each = -(-self.batches // self.trainer.manifest.accumulate)
        return steps + (self.epochs - epochs) * each

    def go(self) -> History:
        """Train until the last epoch or until something stops it."""
        options, trainer = self.options, self.trainer
        if options.directory is not None:
            resume_at = trainer.global_step if self.resumed else None
            self.records = MetricsWriter(
                options.directory,
                self._columns(),
                resume_at=resume_at,
                epochs=self.epoch,
                tensorboard=options.tensorboard,
            )
            self._recall(self.records.rows)
        self.show = display(options.progress)
        self.show.start(self.epochs, self.total_steps, trainer.global_step - self.first_step)
        if self.resumed:
            self.show.line(f"resumed at step {trainer.global_step}: {self.resumed}")
        try:
            with self.records or nullcontext(), self._interruptible():
                for callback in self.callbacks:
                    callback.on_start(self)
                while self.epoch < self.epochs and not self.stop:
                    self._epoch()
                self._check_weights_finite()
        finally:
            self.show.stop()
        for callback in self.callbacks:
            callback.on_end(self)
        self.trainer.lr = self.base_lr
        self.history.stopped = self.stop
        return self.history

    # -- one epoch ------------------------------------------------------------------

    def _epoch(self) -> None:
        for batch in self.source.batches(self.epoch, self.batch):
            self._step(batch)
            if self.stop and not self.trainer.accumulating:
                break
        else:
            if not self.batch:
                raise ShapeError("there is nothing to train on: the data has no batch")
            self._end_epoch()
        if self.rotation is not None and (self.stop or self.batch == 0):
            self._checkpoint()

    def _step(self, batch: Batch) -> None:
        trainer = self.trainer
        number = trainer.global_step + 1 - self.first_step
        trainer.lr = self.schedule.lr(self.base_lr, number)
        feeds = feed(trainer.batch_specs, batch.positional, batch.named)
        try:
            outputs = trainer.compute(feeds)
        except LabelError as error:
            raise explain_label_error(trainer, error, feeds, batch.rows) from error
        if not is_finite(outputs[trainer.loss_name]):
            raise NonFiniteError(
                explain_nonfinite_loss(trainer, feeds, outputs, debug=self.options.debug_nan)
            )
        if self.options.debug_nan and (problem := explain_nonfinite_update(trainer, feeds)):
            raise NonFiniteError(problem)
        result = trainer.commit(outputs)
        self.batch += 1
        self.means.add(result, batch.size)
        self._record_step(result, batch.size)
        for callback in self.callbacks:
            callback.on_step(self, result)
        every = self.options.checkpoint_every
        if every and result.updated and trainer.global_step % every == 0 and self.rotation:
            self._checkpoint()

    def _record_step(self, result: StepResult, samples: int) -> None:
        row: Record = {"kind": "step", "epoch": self.epoch + 1, "step": result.step}
        row |= {"lr": self.trainer.lr, "loss": result.loss, **result.metrics}
        self.history.steps.append(row)
        if self.records is not None:
            self.records.add(row)
        self.show.step(self.epoch + 1, result.loss, self.trainer.lr, samples)

    def _end_epoch(self) -> None:
        self.trainer.flush()
        self._check_weights_finite()
        row: Record = {"kind": "epoch", "epoch": self.epoch + 1, "step": self.trainer.global_step}
        row |= {"lr": self.trainer.lr, **self.means.values()}
        if self.validation is not None:
            evaluation = evaluate(self.trainer, self.validation)
            row |= {f"val_{n}": v for n, v in evaluation.to_dict().items()}
        self.means = Mean()
        self.epoch, self.batch = self.epoch + 1, 0
        self.best.on_epoch(self, row)
        self.schedule.update(row.get(self.options.monitor or "val_loss", row["loss"]))
        self.history.epochs.append(row)
        if self.best.improved:
            self.history.best = row
        if self.records is not None:
            self.records.add(row)
        self.show.line(_epoch_summary(row, self.epochs))
        for callback in self.callbacks:
            callback.on_epoch(self, row)
        if self.rotation is not None and self.best.improved:
            self.rotation.save_best(self.trainer, self._position())

    # -- checkpoints ----------------------------------------------------------------

    def _check_weights_finite(self) -> None:
        """End the run if a finite loss has led to weights that are not; no file keeps them."""
        bad = {n: text for n, text in nonfinite_weights(self.trainer).items() if n not in self._odd}
        if not bad:
            return
        listing = "\n  ".join(f"{n!r} ({text})" for n, text in list(bad.items())[:5])
        last = None if self.rotation is None else self.rotation.newest()
        raise NonFiniteError(
            f"weights are not finite after step {self.trainer.global_step}, "
            f"though its loss was:\n  {listing}\n"
            + (f"hint: {last} is the last checkpoint, from before; " if last else "hint: ")
            + "debug_nan=True stops before such an update; a lower learning rate may avoid it"
        )

    def _checkpoint(self) -> None:
        assert self.rotation is not None
        self._check_weights_finite()
        if self.records is not None:
            self.records.flush()
        self.rotation.save(self.trainer, self._position())

    def _position(self) -> dict[str, Any]:
        """Return what a resumed run must know beside the trainer's own state."""
        return {
            "run": {
                "base_lr": self.base_lr,
                "batch": self.batch,
                "batches": self.batches,
                "best": self.best.state_dict(),
                "callbacks": {c.name: c.state_dict() for c in self.callbacks if c.name},
                "epoch": self.epoch,
                "first_step": self.first_step,
                "means": self.means.state_dict(),
                "schedule": self.schedule.to_dict(),
                "schedule_state": self.schedule.state_dict(),
                "settings": self.options.settings(),
                "total": self.total_steps,
                "validated": self.validation is not None,
            }
        }

    def _last_checkpoint(self, options: FitOptions) -> Path | None:
        """Return the checkpoint to go on from; refuse a directory that another run has used."""
        if options.directory is None:
            return None
        path = CheckpointRotation(options.directory / CHECKPOINTS).newest()
        if path is not None and not options.resume:
            raise OnnxTrainError(
                f"{options.directory} holds a run already: {path.name}\n"
                "hint: resume=True continues it; else choose another directory"
            )
        return path

    def _restore(self, stored: ResumeState, loaded: LoadedCheckpoint, label: str) -> None:
        stored.check_order(self.options, self.batches)
        self.epoch, self.batch, self.first_step = stored.epoch, stored.batch, stored.first_step
        done = loaded.progress.step - self.first_step
        # Of the epoch that is going on, all batches are as they were.
        self._before = (self.epoch, done - -(-self.batch // self.trainer.manifest.accumulate))
        try:
            if self.options.lr is None:
                self.base_lr = check_lr(stored.base_lr, "base_lr")
            self.best.load_state_dict(stored.best)
            self.means = Mean.from_dict(stored.means)
            self.schedule = stored.new_schedule(self.options, self.total_steps)
            for callback in self.callbacks:
                if callback.name in stored.callbacks:
                    callback.load_state_dict(stored.callbacks[callback.name])
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{label}: not a checkpoint of a run: {error}") from error
        check_remaining_schedule(self.schedule, self.base_lr, done, self.total_steps)

    def _recall(self, rows: list[Record]) -> None:
        self.history.steps += [r for r in rows if r.get("kind") == "step"]
        self.history.epochs += [r for r in rows if r.get("kind") == "epoch"]
        self.history.best = next(
            (r for r in self.history.epochs if r["epoch"] == self.best.epoch), None
        )

    def _columns(self) -> list[str]:
        metrics = self.trainer.metric_names
        columns = ["kind", "epoch", "step", "lr", "loss", *metrics]
        if self.validation is not None:
            columns += ["val_loss", *(f"val_{m}" for m in metrics if m != "grad_norm")]
        return columns

    # -- Ctrl-C ---------------------------------------------------------------------

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let the first Ctrl-C end the run after this step, and the second one at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGINT)

        def handle(number: int, frame: Any) -> None:
            del number, frame
            self.stop = "interrupted"
            signal.signal(signal.SIGINT, before)

        signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


class _FunctionCallback(Callback):
    def __init__(self, function: Callable[[Run, Record], None]) -> None:
        self._function = function

    def on_epoch(self, run: Run, record: Record) -> None:
        self._function(run, record)


def _as_callback(given: Any) -> Callback:
    if isinstance(given, Callback):
        return given
    if not callable(given):
        raise OnnxTrainError(f"not a callback: {given!r}\nhint: a Callback, or f(run, record)")
    function: Any = given
    return _FunctionCallback(function)


def _epoch_summary(row: Record, epochs: int) -> str:
    numbers = [f"{n} {v:.4f}" for n, v in row.items() if isinstance(v, float) and n != "lr"]
    return f"epoch {row['epoch']}/{epochs}  step {row['step']}  {'  '.join(numbers)}"


_LOCK_NAME = ".lock"
_held_locks: set[str] = set()
_held_locks_mutex = threading.Lock()


@contextmanager
def lock_directory(directory: Path | None) -> Iterator[None]:
    """Keep a directory to this run; make it if it is not there.

    Raises:
        BusyError: if another run, of this process or another one, is going on in it.
    """
    if directory is None:
        yield
        return
    # Locks of a file are one process's: its own threads need a list besides.
    key = os.path.realpath(directory)
    with _held_locks_mutex:
        if key in _held_locks:
            raise _busy_error(directory, "this process")
        _held_locks.add(key)
    try:
        file = _open_lock_file(directory)
        try:
            if not _lock(file):
                raise _busy_error(directory, "another process")
            yield
        finally:
            os.close(file)
    finally:
        with _held_locks_mutex:
            _held_locks.discard(key)


def _open_lock_file(directory: Path) -> int:
    with as_save_error(str(directory)):
        directory.mkdir(parents=True, exist_ok=True)
        return os.open(directory / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)


def _lock(file: int) -> bool:
    """Take the lock of an open file; ``False`` if another process has it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            # Not flock: children made by fork would keep it after the run has died.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True  # a file system without locks
    return True


def _busy_error(directory: Path, who: str) -> BusyError:
    return BusyError(
        f"{directory}: a run of {who} is going on there\n"
        "hint: wait for its end, or choose another directory"
    )
