"""Run the zoo in onnxjs 0.1.8: lowered and original models, all in one Node process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.errors import OnnxTrainError
from onnxtrain.lowering.lower import lower
from tests.zoo.export import export, input_names
from tests.zoo.models import ZOO

from .single import run

FOLDER = Path(__file__).parent / "onnxjs"
PROFILE = "onnxjs-0.1.8-cpu"
_TYPES = {"f": "float32", "i": "int32", "b": "bool"}


@dataclass(frozen=True)
class Outcome:
    """Outcome of one model in onnxjs: ``right``, ``wrong``, ``refused`` or ``not lowered``."""

    status: str
    note: str = ""
    nodes: int = 0


def why_unavailable() -> str:
    """Return why onnxjs cannot run here, or an empty string if it can."""
    if not shutil.which("node"):
        return "node is not installed"
    installed = (FOLDER / "node_modules" / "onnxjs").is_dir()
    return "" if installed else "onnxjs is not installed: run `make onnxjs`"


def in_onnxjs(
    names: Iterable[str], folder: Path, *, verify: bool = False
) -> dict[str, tuple[Outcome, Outcome]]:
    """Lower models for batch 1 and run them; return the outcomes (original, lowered)."""
    jobs: list[dict[str, Any]] = []
    expected: dict[str, list[np.ndarray]] = {}
    lowered: dict[str, Outcome] = {}
    for name in names:
        entry = ZOO[name]
        model = export(entry).model
        values = [x.numpy() for x in entry.inputs(1)]
        expected[name] = run(model, dict(zip(input_names(entry), values, strict=True)))
        inputs = [_tensor(v) for v in values]
        jobs.append(_job(folder / f"{name}.onnx", model, inputs))
        try:
            lowered_model = lower(model, PROFILE, dims=batch_of_one(model), verify=verify)
        except OnnxTrainError as error:
            lowered[name] = Outcome("not lowered", str(error))
            continue
        lowered[name] = Outcome("", nodes=len(lowered_model.graph.node))
        jobs.append(_job(folder / f"{name}-lowered.onnx", lowered_model, inputs))
    answers = iter(_run(jobs, folder / "jobs.json"))
    outcomes = {}
    for name, outputs in expected.items():
        original = _outcome(next(answers), outputs)
        outcome = lowered[name]
        if not outcome.status:
            outcome = _outcome(next(answers), outputs, outcome.nodes)
        outcomes[name] = (original, outcome)
    return outcomes


def batch_of_one(model) -> dict[str, int]:
    """Return size 1 for each symbolic dimension of the inputs."""
    dims = (d for x in model.graph.input for d in x.type.tensor_type.shape.dim)
    return {d.dim_param: 1 for d in dims if d.dim_param}


def _tensor(v: np.ndarray) -> dict[str, Any]:
    data = v.astype(float).ravel().tolist()
    return {"type": _TYPES[v.dtype.kind], "dims": v.shape, "data": data}


def _job(path: Path, model, inputs: list[dict[str, Any]]) -> dict[str, Any]:
    path.write_bytes(model.SerializeToString())
    return {"model": str(path), "inputs": inputs}


def _run(jobs: list[dict[str, Any]], job_file: Path) -> list[dict[str, Any]]:
    job_file.write_text(json.dumps(jobs))
    process = subprocess.run(
        ["node", FOLDER / "run.cjs", job_file, "cpu"],
        capture_output=True,
        text=True,
        check=True,
        timeout=1200,
        env={**os.environ, "NODE_PATH": str(FOLDER / "node_modules")},
    )
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]


def _outcome(answer: dict[str, Any], expected: list[np.ndarray], nodes: int = 0) -> Outcome:
    if "error" in answer:
        return Outcome("refused", answer["error"], nodes)
    for a, y in zip(expected, answer["outputs"], strict=True):
        b = np.asarray([float(v) for v in y["data"]]).reshape(y["dims"])
        scale = max(float(np.abs(a).max(initial=0)), 1e-3) if a.dtype.kind == "f" else 0
        if a.shape != b.shape or not np.allclose(b, a, rtol=1e-3, atol=1e-3 * scale):
            return Outcome("wrong", f"output {y['name']!r} differs", nodes)
    return Outcome("right", nodes=nodes)
