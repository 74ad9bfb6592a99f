"""Train artifacts in as many processes as there are: one, or the workers of a launcher.

    onnxtrain example . && onnxtrain build model.onnx -o art --loss cross_entropy
    python examples/distributed/train.py art train.npz --out runs/one
    torchrun --nproc-per-node 2 examples/distributed/train.py art train.npz --out runs/two

Both runs have the same losses: ``batch_size`` counts the rows of all workers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from onnxtrain import Trainer


def main() -> None:
    """Train, and let worker 0 save the weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifacts", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of metrics and checkpoints")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: a GPU per worker")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="rows of all workers together")
    parser.add_argument("--shard-state", action="store_true", help="divide the optimizer state")
    options = parser.parse_args()
    trainer = Trainer(
        options.artifacts,
        device=options.device,
        distributed="auto",
        shard_state=options.shard_state,
    )
    trainer.fit(
        options.data,
        epochs=options.epochs,
        batch_size=options.batch_size,
        directory=options.out,
        resume=True,  # after torchrun --max-restarts has started the workers again
    )
    trainer.save(options.out / "trained.safetensors")


if __name__ == "__main__":
    main()
