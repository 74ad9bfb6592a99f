"""The course of a training run: epochs, validation, schedules, checkpoints, resuming."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxtrain.errors import CheckpointError, NonFiniteError, OnnxTrainError
from onnxtrain.optim.schedules import from_dict, resolve_schedule
from onnxtrain.runtime.feeds import feed
from onnxtrain.training.callbacks import Best, Callback, EarlyStopping, Record
from onnxtrain.training.checkpoint_rotation import CheckpointRotation
from onnxtrain.training.data import Batch, Source, as_source
from onnxtrain.training.evaluation import Mean, evaluate
from onnxtrain.training.fit_options import FitOptions
from onnxtrain.training.metrics_files import Records
from onnxtrain.training.nan_search import bad_loss, bad_update, is_finite
from onnxtrain.training.progress import display
from onnxtrain.training.results import StepResult

if TYPE_CHECKING:
    from onnxtrain.training.trainer import Trainer

CHECKPOINTS = "checkpoints"


@dataclasses.dataclass
class History:
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


class Run:
    """A training run, as callbacks see it."""

    def __init__(self, trainer: Trainer, data: Any, options: FitOptions) -> None:
        if options.epochs < 0:
            raise OnnxTrainError(f"epochs must not be negative: {options.epochs}")
        if options.directory is None and (options.resume or options.checkpoint_every):
            raise OnnxTrainError("checkpoints need a place\nhint: fit(..., directory='runs/first')")
        self.trainer, self.options = trainer, options
        self.epoch = 0
        """The epoch that is going on, from 0."""
        self.batch = 0
        """How many batches of it are done."""
        self.stop = ""
        """Set to a reason to end the run after this step."""
        self.best = Best(options.monitor)
        self.callbacks: list[Callback] = [_callback(c) for c in options.callbacks]
        if options.patience is not None:
            self.callbacks.append(EarlyStopping(options.patience, options.monitor))
        self.base_lr, self.first_step = trainer.lr, trainer.global_step
        self.means = Mean()
        self.history = History([], [], "", None)
        self.keeper: CheckpointRotation | None = None
        self.records: Records | None = None
        self.show = display(False)
        path = self._last_checkpoint()
        # First the checkpoint: the order of the data follows from the seed that it holds.
        meta = None if path is None else trainer.load(path)
        self.resumed = meta is not None
        self.source, self.validation = self._sources(data)
        self.schedule = resolve_schedule(
            options.schedule, total=self.total_steps, warmup=options.warmup
        )
        if meta is not None:
            self._restore(meta, str(path))

    def _sources(self, data: Any) -> tuple[Source, Source | None]:
        size, drop_last = self.options.batch_size, self.options.drop_last
        fixed = self.trainer.fixed_batch
        if size is None:
            size = 32 if fixed is None else fixed
        drop_last = drop_last or fixed is not None
        source = as_source(
            data,
            batch_size=size,
            shuffle=self.options.shuffle,
            seed=self.trainer.seed,
            drop_last=drop_last,
        )
        validation = self.options.validation
        if validation is not None:
            validation = as_source(validation, batch_size=size, drop_last=fixed is not None)
        return source, validation

    @property
    def total_steps(self) -> int | None:
        """How many updates the run makes in all, if that is known."""
        try:
            batches = len(self.source)
        except TypeError:
            return None
        return self.options.epochs * -(-batches // self.trainer.manifest.accumulate)

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
        self.show.start(options.epochs, self.total_steps, trainer.global_step - self.first_step)
        if self.resumed:
            self.show.line(f"resumed at step {trainer.global_step}")
        try:
            with self.records or nullcontext(), self._interruptible():
                for callback in self.callbacks:
                    callback.on_start(self)
                while self.epoch < options.epochs and not self.stop:
                    self._epoch()
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
            self._end_epoch()
        if self.keeper is not None and (self.stop or self.batch == 0):
            self._checkpoint()

    def _step(self, batch: Batch) -> None:
        trainer = self.trainer
        number = trainer.global_step + 1 - self.first_step
        trainer.lr = self.schedule.lr(self.base_lr, number)
        feeds = feed(trainer.batch_specs, batch.positional, batch.named)
        outputs = trainer.compute(feeds)
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
        self.show.line(_summary(row, self.options.epochs))
        for callback in self.callbacks:
            callback.on_epoch(self, row)
        if self.keeper is not None and self.best.improved:
            self.keeper.save_best(self.trainer, self._position())

    # -- checkpoints ----------------------------------------------------------------

    def _checkpoint(self) -> None:
        assert self.keeper is not None
        if self.records is not None:
            self.records.flush()
        self.keeper.save(self.trainer, self._position())

    def _position(self) -> dict[str, Any]:
        """Return what a resumed run must know beside the trainer's own state."""
        return {
            "run": {
                "base_lr": self.base_lr,
                "batch": self.batch,
                "best": self.best.state_dict(),
                "callbacks": {c.name: c.state_dict() for c in self.callbacks if c.name},
                "epoch": self.epoch,
                "first_step": self.first_step,
                "means": self.means.state_dict(),
                "schedule": self.schedule.to_dict(),
                "schedule_state": self.schedule.state_dict(),
            }
        }

    def _last_checkpoint(self) -> Path | None:
        """Return the checkpoint to go on from; refuse a directory that another run has used."""
        options = self.options
        if options.directory is None:
            return None
        self.keeper = CheckpointRotation(options.directory / CHECKPOINTS, options.keep)
        path = self.keeper.newest()
        if path is not None and not options.resume:
            raise OnnxTrainError(
                f"{options.directory} holds a run already: {path.name}\n"
                "hint: resume=True continues it; else choose another directory"
            )
        self.keeper.sweep()  # after the refusal: another run's files are not ours to remove
        return path

    def _restore(self, meta: dict[str, Any], label: str) -> None:
        try:
            run = meta["run"]
            self.epoch, self.batch = int(run["epoch"]), int(run["batch"])
            self.base_lr, self.first_step = float(run["base_lr"]), int(run["first_step"])
            self.best.load_state_dict(run["best"])
            self.means = Mean.from_dict(run["means"])
            self._restore_schedule(run["schedule"], run["schedule_state"])
            for callback in self.callbacks:
                if callback.name in run["callbacks"]:
                    callback.load_state_dict(run["callbacks"][callback.name])
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{label}: not a checkpoint of a run: {error}") from error

    def _restore_schedule(self, settings: dict[str, Any], state: dict[str, Any]) -> None:
        if self.options.schedule is None:
            self.schedule = from_dict(settings)
        if self.schedule.to_dict() == settings:
            self.schedule.load_state_dict(state)

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
