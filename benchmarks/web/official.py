"""Writes the old official build's artifacts of the same models; runs in a venv of its own.

Run as ``python official.py OUT`` with onnxruntime-training-cpu 1.19.2: for each model and optimizer
``OUT/<model>/official-<optimizer>/``.
"""

import json
import sys
from pathlib import Path

import onnx
from onnxruntime.training import artifacts

for folder in sorted(p.parent for p in Path(sys.argv[1]).glob("*/task.json")):
    names = [w["name"] for w in json.loads((folder / "task.json").read_text())["weights"]]
    for kind, optimizer in (
        ("adamw", artifacts.OptimType.AdamW),
        ("sgd", artifacts.OptimType.SGD),
    ):
        out = folder / f"official-{kind}"
        out.mkdir(exist_ok=True)
        artifacts.generate_artifacts(
            onnx.load(folder / "model.onnx"),
            requires_grad=names,
            loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=optimizer,
            artifact_directory=str(out),
        )
