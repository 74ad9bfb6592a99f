"""Every workload as files that every engine reads: the model, its first weights, a batch.

    python -m benchmarks.prepare            # all, into .cache/bench/models
    python -m benchmarks.prepare mlp cnn

The model is exported once by ``onnxtrain.torch.from_torch``. ``model.onnx`` keeps the batch
symbolic, ``static.onnx`` has it fixed, which is what all engines get; ``state.npz`` holds the
module's weights under its own names, ``batch.npz`` the data. Made again when the nets change.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from benchmarks.workloads import WORKLOADS, Workload

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "bench"
MODELS = CACHE / "models"
FORMAT = 1  # of the files made here


def key() -> str:
    """Give what changes whenever the files have to be made again."""
    found = hashlib.sha256()
    for path in sorted((ROOT / "benchmarks" / "workloads").glob("*.py")):
        found.update(path.read_bytes())
    found.update(str(FORMAT).encode())
    return found.hexdigest()


def prepared(workload: Workload) -> Path:
    """Give the folder with the files of a workload, made if they are missing or old."""
    folder = MODELS / workload.name
    mark = folder / "key.json"
    if mark.exists() and json.loads(mark.read_text())["key"] == key():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    _export(workload, folder)
    mark.write_text(json.dumps({"key": key()}))
    return folder


def _export(workload: Workload, folder: Path) -> None:
    import onnx_ir as ir
    import torch

    from onnxtrain.graph.specialise import specialise
    from onnxtrain.torch import from_torch

    module = workload.module()
    x, labels = workload.batch()
    np.savez(folder / "batch.npz", x=x, labels=labels)
    np.savez(folder / "state.npz", **{n: t.numpy() for n, t in module.state_dict().items()})
    axes = [{workload.batch_axis: "batch"}]
    model = from_torch(module, torch.from_numpy(x), names=["x"], dynamic_shapes=axes)
    ir.save(model, folder / "model.onnx")
    ir.save(specialise(model, workload.dims()), folder / "static.onnx")


def main() -> None:
    for name in sys.argv[1:] or WORKLOADS:
        print(f"{name}: {prepared(WORKLOADS[name]).relative_to(ROOT)}", flush=True)


if __name__ == "__main__":
    main()
