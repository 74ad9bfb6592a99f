"""The options of :meth:`onnxtrain.Trainer.fit`, declared once for API and command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxtrain.optim.schedules import Schedule
from onnxtrain.options import Flag, option
from onnxtrain.training.callbacks import Callback, Record


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitOptions:
    """How a run goes; the docstring of ``fit`` tells what each option means."""

    epochs: int = option(1, Flag(int, "How often to go through the data."))
    batch_size: int | None = option(None, Flag(int, "32, or what the model is fixed to."))
    validation: Any = option(None, Flag(Path, "An .npz file to validate on."))
    schedule: str | Schedule | Mapping[str, Any] | None = option(
        None, Flag(str, "cosine, one_cycle, step:size=10 ...")
    )
    warmup: float = option(0, Flag(float, "Steps, or a part of all steps if below 1."))
    callbacks: Sequence[Callback | Callable[[Any, Record], None]] = option(())
    progress: bool | str = option(True)
    directory: Path | None = option(
        None,
        Flag(Path, "Where records and checkpoints go; DIRECTORY/run by default.", name="out"),
    )
    resume: bool = option(False, Flag(bool, "Go on from the last checkpoint."))
    checkpoint_every: int | None = option(None, Flag(int, "Steps between checkpoints."))
    keep: int = option(3, Flag(int, "How many of the last checkpoints stay."))
    monitor: str | None = option(None, Flag(str, "By what the best epoch is chosen."))
    patience: int | None = option(None, Flag(int, "End after so many epochs without a better one."))
    shuffle: bool = option(True)
    drop_last: bool = option(False)
    debug_nan: bool = option(False, Flag(bool, "Find the node that makes the first NaN."))
    tensorboard: bool | None = option(None)

    def __post_init__(self) -> None:
        if self.directory is not None:
            object.__setattr__(self, "directory", Path(self.directory))


__all__ = ["FitOptions"]
