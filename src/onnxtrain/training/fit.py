"""The training loop: options, epochs, validation, schedules, checkpoints, resuming.

:meth:`onnxtrain.Trainer.fit` turns its arguments into :class:`FitOptions`, locks the directory and
runs a :class:`Run`, which is also what callbacks see. In reading order:

- :class:`FitOptions`: the options, declared once for Python and the command line;
- :class:`History`: what ``fit`` returns;
- :class:`Run`: one run, step by step;
- :class:`ResumeState`: the part of a checkpoint that a resumed run continues from;
- :class:`CheckpointRotation`: the checkpoints in a directory;
- :func:`lock_directory`: one run per directory.

To add an option, add a field to :class:`FitOptions` and a parameter to ``Trainer.fit``. If a
resumed run should keep it, also add its name to ``_RESUMED_OPTIONS`` and its default to
``_DEFAULTS``.
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
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from onnxtrain.artifacts.display import Row, SummaryRepr, format_record, svg_curve
from onnxtrain.errors import (
    BusyError,
    CheckpointError,
    LabelError,
    NonFiniteError,
    OnnxTrainError,
    ShapeError,
    argument,
    by_caller,
)
from onnxtrain.graph.io.writer import as_save_error
from onnxtrain.optim.schedules import (
    Schedule,
    ScheduleLike,
    from_dict,
    rescale_schedule,
    resolve_schedule,
)
from onnxtrain.options import Flag, option
from onnxtrain.runtime.feeds import feed
from onnxtrain.training.callbacks import Best, Callback, EarlyStopping, Record, unknown_monitor
from onnxtrain.training.checks import (
    LoadedCheckpoint,
    check_initial_weights,
    check_lr,
    explain_nonfinite_loss,
    explain_nonfinite_update,
    is_finite,
    nonfinite_weights,
)
from onnxtrain.training.columns import class_names
from onnxtrain.training.data import (
    Arrays,
    Batch,
    Source,
    Transform,
    Transformed,
    as_fraction,
    as_source,
    length,
)
from onnxtrain.training.distributed import Workers
from onnxtrain.training.evaluation import Mean, evaluate
from onnxtrain.training.labels import explain_label_error
from onnxtrain.training.metrics import Metrics, MetricsLike
from onnxtrain.training.progress import Display, display
from onnxtrain.training.results import StepResult
from onnxtrain.training.run_files import MetricsWriter

if TYPE_CHECKING:
    from onnxtrain.training.trainer import Trainer

logger = logging.getLogger(__name__)
R = TypeVar("R")

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run's directory."""
BEST = "best.safetensors"
"""File of the best epoch's checkpoint."""
_INTERRUPTED = "interrupted"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Options of a run; :meth:`onnxtrain.Trainer.fit` documents them."""

    epochs: int | None = option(None, Flag(int, "Number of passes over the data; 1 by default."))
    batch_size: int | None = option(None, Flag(int, "32, or the model's fixed batch size."))
    lr: float | None = option(None, Flag(float, "Learning rate; that of the build by default."))
    validation: Any = option(
        None, Flag(Path, "Validation data, in a format of --data, or a fraction of the data: 0.2.")
    )
    metrics: MetricsLike = option(
        (), Flag(list[str], "Metric of the validation data: f1, auc, top_3 ...", name="metric")
    )
    schedule: ScheduleLike | None = option(
        None, Flag(str, "Learning rate schedule: cosine, one_cycle, step:step_size=10 ...")
    )
    warmup: float | None = option(
        None, Flag(float, "Warm-up steps, or a fraction of all steps if below 1.")
    )
    callbacks: Sequence[Callback | Callable[[Any, Record], None]] = option(())
    progress: bool | str | Display = option(True)
    directory: Path | None = option(
        None,
        Flag(Path, "Folder for metrics and checkpoints; DIRECTORY/run by default.", name="out"),
    )
    resume: bool = option(
        False, Flag(bool, "Continue from the last checkpoint, with its options unless given.")
    )
    checkpoint_every: int | None = option(None, Flag(int, "Steps between checkpoints."))
    keep: int | None = option(
        None, Flag(int, "Number of recent checkpoints to keep; 3 by default.")
    )
    monitor: str | None = option(None, Flag(str, "Value that decides which epoch is best."))
    patience: int | None = option(
        None, Flag(int, "Stop after this many epochs without an improvement.")
    )
    shuffle: bool | None = option(None)
    drop_last: bool | None = option(None)
    transform: Transform | None = option(None)
    debug_nan: bool = option(False, Flag(bool, "Find the node that computes the first NaN."))
    tensorboard: bool | None = option(None)

    def __post_init__(self) -> None:
        if self.directory is not None:
            object.__setattr__(self, "directory", Path(self.directory))
        if self.directory is None and (self.resume or self.checkpoint_every):
            raise OnnxTrainError(
                "checkpoint_every and resume require directory=\n"
                "hint: fit(..., directory='runs/first')"
            )
        fraction = as_fraction(self.validation)
        if fraction is not None:
            if not 0 < fraction < 1:
                raise OnnxTrainError(
                    "validation must be data, or a fraction of the data between 0 and 1, got "
                    f"{fraction:g}\nhint: {argument('validation', 0.2)}"
                )
            object.__setattr__(self, "validation", fraction)
        for name in ("epochs", "batch_size", "keep", "checkpoint_every", "patience"):
            value = getattr(self, name)
            if value is not None and (not _is_integer(value) or value < 1):
                raise OnnxTrainError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.lr is not None:
            check_lr(self.lr, "lr")
            if callable(self.schedule) and not isinstance(self.schedule, Schedule):
                raise OnnxTrainError(
                    "lr= has no effect: the schedule function returns the learning rate\n"
                    "hint: pass only schedule="
                )
        if self.metrics and self.validation is None:
            raise OnnxTrainError(
                "metrics are computed on validation data\n"
                f"hint: {by_caller('fit(..., validation=data)', '--validation FILE')}"
            )

    def completed(self, stored: Mapping[str, Any], fixed_batch: int | None) -> FitOptions:
        """Return the options with values for those not given: from a stored run, else defaults.

        Args:
            stored: :meth:`settings` of the run to resume.
            fixed_batch: the batch size if the model fixes it.
        """
        defaults = {**_DEFAULTS, "batch_size": fixed_batch or 32}
        missing = {n: defaults.get(n) for n in _RESUMED_OPTIONS if getattr(self, n) is None}
        missing |= {n: v for n, v in stored.items() if n in missing and v is not None}
        return dataclasses.replace(self, **missing)

    def settings(self) -> dict[str, Any]:
        """Return the options that a resumed run keeps, as JSON values."""
        values = {n: getattr(self, n) for n in _RESUMED_OPTIONS}
        if not isinstance(self.validation, float):  # data is not stored
            values["validation"] = None
        return {n: v.item() if isinstance(v, np.generic) else v for n, v in values.items()}


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


_RESUMED_OPTIONS = (
    *("batch_size", "checkpoint_every", "drop_last", "epochs", "keep", "monitor", "patience"),
    *("shuffle", "validation", "warmup"),
)
_DEFAULTS = {"drop_last": False, "epochs": 1, "keep": 3, "shuffle": True, "warmup": 0}


@dataclasses.dataclass(repr=False)
class History(SummaryRepr):
    """The losses and metrics of a run; in a notebook it shows its loss curve."""

    steps: list[Record]
    """One record per batch: step, epoch, lr, loss, metrics."""
    epochs: list[Record]
    """One record per epoch: means, and ``val_...`` if there is validation data."""
    stopped: str
    """Why the run ended before its last epoch; empty if it did not."""
    best: Record | None
    """The record of the best epoch."""

    @property
    def losses(self) -> list[float]:
        """The loss of every batch."""
        return [r["loss"] for r in self.steps]

    def summary(self) -> tuple[str, list[Row]]:
        """Return the class name and the rows of ``repr``: losses, last and best epoch."""
        rows = [("steps", str(len(self.steps))), ("epochs", str(len(self.epochs)))]
        if self.steps:
            rows.append(("loss", f"{self.losses[0]:.5g} first, {self.losses[-1]:.5g} last"))
        for name, record in (("last epoch", self.epochs[-1:]), ("best epoch", [self.best])):
            if record and record[0]:
                rows.append((name, format_record(record[0])))
        return "History", [*rows, *([("stopped", self.stopped)] if self.stopped else [])]

    def _repr_html_(self) -> str:
        return super()._repr_html_() + svg_curve(self.losses, "loss")


class Run:
    """A training run, as callbacks see it."""

    def __init__(self, trainer: Trainer, data: Any, options: FitOptions) -> None:
        self.trainer, self.workers = trainer, trainer.workers
        self.main = self.workers is None or self.workers.main
        """Whether this process writes files, prints and calls callbacks."""
        # The trainer changes only after the whole checkpoint has been checked.
        path, loaded = self._on_main(lambda: self._read_checkpoint(options))
        stored = None if loaded is None else ResumeState.read(loaded.meta, str(path))
        settings = stored.settings if stored else {}
        self.options = options.completed(settings, self._fixed_batch())
        self.epoch = 0
        """The current epoch, from 0."""
        self.batch = 0
        """Number of batches of the epoch that are done."""
        self.stop = ""
        """Set to a reason to end the run after this step."""
        self.callbacks = self._callbacks()
        self.best = self._best_epoch()
        self.metrics = Metrics(trainer, options.metrics)
        self.base_lr = trainer.lr if options.lr is None else options.lr
        self.first_step = trainer.global_step
        folder, keep = options.directory and options.directory / CHECKPOINTS, self.options.keep or 1
        self.rotation = folder and CheckpointRotation(folder, keep, writes=self.main)
        self.means = Mean()
        self.history = History([], [], "", None)
        self.records: MetricsWriter | None = None
        self.show = display(False)
        seed = trainer.seed if loaded is None else loaded.progress.seed
        properties = trainer.properties if loaded is None else loaded.progress.properties
        self.source, self.validation = self._sources(data, seed, class_names(properties))
        self.batches = length(self.source)
        """Number of batches per epoch, if that is known."""
        self._before_resume = (0, 0)  # epochs and updates
        self.resumed = ""
        """Options that a resumed run keeps from its checkpoint, for display."""
        if loaded is None or stored is None:
            self.schedule = resolve_schedule(
                options.schedule, total=self.total_steps, warmup=self.options.warmup
            )
        else:
            self._restore(stored, loaded, str(path))
            self.resumed = stored.kept_options(options, seed, self.schedule)
            if stored.validated and self.validation is None:
                self.resumed += "; without validation data, which the run had before"
        self._check_monitors()
        self._check_workers()
        if loaded is not None:
            trainer.restore(loaded)
        trainer.classes = self.source.classes
        trainer.best_checkpoint = None if self.rotation is None else self.rotation.best
        # Weights that are infinite on purpose, such as a mask.
        self._nonfinite_at_start = set(nonfinite_weights(trainer))
        if self.rotation is not None:
            self.rotation.sweep()  # last: an error above must not remove another run's files

    def _best_epoch(self) -> Best:
        """Return what decides which epoch is best: ``monitor``, else the first EarlyStopping."""
        if self.options.monitor is None:
            for callback in self.callbacks:
                if isinstance(callback, Best):
                    return Best(callback.monitor, callback.mode)
        return Best(self.options.monitor)

    def _check_monitors(self) -> None:
        """Raise an error now for a value that no epoch will have."""
        known = self._columns()[4:]
        added = tuple(f"val_{n}_" for n in self.metrics.names)  # by a metric that returns a dict
        own = [c for c in self.callbacks if not isinstance(c, Best)]  # may add to the record
        for best in (self.best, *(c for c in self.callbacks if isinstance(c, Best))):
            name = best.monitor
            if name is None:
                continue
            if name not in known and not name.startswith(added) and (best is self.best or not own):
                raise unknown_monitor(name, known, validated=self.validation is not None)
            maximize = best.maximizes(name)
            mode = _plateau_mode(self.schedule.to_dict())
            if best is self.best and mode not in (None, "max" if maximize else "min"):
                raise OnnxTrainError(
                    f"reduce_on_plateau waits for a smaller {name!r}, and larger is better\n"
                    f"hint: {argument('schedule', 'reduce_on_plateau:mode=max')}"
                    if maximize
                    else f"reduce_on_plateau waits for a larger {name!r}, and smaller is better\n"
                    f"hint: {argument('schedule', 'reduce_on_plateau')}"
                )

    def _callbacks(self) -> list[Callback]:
        """Return the callbacks of this run; workers besides the first one call none of them."""
        callbacks = [_as_callback(c) for c in self.options.callbacks]
        if self.options.patience is not None:
            callbacks.append(EarlyStopping(self.options.patience, self.options.monitor))
        restores = any(isinstance(c, EarlyStopping) and c.restore_best for c in callbacks)
        if restores and self.trainer.sharded:
            raise OnnxTrainError(
                "restore_best=True does not support shard_state=True\n"
                "hint: load the best checkpoint after the run"
            )
        return callbacks

    def _check_workers(self) -> None:
        """Check that the workers have data of the same size, and the same options."""
        if self.workers is None:
            return
        if not self.main:
            self.callbacks = []
        rows = getattr(self.source, "samples", None)
        facts = {"rows of the data": rows, "batches per epoch": self.batches}
        self.workers.check_equal({**facts, **self.options.settings()})

    def _sources(
        self, data: Any, seed: int, classes: Mapping[str, Sequence[str]]
    ) -> tuple[Source, Source | None]:
        options, fixed = self.options, self.trainer.fixed_batch is not None
        size, specs = options.batch_size or 0, self.trainer.batch_specs
        source = as_source(
            data,
            specs,
            batch_size=size,
            shuffle=bool(options.shuffle),
            seed=seed,
            drop_last=bool(options.drop_last) or fixed,
            classes=classes,
            part=None if self.workers is None else self.workers.part,
        )
        validation = options.validation
        own_size = self.trainer.fixed_batch or size
        if isinstance(validation, float):
            if not isinstance(source, Arrays):
                raise OnnxTrainError(
                    f"{argument('validation', validation)} takes rows of arrays, tables and files, "
                    f"not of a {type(data).__name__}\nhint: fit(data, validation=other_data)"
                )
            source, validation = source.split(validation, own_size, drop_last=fixed)
        elif validation is not None:
            validation = as_source(
                validation, specs, batch_size=own_size, drop_last=fixed, classes=source.classes
            )
        if options.transform is not None:
            source = Transformed(source, options.transform, specs, seed)
        return source, validation

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C has stopped the run."""
        return self.stop == _INTERRUPTED

    @property
    def epochs(self) -> int:
        """Number of passes over the data, including those before a resume."""
        return self.options.epochs or 0

    @property
    def total_steps(self) -> int | None:
        """Number of updates of the whole run, if that is known."""
        if self.batches is None:
            return None
        epochs, steps = self._before_resume
        each = -(-self.batches // self.trainer.manifest.accumulate)
        return steps + (self.epochs - epochs) * each

    def go(self) -> History:
        """Train until the last epoch or until something stops it."""
        options, trainer = self.options, self.trainer
        if options.directory is not None and self.main:
            resume_at = trainer.global_step if self.resumed else None
            self.records = MetricsWriter(
                options.directory,
                self._columns(),
                resume_at=resume_at,
                epochs=self.epoch,
                tensorboard=options.tensorboard,
            )
            self._load_history(self.records.rows)
        self.show = display(options.progress if self.main else False)
        self.show.start(self.epochs, self.total_steps, trainer.global_step - self.first_step)
        if self.resumed and not self.stop:
            self.show.line(f"resumed at step {trainer.global_step}: {self.resumed}")
        try:
            with self.records or nullcontext(), self._interruptible():
                for callback in self.callbacks:
                    callback.on_start(self)
                while self.epoch < self.epochs and not self.stop:
                    self._epoch()
                    if self.workers is not None:
                        self.stop = next(filter(None, self.workers.gather(self.stop)), "")
                self._check_weights_finite()
        finally:
            self.show.stop()
        for callback in self.callbacks:
            callback.on_end(self)
        self.trainer.share_values()  # a callback may have restored an epoch
        self.trainer.lr = self.base_lr
        self.history.stopped = self.stop
        if self.interrupted:
            # Only now: a script that continues would take half-trained weights for the result.
            raise KeyboardInterrupt(self._interrupt_message())
        return self.history

    def _interrupt_message(self) -> str:
        """Return what Ctrl-C has stopped, what is saved, and how to resume."""
        trainer, directory = self.trainer, self.options.directory
        head = f"fit was interrupted after step {trainer.global_step}"
        last = None if self.rotation is None else self.rotation.newest()
        if last is None:
            return (
                f"{head}; nothing was saved\n"
                "hint: trainer.save(path) saves the weights of this step; fit(..., "
                "directory='runs/first') saves them on Ctrl-C"
            )
        python = f"fit(..., directory={str(directory)!r}, resume=True) continues"
        return f"{head}; saved {last}\nhint: " + by_caller(
            python, "the same command with --resume continues"
        )

    def _epoch(self) -> None:
        stops = False  # on all workers; only one of them has the reason
        for batch in self.source.batches(self.epoch, self.batch):
            self._step(batch)
            stops = self._stops_now() and not self.trainer.accumulating
            if stops:
                break
        else:
            if not self.batch:
                raise ShapeError("the data has no batch to train on")
            self._end_epoch()
        if self.rotation is not None and (stops or self.batch == 0):
            self._checkpoint()

    def _stops_now(self) -> bool:
        """Return whether a worker has asked to stop, in time for all to know."""
        if self.workers is None or self.workers.size == 1:
            return bool(self.stop)
        self.workers.stop = bool(self.stop)
        return self.workers.all_stop

    def _on_main(self, function: Callable[[], R]) -> R:
        """Return the result of worker 0, which is this process if there is one."""
        return function() if self.workers is None else self.workers.on_main(function)

    def _step(self, batch: Batch) -> None:
        trainer = self.trainer
        number = trainer.global_step + 1 - self.first_step
        trainer.lr = self.schedule.lr(self.base_lr, number)
        feeds = feed(trainer.batch_specs, (), batch.arrays) if batch.size else {}
        try:
            outputs = trainer.compute(feeds, batch.size)
        except LabelError as error:
            raise explain_label_error(trainer, error, feeds, batch) from error
        if not is_finite(outputs[trainer.loss_name]):
            debug = self.options.debug_nan
            if self.workers is not None:
                raise self._nonfinite_of_workers(self.workers, feeds, batch)
            raise NonFiniteError(
                explain_nonfinite_loss(trainer, feeds, outputs, batch, debug=debug)
            )
        if self.options.debug_nan and (problem := explain_nonfinite_update(trainer, feeds, batch)):
            raise NonFiniteError(problem)
        result = trainer.commit(outputs)
        self.batch += 1
        size = batch.size if self.workers is None else trainer.last_weight
        self.means.add(result, size)
        self._record_step(result, size)
        for callback in self.callbacks:
            callback.on_step(self, result)
        every = self.options.checkpoint_every
        if every and result.updated and trainer.global_step % every == 0 and self.rotation:
            self._checkpoint()

    def _nonfinite_of_workers(
        self, workers: Workers, feeds: Mapping[str, Any], batch: Batch
    ) -> NonFiniteError:
        """Return the error of a batch whose loss is infinite or NaN on some workers."""
        part = self.trainer.part_outputs
        fine = not part or is_finite(part[self.trainer.loss_name])
        bad = [r for r, finite in enumerate(workers.gather(fine)) if not finite]
        if not fine:
            debug = self.options.debug_nan
            return NonFiniteError(
                explain_nonfinite_loss(self.trainer, feeds, part, batch, debug=debug)
            )
        number = self.trainer.global_step + 1
        return NonFiniteError(f"the loss of step {number} is not finite on worker {bad[0]}")

    def _record_step(self, result: StepResult, samples: float) -> None:
        row: Record = {"kind": "step", "epoch": self.epoch + 1, "step": result.step}
        row |= {"lr": self.trainer.lr, "loss": result.loss, **result.metrics}
        self.history.steps.append(row)
        if self.records is not None:
            self.records.add(row)
        self.show.step(self.epoch + 1, result.loss, self.trainer.lr, round(samples))

    def _end_epoch(self) -> None:
        self.trainer.flush()
        self._check_weights_finite()
        row: Record = {"kind": "epoch", "epoch": self.epoch + 1, "step": self.trainer.global_step}
        row |= {"lr": self.trainer.lr, **self.means.values()}
        if self.validation is not None:
            source = self.validation
            evaluation = self._on_main(
                lambda: evaluate(self.trainer, source, self.metrics).to_dict()
            )
            row |= {f"val_{n}": v for n, v in evaluation.items()}
        self.means = Mean()
        self.epoch, self.batch = self.epoch + 1, 0
        self.best.on_epoch(self, row)
        self.schedule.update(row.get(self.best.monitor or "val_loss", row["loss"]))
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
        if self.workers is not None:
            self.trainer.check_workers()

    def _check_weights_finite(self) -> None:
        """Raise an error if weights have become infinite or NaN; no file may contain them."""
        bad = {
            n: text
            for n, text in nonfinite_weights(self.trainer).items()
            if n not in self._nonfinite_at_start
        }
        if not bad:
            return
        listing = "\n  ".join(f"{n!r} ({text})" for n, text in list(bad.items())[:5])
        last = None if self.rotation is None else self.rotation.newest()
        raise NonFiniteError(
            f"weights are not finite after step {self.trainer.global_step}, "
            f"although its loss was:\n  {listing}\n"
            + (f"hint: {last} is the last good checkpoint; " if last else "hint: ")
            + f"{argument('debug_nan')} stops before such an update; try a lower learning rate"
        )

    def _checkpoint(self) -> None:
        assert self.rotation is not None
        self._check_weights_finite()
        if self.records is not None:
            self.records.flush()
        self.rotation.save(self.trainer, self._position())

    def _position(self) -> dict[str, Any]:
        """Return what a resumed run needs besides the trainer's state: :class:`ResumeState`."""
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

    def _read_checkpoint(self, options: FitOptions) -> tuple[Path | None, LoadedCheckpoint | None]:
        path = self._last_checkpoint(options)
        if path is None:
            return None, None
        loaded = self.trainer.read(path)
        check_initial_weights(loaded.meta, self.trainer.artifacts, str(path))
        return path, loaded

    def _fixed_batch(self) -> int | None:
        """Return the number of rows of a batch of all workers, if the model fixes it."""
        fixed = self.trainer.fixed_batch
        return None if fixed is None else fixed * (self.workers.size if self.workers else 1)

    def _last_checkpoint(self, options: FitOptions) -> Path | None:
        """Return the checkpoint to resume from; without ``resume``, there must not be one."""
        if options.directory is None:
            return None
        path = CheckpointRotation(options.directory / CHECKPOINTS).newest()
        if path is not None and not options.resume:
            raise OnnxTrainError(
                f"{options.directory} already contains a run: {path.name}\n"
                f"hint: {argument('resume')} continues it; "
                + by_caller("otherwise choose another directory", "--out DIRECTORY starts another")
            )
        return path

    def _restore(self, stored: ResumeState, loaded: LoadedCheckpoint, label: str) -> None:
        stored.check_order(self.options, self.batches)
        self.epoch, self.batch, self.first_step = stored.epoch, stored.batch, stored.first_step
        done = loaded.progress.step - self.first_step
        # The current epoch keeps its batches: only whole epochs before it count.
        self._before_resume = (
            self.epoch,
            done - -(-self.batch // self.trainer.manifest.accumulate),
        )
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
        if self.epoch >= self.epochs:
            self.stop = (
                f"nothing to train: the run has {self.epoch} epochs; "
                f"{argument('epochs', self.epoch + 1)} continues it"
            )

    def _load_history(self, rows: list[Record]) -> None:
        self.history.steps += [r for r in rows if r.get("kind") == "step"]
        self.history.epochs += [r for r in rows if r.get("kind") == "epoch"]
        self.history.best = next(
            (r for r in self.history.epochs if r["epoch"] == self.best.epoch), None
        )

    def _columns(self) -> list[str]:
        metrics = self.trainer.metric_names
        columns = ["kind", "epoch", "step", "lr", "loss", *metrics]
        if self.validation is not None:
            metrics = [m for m in metrics if m != "grad_norm"]
            columns += ["val_loss", *(f"val_{m}" for m in (*metrics, *self.metrics.names))]
        return columns

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let the first Ctrl-C stop the run after this step, and the second one at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGINT)

        def handle(number: int, frame: Any) -> None:
            del number, frame
            self.stop = _INTERRUPTED
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
        raise OnnxTrainError(
            f"not a callback: {given!r}\nhint: pass a Callback, or a function of run and record"
        )
    function: Any = given
    return _FunctionCallback(function)


def _plateau_mode(schedule: Any) -> str | None:
    """Return the mode of the ReduceOnPlateau in the dict of a schedule, if there is one."""
    if isinstance(schedule, Mapping):
        if schedule.get("name") == "reduce_on_plateau":
            return str(schedule["mode"])
        schedule = list(schedule.values())
    parts = schedule if isinstance(schedule, list) else []
    return next((m for m in map(_plateau_mode, parts) if m is not None), None)


def _epoch_summary(row: Record, epochs: int) -> str:
    values = [f"{n} {v:.4f}" for n, v in row.items() if isinstance(v, float) and n != "lr"]
    return f"epoch {row['epoch']}/{epochs}  step {row['step']}  {'  '.join(values)}"


_ORDER_OPTIONS = ("batch_size", "shuffle", "drop_last")
"""Options that decide which rows each batch of an epoch contains."""


@dataclasses.dataclass(frozen=True)
class ResumeState:
    """The part of a checkpoint that describes the run; the rest describes the trainer."""

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
    """Number of batches per epoch."""
    total: int | None = None
    """Planned number of steps."""
    validated: bool = False

    @classmethod
    def read(cls, meta: Mapping[str, Any], label: str) -> ResumeState:
        """Return the state in the metadata of a checkpoint.

        Raises:
            CheckpointError: if a run did not write the checkpoint.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        try:
            stored = cls(**{n: v for n, v in meta["run"].items() if n in names})
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{label}: not a checkpoint of a run: {error}") from error
        counts = (stored.epoch, stored.batch, stored.first_step)
        parts = (stored.best, stored.means, stored.callbacks, stored.schedule, stored.settings)
        if any(type(c) is not int or c < 0 for c in counts):
            raise CheckpointError(
                f"{label}: epoch, batch and first_step must be non-negative integers, got {counts}"
            )
        if not all(isinstance(p, Mapping) for p in parts):
            raise CheckpointError(f"{label}: not a checkpoint of a run: an entry is not an object")
        return stored

    def check_order(self, options: FitOptions, batches: int | None) -> None:
        """Raise an error if the rest of an epoch would have other batches.

        Rows would be skipped or seen twice.
        """
        if not self.batch:
            return
        changed = {
            n: (self.settings[n], getattr(options, n))
            for n in _ORDER_OPTIONS
            if n in self.settings and self.settings[n] != getattr(options, n)
        }
        if not changed and self.batches is not None and batches != self.batches:
            changed["batches per epoch"] = (self.batches, batches)
        if changed:
            listing = ", ".join(f"{n} was {a}, not {b}" for n, (a, b) in changed.items())
            finish = by_caller(
                f"fit(..., resume=True, epochs={self.epoch + 1}) with the same options",
                f"--resume --epochs {self.epoch + 1} and no other options",
            )
            raise OnnxTrainError(
                f"cannot resume in epoch {self.epoch + 1} after {self.batch} of its batches: "
                f"{listing}\n"
                f"hint: finish this epoch first: {finish}"
            )

    def new_schedule(self, options: FitOptions, total: int | None) -> Schedule:
        """Return the given schedule, or the run's own stretched to the new number of steps."""
        replaced = options.schedule is not None
        if replaced:
            schedule = resolve_schedule(options.schedule, total=total, warmup=options.warmup)
        elif options.warmup != self.settings.get("warmup", options.warmup):
            schedule = self._with_warmup(options.warmup, total)
        else:
            schedule = from_dict(rescale_schedule(self.schedule, self.total, total))
        if replaced and schedule.to_dict() != self.schedule:
            return schedule  # the state belongs to another schedule
        schedule.load_state_dict(self.schedule_state)
        return schedule

    def _with_warmup(self, warmup: float | None, total: int | None) -> Schedule:
        """Return the run's schedule with another warm-up."""
        inner, steps = self.schedule, 0
        if inner["name"] == "warmup":
            inner, steps = inner["after"], inner["steps"]
        first = resolve_schedule(None, total=total, warmup=warmup).to_dict()
        new_steps = first["steps"] if first["name"] == "warmup" else 0
        left = None if self.total is None else self.total - steps
        inner = rescale_schedule(inner, left, None if total is None else total - new_steps)
        return from_dict({**first, "after": inner} if new_steps else inner)

    def kept_options(self, given: FitOptions, seed: int, schedule: Schedule) -> str:
        """Return the options that the run keeps, because they are not given again, as text."""
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
    """Raise an error if the learning rate is 0 in all remaining steps."""
    if total is None or total <= done:
        return
    if not any(schedule.lr(base, step) for step in range(done + 1, total + 1)):
        raise OnnxTrainError(
            f"the learning rate would be 0 from step {done + 1} to the last step, {total}\n"
            f"hint: the schedule has ended; pass another one: {argument('schedule', 'cosine')}"
        )


def _without_warmup(schedule: Mapping[str, Any]) -> Mapping[str, Any]:
    return schedule["after"] if schedule["name"] == "warmup" else schedule


def _schedule_total(schedule: Mapping[str, Any]) -> int | None:
    total = _without_warmup(schedule).get("total")
    return total if total is None or schedule["name"] != "warmup" else total + schedule["steps"]


_CHECKPOINT_NAME = re.compile(r"step-(\d{9,})\.safetensors")


class CheckpointRotation:
    """The checkpoints of a run: the most recent ones, named after their step, and the best one.

    Args:
        folder: created with the first checkpoint.
        keep: number of recent checkpoints to keep.
        writes: whether this process writes and removes files.
    """

    def __init__(self, folder: Path, keep: int = 3, *, writes: bool = True) -> None:
        if keep < 1:
            raise OnnxTrainError(f"keep must be at least 1, got {keep}")
        self.folder, self.keep, self._writes = folder, keep, writes

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
        """Write a checkpoint, then remove old ones."""
        self._make_folder()
        path = self.folder / f"step-{trainer.global_step:09d}.safetensors"
        trainer.save(path, extra)
        if self._writes:
            logger.info("wrote checkpoint %s", path)
        self._prune()
        return path

    def save_best(self, trainer: Trainer, extra: dict[str, Any]) -> Path:
        """Write the checkpoint of the best epoch, in place of the previous one."""
        self._make_folder()
        trainer.save(self.best, extra)
        return self.best

    @property
    def best(self) -> Path:
        """The checkpoint of the best epoch."""
        return self.folder / BEST

    def _make_folder(self) -> None:
        if not self._writes:
            return
        with as_save_error(str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)

    def sweep(self) -> None:
        """Remove the unfinished files of a killed run, and checkpoints it did not remove."""
        if self.folder.is_dir() and self._writes:
            for path in self.folder.glob(".*.tmp"):
                with suppress(OSError):
                    path.unlink()
        self._prune()

    def _prune(self) -> None:
        for old in self.all()[: -self.keep] if self._writes else ():
            with suppress(OSError):
                old.unlink()
                logger.info("removed checkpoint %s: the last %d are kept", old, self.keep)


_LOCK_NAME = ".lock"
_held_locks: set[str] = set()
_held_locks_mutex = threading.Lock()


@contextmanager
def lock_directory(directory: Path | None) -> Iterator[None]:
    """Lock a directory for one run; create it if it does not exist.

    The operating system holds the lock and releases it when the process ends, so a killed run
    does not block the next one.

    Raises:
        BusyError: if another run, of this or another process, has locked it.
    """
    if directory is None:
        yield
        return
    # File locks belong to the process: its own threads need this set as well.
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
    """Lock an open file; return ``False`` if another process has locked it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            # Not flock: forked children would keep the lock after the run has died.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True  # the file system does not support locks
    return True


def _busy_error(directory: Path, who: str) -> BusyError:
    return BusyError(
        f"{directory} is locked by a run of {who}\n"
        "hint: wait until it ends, or choose another directory"
    )
