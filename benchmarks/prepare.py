"""Write every workload as files for all engines: the model, its initial weights, a batch.

    python -m benchmarks.prepare            # all, growth curves included, into .cache/bench/models
    python -m benchmarks.prepare mlp cnn

The model is exported once by ``onnxtrain.torch.from_torch``. ``model.onnx`` keeps the batch
symbolic, ``static.onnx`` has it fixed, ``opset17.onnx`` is the same for engines without newer
operators. ``parameters.txt`` lists the trainable parameters, ``state.npz`` holds the module's
weights under its own names, ``batch.npz`` the data. Regenerated when the nets change.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from benchmarks.workloads import WORKLOADS, Workload, find, growth

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "bench"
MODELS = CACHE / "models"
FORMAT = 2  # of the files made here


def key(workload: Workload) -> str:
    """Return a cache key that changes whenever the files of a workload must be regenerated."""
    facts = (FORMAT, workload.name, workload.shape, workload.classes, workload.rows)
    digest = hashlib.sha256(repr(facts).encode())
    for path in sorted((ROOT / "benchmarks" / "workloads").glob("[!_]*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def prepared(workload: Workload) -> Path:
    """Return the folder with the files of a workload, made if they are missing or old."""
    folder = MODELS / workload.name
    mark = folder / "key.json"
    if mark.exists() and json.loads(mark.read_text())["key"] == key(workload):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    _export(workload, folder)
    mark.write_text(json.dumps({"key": key(workload)}))
    return folder


def _export(workload: Workload, folder: Path) -> None:
    import onnx
    import onnx_ir as ir
    import torch

    import onnxtrain
    from onnxtrain.graph.shapes.unknown import specialize
    from onnxtrain.torch import from_torch, last_report

    module = workload.module()
    x, labels = workload.batch()
    np.savez(folder / "batch.npz", x=x, labels=labels)
    np.savez(folder / "state.npz", **{n: t.numpy() for n, t in module.state_dict().items()})
    axes = [{workload.batch_axis: "batch"}]
    model = from_torch(module, torch.from_numpy(x), names=["x"], dynamic_shapes=axes)
    ir.save(model, folder / "model.onnx")
    names = dict.fromkeys(last_report(model).names.values())
    (folder / "parameters.txt").write_text("\n".join(names) + "\n")
    ir.save(specialize(model, workload.dims()), folder / "static.onnx")
    lowered = onnxtrain.lower(str(folder / "static.onnx"), opset=17, verify=False)
    onnx.save(lowered, folder / "opset17.onnx")


def main() -> None:
    for name in sys.argv[1:] or [*WORKLOADS, *growth.names()]:
        print(f"{name}: {prepared(find(name)).relative_to(ROOT)}", flush=True)


if __name__ == "__main__":
    main()
