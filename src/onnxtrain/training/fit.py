"""Training for some epochs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onnxtrain.optim.schedules import Schedule
from onnxtrain.options import from_arguments
from onnxtrain.training.callbacks import Callback, Record
from onnxtrain.training.fit_options import FitOptions
from onnxtrain.training.guards.run_lock import locked
from onnxtrain.training.reports.progress import Display
from onnxtrain.training.run import History, Run

if TYPE_CHECKING:
    from onnxtrain.training.trainer import Trainer


def fit(
    trainer: Trainer,
    data: Any,
    epochs: int | None = None,
    *,
    batch_size: int | None = None,
    lr: float | None = None,
    validation: Any = None,
    schedule: str | Schedule | Mapping[str, Any] | None = None,
    warmup: float | None = None,
    callbacks: Sequence[Callback | Callable[[Run, Record], None]] = (),
    progress: bool | str | Display = True,
    directory: str | os.PathLike[str] | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    keep: int | None = None,
    monitor: str | None = None,
    patience: int | None = None,
    shuffle: bool | None = None,
    drop_last: bool | None = None,
    debug_nan: bool = False,
    tensorboard: bool | None = None,
) -> History:
    """Train for some epochs; return the losses and metrics on the way.

    The first Ctrl-C ends the run after the current step, with a checkpoint if there is a directory.
    A resumed run keeps what is not given anew, and says what that is: number of epochs, batch size,
    learning rate, schedule, order of the data and all else but data, validation and callbacks.

    Args:
        trainer: what is trained.
        data: a tuple of arrays (by position) or a dict of arrays (by name), which are shuffled and
            cut into batches; or a table (pandas, polars, Arrow, Hugging Face ``Dataset``), whose
            columns have the names of inputs and targets; or an iterable of batches such as a list
            or torch's DataLoader; or a function from the epoch to such an iterable.
        epochs: how often to go through the data, those before a resumed checkpoint included; 1.
        batch_size: of arrays; 32, or what the model is fixed to.
        lr: learning rate, to which the schedule is relative; else the trainer's own.
        validation: data to evaluate on after each epoch.
        schedule: of the learning rate: a name such as ``"cosine"``, or an object of
            :mod:`onnxtrain.optim.schedules`; a resumed run keeps its own unless one is given, and
            stretches it to the new number of steps.
        warmup: steps, or a part of all steps if below 1.
        callbacks: :class:`Callback` objects, or functions that get the run and each epoch's record.
        progress: ``True`` for a bar in a terminal and lines elsewhere, ``"bar"``, ``"plain"`` or
            ``False``; or a display of your own.
        directory: where metrics, curve and checkpoints go; nothing is written without one.
        resume: continue from the last checkpoint there, if there is one.
        checkpoint_every: steps between checkpoints, besides the one after each epoch.
        keep: how many of the last checkpoints stay, 3; the best one does anyway.
        monitor: by which number the best epoch is chosen; ``val_loss``, else ``loss``.
        patience: end after so many epochs without a better one.
        shuffle: arrays, anew in each epoch; by default they are.
        drop_last: leave out a last batch that is short.
        debug_nan: look at every update, and find the node that makes the first NaN.
        tensorboard: write event files; by default if TensorBoard is installed.

    Raises:
        BusyError: if another thread uses the trainer, or another run the directory.
        NonFiniteError: if the loss becomes infinite or NaN; the weights are those before that step.
            Also if weights become so by a step with a finite loss; no checkpoint holds them.
    """
    options = from_arguments(FitOptions, locals())
    with trainer.in_use, locked(options.directory):
        return Run(trainer, data, options).go()
