"""The options of :meth:`onnxtrain.Trainer.fit`, declared once for API and command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.errors import OnnxTrainError
from onnxtrain.optim.schedules import Schedule
from onnxtrain.options import Flag, option
from onnxtrain.training.callbacks import Callback, Record
from onnxtrain.training.guards.progress_meta import check_lr
from onnxtrain.training.reports.progress import Display


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
            if value is not None and (not _is_whole(value) or value < 1):
                raise OnnxTrainError(f"{name} must be a whole number, at least 1: {value!r}")
        if self.lr is not None:
            check_lr(self.lr, "lr")

    def completed(self, stored: Mapping[str, Any], fixed_batch: int | None) -> FitOptions:
        """Return the options with those left out as a stored run has them, else by default.

        Args:
            stored: what :meth:`settings` gave.
            fixed_batch: the batch size that the model is fixed to, if it is.
        """
        usual = {**_USUAL, "batch_size": fixed_batch or 32}
        left_out = {n: usual.get(n) for n in _KEPT if getattr(self, n) is None}
        left_out |= {n: v for n, v in stored.items() if n in left_out and v is not None}
        return dataclasses.replace(self, **left_out)

    def settings(self) -> dict[str, Any]:
        """Return the options that a resumed run keeps, by name, ready for JSON."""
        values = {n: getattr(self, n) for n in _KEPT}
        return {n: v.item() if isinstance(v, np.generic) else v for n, v in values.items()}


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


_KEPT = (
    *("batch_size", "checkpoint_every", "drop_last", "epochs", "keep", "monitor", "patience"),
    *("shuffle", "warmup"),
)
_USUAL = {"drop_last": False, "epochs": 1, "keep": 3, "shuffle": True, "warmup": 0}


__all__ = ["FitOptions"]
