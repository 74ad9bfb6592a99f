"""Our side: a directory that was built before, trained step by step."""

from __future__ import annotations

import argparse
import subprocess

import numpy as np

from benchmarks.finetuning.serve import serve
from onnxtrain.training import Trainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("data")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    trainer = Trainer(args.folder, threads=args.threads, device=args.device)
    with np.load(args.data) as file:
        batch = {n: file[n] for n in trainer.inputs}
    on_device = None if args.device == "cpu" else device_memory
    serve(lambda: float(trainer.step(**batch).loss), on_device)


def device_memory() -> float:
    """Return the MB that are taken on the device now, by anybody: run alone there."""
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(
        subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
    )


if __name__ == "__main__":
    main()
