"""onnxruntime-training 1.19.2: its own artifacts, Module and Optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnxruntime.training import api, artifacts, onnxblock

from benchmarks.workers.serve import Engine, first_use, serve

# The outputs that its gradients read; it refuses nodes that leave them out.
_WANTED = {"LayerNormalization": 3}


class OrtTraining(Engine):
    """The on-device training API, with AdamW's numbers set to torch's."""

    def build(self, folder: Path, made: Path, optimizer: str) -> None:
        """Write its artifacts."""
        model = onnx.load(str(folder / "opset17.onnx"))
        for i, node in enumerate(model.graph.node):
            for k in range(len(node.output), _WANTED.get(node.op_type, 0)):
                node.output.append(f"extra_{i}_{k}")
        trained = (folder / "parameters.txt").read_text().split()
        known = {t.name for t in model.graph.initializer}
        block = (
            onnxblock.optim.SGD()
            if optimizer == "sgd"
            else onnxblock.optim.AdamW(eps=1e-8, weight_decay=0.01)
        )
        artifacts.generate_artifacts(
            model,
            requires_grad=[n for n in trained if n in known],
            frozen_params=sorted(known.difference(trained)),
            loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=block,
            artifact_directory=str(made),
        )

    def load(self, folder: Path, made: Path, optimizer: str, threads: int, **facts: Any) -> None:
        """Make its sessions."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4
        options.add_session_config_entry("session.set_denormal_as_zero", "1")
        self.state = api.CheckpointState.load_checkpoint(str(made / "checkpoint"))
        # Without its evaluation model, which is not valid where there is batch normalization.
        self.module = api.Module(
            str(made / "training_model.onnx"), self.state, session_options=options
        )
        self.optimizer = api.Optimizer(str(made / "optimizer_model.onnx"), self.module)
        self.module.train()
        with np.load(folder / "batch.npz") as data:
            self.batch = data["x"], data["labels"]

    def step(self, lr: float) -> float:
        """Train one step."""
        self.optimizer.set_learning_rate(lr)
        loss = self.module(*self.batch)
        self.optimizer.step()
        self.module.lazy_reset_grad()
        return float(loss)

    def versions(self) -> dict[str, str]:
        """Return the versions that matter."""
        return {"onnxruntime-training": onnxruntime.__version__, "onnx": onnx.__version__}


if __name__ == "__main__":
    first_use(onnxruntime)
    serve(OrtTraining())
