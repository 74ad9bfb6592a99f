"""Hashes of all that is built from the zoo.

``python -m tests.zoo.fingerprints OUT [--against OLD]`` records them. A change that only moves or
renames code leaves every hash as it was. With ``--against`` the entries that differ from
an earlier run are listed, and the exit code says whether there are any.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx

import onnxtrain
from onnxtrain import optim
from onnxtrain.compat.ort.artifacts import LossType, OptimType, generate_artifacts
from onnxtrain.errors import OnnxTrainError

from .export import export
from .models import ZOO, ZooModel

TARGETS = ("cpu", "cuda", "wasm", "webgpu", "portable")
OPTIONS: dict[str, dict] = {
    "bf16": {"precision": "bf16-mixed"},
    "fp16": {"precision": "fp16-mixed"},
    "recompute": {"recompute": "auto"},
    "clipped": {"clip": 1.0, "ema": 0.99, "accumulate": 2, "metrics": ("grad_norm",)},
    "lion": {"optimizer": "lion"},
    "sgd": {"optimizer": "sgd"},
    "steps": {"steps_per_call": 8},
    "web": {"target": "web"},
    "native": {"randomness": "native"},
    "frozen": {"mode": "as-is"},
}
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)


def mean_square(op, *outputs):
    """Return the mean square of every float output, added up."""
    total = None
    for y in outputs:
        if y.dtype is not None and y.dtype.value in _FLOATS:
            term = op.ReduceMean(op.Mul(y, y), keepdims=0)
            total = term if total is None else op.Add(total, term)
    return total


def digest(data: bytes) -> str:
    """Return the first 16 hexadecimal digits of the data's sha256."""
    return hashlib.sha256(data).hexdigest()[:16]


def of_model(model: onnx.ModelProto) -> str:
    """Return the digest of a model's bytes."""
    return digest(model.SerializeToString(deterministic=True))


def of_artifacts(artifacts: onnxtrain.Artifacts) -> dict[str, str]:
    """Return the digest of every file that ``save`` writes."""
    with tempfile.TemporaryDirectory() as folder:
        artifacts.save(folder)
        files = sorted(p for p in Path(folder).rglob("*") if p.is_file())
        hashes = {p.relative_to(folder).as_posix(): digest(p.read_bytes()) for p in files}
    # Every file repeats the manifest, so that a change there hides whether a graph changed.
    return hashes | {f"graph {key}": of_model(m) for key, m in artifacts.models.items()}


def entries(entry: ZooModel, mode: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a label and what computes its digests, for all that is recorded of one zoo model."""
    exported = export(entry, mode)
    model, wrt = exported.model, list(exported.names.values())
    dims = _batch(model)

    def build(**options):
        asked = {"loss": mean_square, "optimizer": "adamw", **options}
        return onnxtrain.build(model, **asked)

    for target in TARGETS:
        yield f"build/{target}", lambda target=target: of_artifacts(build(target=target))
        yield (
            f"vjp/{target}",
            lambda target=target: of_model(onnxtrain.vjp(model, wrt, target=target)),
        )
        yield f"grad/{target}", lambda target=target: _grad(build(target=target), target)
    yield "split/cpu", lambda: _split(onnxtrain.split(model, wrt))
    yield "split/webgpu", lambda: _split(onnxtrain.split(model, wrt, target="webgpu"))
    if dims:
        for target in ("cpu", "cuda"):
            yield (
                f"build/{target}/fixed",
                lambda target=target: of_artifacts(build(target=target, dims=dims)),
            )
    if entry.fast:
        yield "jvp/cpu", lambda: of_model(onnxtrain.jvp(model, wrt))
        if len(model.graph.output) == 1:
            yield "ort", lambda: _ort(model, wrt)
        for name, options in OPTIONS.items():
            yield f"build/{name}", lambda options=options: of_artifacts(build(**options))
        if _classifies(model):
            for target in TARGETS:
                yield (
                    f"build/{target}/labels",
                    lambda target=target: of_artifacts(
                        build(target=target, loss="cross_entropy", metrics=("accuracy",))
                    ),
                )
        for optimizer in (optim.SGD(lr=0.01), optim.AdamW(lr=0.001)):
            yield (
                f"train/{type(optimizer).__name__}",
                lambda optimizer=optimizer: _train(entry, build(optimizer=optimizer)),
            )


def _batch(model: onnx.ModelProto) -> dict[str, int]:
    """Return a size for every symbolic batch axis."""
    firsts = (x.type.tensor_type.shape.dim for x in model.graph.input)
    return {d[0].dim_param: 16 for d in firsts if d and d[0].dim_param}


def _classifies(model: onnx.ModelProto) -> bool:
    (first, *rest) = model.graph.output
    dims = first.type.tensor_type.shape.dim
    return not rest and len(dims) == 2 and dims[1].dim_value > 1


def _grad(artifacts: onnxtrain.Artifacts, target: str) -> str:
    names = [p.name for p in artifacts.manifest.parameters]
    return of_model(onnxtrain.grad(artifacts.models["eval"], names, "loss", target=target))


def _split(halves: onnxtrain.Split) -> dict[str, str]:
    return {"forward": of_model(halves.forward), "backward": of_model(halves.backward)}


def _train(entry: ZooModel, artifacts: onnxtrain.Artifacts) -> dict[str, str]:
    """Return digests of losses and parameters after three steps on the CPU."""
    trainer = onnxtrain.Trainer(artifacts, threads=1)
    losses = []
    for _ in range(3):
        inputs = entry.inputs(entry.batches[0])
        batch = {
            x.name: value.detach().numpy()
            for x, value in zip(_inputs(artifacts), inputs, strict=True)
        }
        losses.append(float(trainer.step(**batch).loss))
    models = [m if isinstance(m, bytes) else Path(m).read_bytes() for m in trainer.step_models]
    parameters = trainer.parameters
    text = b"".join(np.ascontiguousarray(parameters[n]).tobytes() for n in sorted(parameters))
    return {
        "losses": digest(np.array(losses).tobytes()),
        "models": " ".join(map(digest, models)),
        "parameters": digest(text),
    }


def _ort(model: onnx.ModelProto, wrt: list[str]) -> dict[str, str]:
    """Return the digests of what the home for onnxruntime-training writes."""
    with tempfile.TemporaryDirectory() as folder:
        generate_artifacts(
            model,
            requires_grad=wrt,
            loss=LossType.MSELoss,
            optimizer=OptimType.AdamW,
            artifact_directory=folder,
        )
        return {p.name: digest(p.read_bytes()) for p in sorted(Path(folder).iterdir())}


def _inputs(artifacts: onnxtrain.Artifacts):
    (spec,) = (m for m in artifacts.manifest.models if m.role == "train")
    return [x for x in spec.inputs if x.role == "input"]


def record(name: str, mode: str) -> tuple[str, dict[str, object]]:
    """Return the digests of one zoo model; a refusal counts by the digest of its message."""
    digests: dict[str, object] = {}
    for label, compute in entries(ZOO[name], mode):
        try:
            digests[label] = compute()
        except OnnxTrainError as error:
            digests[label] = f"{type(error).__name__} {digest(str(error).encode())}"
    return f"{name}-{mode}", digests


def differences(old: dict, new: dict) -> list[str]:
    """Return what is not the same in two records, by path."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            f"{key}/{below}" if below else key
            for key in sorted({*old, *new})
            for below in _below(old.get(key), new.get(key))
        ]
    return []


def _below(old, new) -> list[str]:
    if old == new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        return differences(old, new)
    return [""]


def main(arguments: list[str]) -> int:
    """Record, compare if asked to, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.fingerprints")
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path, help="a record to compare with")
    parser.add_argument("--names", nargs="*", help="zoo models (default: all)")
    parser.add_argument("--fast", action="store_true", help="only the subset that pytest runs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    chosen = [z for z in ZOO.values() if not options.names or z.name in options.names]
    chosen = [z for z in chosen if z.fast or not options.fast]
    jobs = [(z.name, mode) for z in chosen for mode in z.modes]
    start = time.monotonic()
    with concurrent.futures.ProcessPoolExecutor(
        options.jobs, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        pending = [pool.submit(record, *job) for job in jobs]
        records = {}
        for task in concurrent.futures.as_completed(pending):
            key, value = task.result()
            records[key] = value
            options.out.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")
            print(f"{time.monotonic() - start:7.1f} s  {key}: {len(value)} entries", flush=True)
    if options.against is None:
        return 0
    before = json.loads(options.against.read_text())
    paths = differences({k: before[k] for k in records if k in before}, records)
    print("\n".join(paths) or "equal")
    entries_count = sum(map(len, records.values()))
    print(f"{len(records)} models, {entries_count} entries, {len(paths)} differences")
    return 1 if paths else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
