"""Train artifacts on OpenVINO and print JSON: ``python inside.py FOLDER``, with its onnxruntime.

The folder has artifacts and a batch (``batch.npz``) for each net, and a checkpoint for ``resumed``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import onnxtrain
from onnxtrain.errors import OnnxTrainError
from onnxtrain.runtime.devices import find

STEPS = 20


def batch_of(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "batch.npz") as file:
        return dict(file)


def losses(trainer: onnxtrain.Trainer, batch: dict[str, np.ndarray], steps: int) -> list[float]:
    return [float(trainer.step(**batch).loss) for _ in range(steps)]


def train(folder: Path, device: str, **options: Any) -> list[float]:
    trainer = onnxtrain.Trainer(folder, device=device, threads=1, **options)
    return losses(trainer, batch_of(folder), STEPS)


def error_of(folder: Path, **options: Any) -> str:
    try:
        onnxtrain.Trainer(folder, device="openvino", **options)
    except OnnxTrainError as error:
        return str(error)
    return ""


def layouts(folder: Path) -> dict[str, Any]:
    """Train with accumulation of one batch in either layout, then evaluate and predict."""
    batch, found = batch_of(folder), {}
    for layout in ("fused", "separate"):
        trainer = onnxtrain.Trainer(
            folder, device="openvino", threads=1, layout=layout, verify=True
        )
        steps = losses(trainer, batch, 3)
        inputs = [batch[t.name] for t in trainer.batch_specs if t.role == "input"]
        prediction = trainer.predict(*inputs)["scores"]
        found[layout] = {
            "losses": steps,
            "evaluation": float(trainer.evaluate_batch(**batch).loss),
            "prediction": prediction.ravel()[:5].tolist(),
            "gradient": float(np.abs(trainer.gradients(**batch)["fc1.weight"]).sum()),
            "nodes": {k: p.counts for k, p in trainer.placement().items()},
        }
    return found


def resume(folder: Path) -> list[float]:
    """Continue from a checkpoint of the CPU, and write one for others."""
    trainer = onnxtrain.Trainer(folder, device="openvino", threads=1)
    trainer.load(folder / "cpu.safetensors")
    found = losses(trainer, batch_of(folder), 5)
    trainer.save(folder / "openvino.safetensors")
    return found


def main(folder: Path) -> None:
    nets = sorted(p.parent for p in folder.glob("nets/*/batch.npz"))
    results = {
        "nets": {p.name: [train(p, "openvino"), train(p, "cpu")] for p in nets},
        "layouts": layouts(folder / "resumed"),
        "resumed": resume(folder / "resumed"),
        "no such option": error_of(folder / "resumed", provider_options={"nonsense": "1"}),
        "no such hardware": error_of(folder / "resumed", provider_options={"device_type": "NPU"}),
        "tested": find("openvino").tested,
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
