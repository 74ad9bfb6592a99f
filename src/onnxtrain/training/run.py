"""The course of a training run: epochs, validation, schedules, checkpoints, resuming."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxtrain.artifacts.summary import Row, Shown, curve, in_words
from onnxtrain.errors import CheckpointError, LabelError, NonFiniteError, OnnxTrainError, ShapeError
from onnxtrain.optim.schedules import resolve_schedule
from onnxtrain.runtime.feeds import feed
from onnxtrain.training.callbacks import Best, Callback, EarlyStopping, Record
from onnxtrain.training.checkpoint_rotation import CheckpointRotation
from onnxtrain.training.data import Batch, Source, as_source, length
from onnxtrain.training.evaluation import Mean, evaluate
from onnxtrain.training.fit_options import FitOptions
from onnxtrain.training.guards.labels import explained
from onnxtrain.training.guards.nan_search import bad_loss, bad_update, bad_weights, is_finite
from onnxtrain.training.guards.progress_meta import Loaded, check_lr
from onnxtrain.training.reports.metrics_files import Records
from onnxtrain.training.reports.progress import display
from onnxtrain.training.results import StepResult
from onnxtrain.training.resume import Stored, refuse_rest

if TYPE_CHECKING:
    from onnxtrain.training.trainer import Trainer

CHECKPOINTS = "checkpoints"


@dataclasses.dataclass(repr=False)
class History(Shown):
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
                rows.append((name, in_words(record[0])))
        return "History", [*rows, *([("stopped", self.stopped)] if self.stopped else [])]

    def _repr_html_(self) -> str:
        return super()._repr_html_() + curve(self.losses, "loss")


class Run:
    """A training run, as callbacks see it."""

    def __init__(self, trainer: Trainer, data: Any, options: FitOptions) -> None:
        self.trainer = trainer
        path = self._last_checkpoint(options)
        # Nothing changes until all that a checkpoint says is known to fit.
        loaded = None if path is None else trainer.read(path)
        stored = None if loaded is None else Stored.read(loaded.meta, str(path))
        self.options = options.completed(stored.settings if stored else {}, trainer.fixed_batch)
        self.epoch = 0
        """The epoch that is going on, from 0."""
        self.batch = 0
        """How many batches of it are done."""
        self.stop = ""
        """Set to a reason to end the run after this step."""
        self.best = Best(self.options.monitor)
        self.callbacks: list[Callback] = [_callback(c) for c in options.callbacks]
        if self.options.patience is not None:
            self.callbacks.append(EarlyStopping(self.options.patience, self.options.monitor))
        self.base_lr = trainer.lr if options.lr is None else options.lr
        self.first_step = trainer.global_step
        self.keeper: CheckpointRotation | None = None
        if options.directory is not None:
            self.keeper = CheckpointRotation(
                options.directory / CHECKPOINTS, self.options.keep or 1
            )
        self.means = Mean()
        self.history = History([], [], "", None)
        self.records: Records | None = None
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
            self.resumed = stored.taken_over(options, seed, self.schedule)
            if stored.validated and self.validation is None:
                self.resumed += "; without the validation that the run had"
            trainer.take(loaded)
        self._odd = set(bad_weights(trainer))
        """Weights that are infinite on purpose, as in a mask."""
        if self.keeper is not None:
            self.keeper.sweep()  # after all refusals: another run's files are not ours to remove

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
            self.records = Records(
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
                self._refuse_bad_weights()
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
        if self.keeper is not None and (self.stop or self.batch == 0):
            self._checkpoint()

    def _step(self, batch: Batch) -> None:
        trainer = self.trainer
        number = trainer.global_step + 1 - self.first_step
        trainer.lr = self.schedule.lr(self.base_lr, number)
        feeds = feed(trainer.batch_specs, batch.positional, batch.named)
        try:
            outputs = trainer.compute(feeds)
        except LabelError as error:
            raise explained(trainer, error, feeds, batch.rows) from error
        if not is_finite(outputs[trainer.loss_name]):
            raise NonFiniteError(bad_loss(trainer, feeds, outputs, debug=self.options.debug_nan))
        if self.options.debug_nan and (problem := bad_update(trainer, feeds)):
            raise NonFiniteError(problem)
        result = trainer.commit(outputs)
        self.batch += 1
        self.means.add(result, batch.size)
        self._record_step(result, batch.size)
        for callback in self.callbacks:
            callback.on_step(self, result)
        every = self.options.checkpoint_every
        if every and result.updated and trainer.global_step % every == 0 and self.keeper:
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
        self._refuse_bad_weights()
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
        self.show.line(_summary(row, self.epochs))
        for callback in self.callbacks:
            callback.on_epoch(self, row)
        if self.keeper is not None and self.best.improved:
            self.keeper.save_best(self.trainer, self._position())

    # -- checkpoints ----------------------------------------------------------------

    def _refuse_bad_weights(self) -> None:
        """End the run if a finite loss has led to weights that are not; no file keeps them."""
        bad = {n: text for n, text in bad_weights(self.trainer).items() if n not in self._odd}
        if not bad:
            return
        listing = "\n  ".join(f"{n!r} ({text})" for n, text in list(bad.items())[:5])
        last = None if self.keeper is None else self.keeper.newest()
        raise NonFiniteError(
            f"weights are not finite after step {self.trainer.global_step}, "
            f"though its loss was:\n  {listing}\n"
            + (f"hint: {last} is the last checkpoint, from before; " if last else "hint: ")
            + "debug_nan=True stops before such an update; a lower learning rate may avoid it"
        )

    def _checkpoint(self) -> None:
        assert self.keeper is not None
        self._refuse_bad_weights()
        if self.records is not None:
            self.records.flush()
        self.keeper.save(self.trainer, self._position())

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

    def _restore(self, stored: Stored, loaded: Loaded, label: str) -> None:
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
        refuse_rest(self.schedule, self.base_lr, done, self.total_steps)

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


class _Function(Callback):
    def __init__(self, function: Callable[[Run, Record], None]) -> None:
        self._function = function

    def on_epoch(self, run: Run, record: Record) -> None:
        self._function(run, record)


def _callback(given: Any) -> Callback:
    if isinstance(given, Callback):
        return given
    if not callable(given):
        raise OnnxTrainError(f"not a callback: {given!r}\nhint: a Callback, or f(run, record)")
    function: Any = given
    return _Function(function)


def _summary(row: Record, epochs: int) -> str:
    numbers = [f"{n} {v:.4f}" for n, v in row.items() if isinstance(v, float) and n != "lr"]
    return f"epoch {row['epoch']}/{epochs}  step {row['step']}  {'  '.join(numbers)}"
