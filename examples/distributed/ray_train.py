"""Ray Train runs the workers; the trainer joins the process group that Ray has made.

pip install "ray[train]"
python examples/distributed/ray_train.py art train.npz --workers 2
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def work(options: dict[str, Any]) -> None:
    """Train in one worker."""
    from onnxtrain import Trainer

    trainer = Trainer(options["artifacts"], distributed=True, threads=1)
    trainer.fit(options["data"], epochs=2, batch_size=64, directory=options["out"], resume=True)


def main() -> None:
    """Start the workers on the cluster, or on this machine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifacts", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/ray"))
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    settings = {n: str(getattr(options, n).absolute()) for n in ("artifacts", "data", "out")}
    scaling = ScalingConfig(num_workers=options.workers)
    TorchTrainer(work, train_loop_config=settings, scaling_config=scaling).fit()


if __name__ == "__main__":
    main()
