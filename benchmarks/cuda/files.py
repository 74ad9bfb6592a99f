"""Train ONNX files on a GPU and on the CPU, and compare losses and every parameter.

    python -m benchmarks.cuda.files FOLDER --json files.json

Each file is built for both, with the mean square of its float outputs as its loss, and trained on
the same random batches with AdamW; sizes are fixed, so that steps are captured, or left free with
``--free``. TF32 is off. A row lists whether the step was captured, which nodes left the GPU, and
the errors.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")

import numpy as np
import onnx

import onnxtrain
from onnxtrain import optim
from onnxtrain.runtime.session import placement

STEPS, ROWS = 5, 4
_FLOATS = ("FLOAT", "DOUBLE", "FLOAT16")


def mean_square(op: Any, *outputs: Any) -> Any:
    """Return the mean square of every float output, added up."""
    total = None
    for y in outputs:
        if y.dtype is not None and y.dtype.name in _FLOATS:
            term = op.ReduceMean(op.Mul(y, y), keepdims=0)
            total = term if total is None else op.Add(total, term)
    return total


def batches(trainer: onnxtrain.Trainer) -> list[dict[str, np.ndarray]]:
    """Return random inputs for some steps."""
    rng, made = np.random.default_rng(0), []
    for _ in range(STEPS):
        batch = {}
        for t in trainer.batch_specs:
            shape = [d if isinstance(d, int) else ROWS for d in t.shape]
            if t.dtype.startswith("float"):
                batch[t.name] = rng.standard_normal(shape).astype(t.dtype)
            else:
                batch[t.name] = rng.integers(0, 2, shape).astype(t.dtype)
        made.append(batch)
    return made


def check(path: Path, *, free: bool, device: str) -> dict[str, Any]:
    """Train a file on both; return what was seen."""
    row: dict[str, Any] = {"file": path.name.rsplit("-", 1)[0], "free": free}
    symbols = {
        d.dim_param for i in onnx.load(path).graph.input for d in i.type.tensor_type.shape.dim
    } - {""}
    trainers = {}
    try:
        for target in ("cpu", "cuda"):
            artifacts = onnxtrain.build(
                path,
                loss=mean_square,
                optimizer=optim.AdamW(lr=1e-3),
                target=target,
                dims=None if free else dict.fromkeys(symbols, ROWS),
            )
            where = device if target == "cuda" else "cpu"
            trainers[target] = onnxtrain.Trainer(artifacts, device=where, threads=4)
        losses = collections.defaultdict(list)
        for batch in batches(trainers["cpu"]):
            for target, trainer in trainers.items():
                losses[target].append(float(trainer.step(**batch).loss))
        row["captured"] = trainers["cuda"].captured
        row["loss"] = max(
            abs(a - b) / max(abs(a), 1e-6)
            for a, b in zip(losses["cpu"], losses["cuda"], strict=True)
        )
        row["parameters"] = worst(*(t.parameters for t in trainers.values()))
        row["left"] = [
            n
            for source in trainers["cuda"].step_models
            for n in placement(source, device=device).left
        ]
    except Exception as error:  # whatever stops a file is its row
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    return row


def worst(a: Any, b: Any) -> float:
    """Return the largest difference of a parameter, in units of the steps taken."""
    return max((float(np.abs(a[n] - b[n]).max()) for n in a if a[n].size), default=0.0) / 1e-3


def main() -> None:
    """Check all files of a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--free", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--part", default="0/1", help="the k-th of n parts of the files")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    at, parts = map(int, args.part.split("/"))
    rows = []
    for path in sorted(args.folder.glob("*.onnx"))[at::parts]:
        start = time.perf_counter()
        row = check(path, free=args.free, device=args.device)
        row["s"] = round(time.perf_counter() - start, 1)
        rows.append(row)
        bad = "error" in row or row["left"] or row["loss"] > 1e-3
        print("BAD " if bad else "ok  ", json.dumps(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
