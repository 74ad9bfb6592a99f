"""A training run that is killed: ``python -m tests.training.victim ARTIFACTS FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from onnxtrain.training import Trainer

EPOCHS, SAMPLES, BATCH = 3, 104, 8


def samples() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((SAMPLES, 4, 5)).astype(np.float32)
    return {"x": x, "target": x.reshape(SAMPLES, -1)[:, :3].copy()}


def train(artifacts: str, folder: str, *, every: int = 2) -> None:
    """Train to the end, from the last checkpoint in ``folder`` if there is one."""
    trainer = Trainer(artifacts, seed=11, threads=1)
    trainer.fit(
        samples(),
        epochs=EPOCHS,
        batch_size=BATCH,
        validation=samples(),
        schedule="cosine",
        warmup=5,
        directory=folder,
        resume=True,
        checkpoint_every=every,
        patience=50,
        progress=False,
    )
    trainer.save(Path(folder) / "end")


if __name__ == "__main__":
    train(*sys.argv[1:])
