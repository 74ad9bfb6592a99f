"""Write the artifacts of the old official build for the same models; runs in its own venv.

Run as ``python official.py OUT`` with onnxruntime-training-cpu 1.19.2: for each model and optimizer
``OUT/<model>/official-<optimizer>/``.
"""

import json
import sys
from pathlib import Path

import onnx
from onnxruntime.training import artifacts  # pyright: ignore[reportMissingImports]

for folder in sorted(p.parent for p in Path(sys.argv[1]).glob("*/task.json")):
    names = [w["name"] for w in json.loads((folder / "task.json").read_text())["weights"]]
    for kind, optimizer in (
        ("adamw", artifacts.OptimType.AdamW),
        ("sgd", artifacts.OptimType.SGD),
    ):
        out = folder / f"official-{kind}"
        out.mkdir(exist_ok=True)
        model = onnx.load(folder / "model.onnx")
        for node in model.graph.node:  # its gradient wants the optional outputs
            if node.op_type == "LayerNormalization":
                node.output.extend(f"{node.output[0]}.{n}" for n in ("mean", "inv"))
        artifacts.generate_artifacts(
            model,
            requires_grad=names,
            loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=optimizer,
            artifact_directory=str(out),
        )
