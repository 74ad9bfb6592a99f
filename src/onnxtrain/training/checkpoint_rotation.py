"""The checkpoints of a run: the last few, and the best."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxtrain.errors import CheckpointError, OnnxTrainError
from onnxtrain.graph.io.atomic import named_refusal

if TYPE_CHECKING:
    from onnxtrain.training.trainer import Trainer

_NAME = re.compile(r"step-(\d{9,})\.safetensors")
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
        checkpoints = [(m, p) for p in paths if (m := _NAME.fullmatch(p.name))]
        return [p for _, p in sorted(checkpoints, key=lambda item: int(item[0][1]))]

    def newest(self) -> Path | None:
        """Return the last checkpoint."""
        return next(reversed(self.all()), None)

    def save(self, trainer: Trainer, extra: dict[str, Any]) -> Path:
        """Write a checkpoint, then remove what is too old."""
        self._make_folder()
        path = self.folder / f"step-{trainer.global_step:09d}.safetensors"
        trainer.save(path, extra)
        self._prune()
        return path

    def save_best(self, trainer: Trainer, extra: dict[str, Any]) -> Path:
        """Write the best checkpoint over the last best one."""
        self._make_folder()
        trainer.save(self.folder / BEST, extra)
        return self.folder / BEST

    def _make_folder(self) -> None:
        with named_refusal(str(self.folder)):
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
