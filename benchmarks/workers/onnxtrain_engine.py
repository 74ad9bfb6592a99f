"""This project: artifacts built from the exported model, trained on stock onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

import onnxtrain
from benchmarks.workers.serve import Engine, first_use, serve


class Onnxtrain(Engine):
    """``build`` once, then a ``Trainer``, with defaults throughout."""

    def build(self, folder: Path, made: Path, optimizer: str) -> None:
        """Write artifacts."""
        artifacts = onnxtrain.build(
            str(folder / "static.onnx"), loss="cross_entropy", optimizer=optimizer
        )
        artifacts.save(made)

    def load(self, folder: Path, made: Path, optimizer: str, threads: int, **facts: Any) -> None:
        """Make the trainer."""
        self.trainer = onnxtrain.Trainer(made, threads=threads)
        with np.load(folder / "batch.npz") as data:
            self.batch = data["x"], data["labels"]

    def step(self, lr: float) -> float:
        """Train one step."""
        self.trainer.lr = lr
        return float(self.trainer.step(*self.batch).loss)

    def versions(self) -> dict[str, str]:
        """Return the versions that matter."""
        return {"onnxruntime": onnxruntime.__version__, "onnxtrain": onnxtrain.__version__}


if __name__ == "__main__":
    first_use(onnxruntime)
    serve(Onnxtrain())
