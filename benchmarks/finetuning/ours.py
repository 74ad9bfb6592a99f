"""The onnxtrain side: a prebuilt directory, trained step by step."""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.finetuning.serve import device_memory, serve
from onnxtrain.training import Trainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("data")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    on_device = None if args.device == "cpu" else device_memory()
    trainer = Trainer(args.folder, threads=args.threads, device=args.device)
    with np.load(args.data) as file:
        batch = {n: file[n] for n in trainer.inputs}
    serve(lambda: float(trainer.step(**batch).loss), on_device)


if __name__ == "__main__":
    main()
