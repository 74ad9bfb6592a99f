"""The zoo in real onnxjs 0.1.8: lowered and un-lowered models, all in one Node process."""

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
    """What onnxjs makes of one model: ``right``, ``wrong``, ``refused`` or ``not lowered``."""

    status: str
    note: str = ""
    nodes: int = 0


def why_not() -> str:
    """Why onnxjs cannot be run here, nothing if it can."""
    if not shutil.which("node"):
        return "node is not installed"
    installed = (FOLDER / "node_modules" / "onnxjs").is_dir()
    return "" if installed else "onnxjs is not installed: run `make onnxjs`"


def in_onnxjs(
    names: Iterable[str], folder: Path, *, verify: bool = False
) -> dict[str, tuple[Outcome, Outcome]]:
    """Lower models for batch 1 and run them; return the outcome of the original and the lowered."""
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
            small = lower(model, PROFILE, dims=batch_of_one(model), verify=verify)
        except OnnxTrainError as error:
            lowered[name] = Outcome("not lowered", str(error))
            continue
        lowered[name] = Outcome("", nodes=len(small.graph.node))
        jobs.append(_job(folder / f"{name}-lowered.onnx", small, inputs))
    answers = iter(_run(jobs, folder / "jobs.json"))
    outcomes = {}
    for name, outputs in expected.items():
        first = _outcome(next(answers), outputs)
        second = lowered[name]
        if not second.status:
            second = _outcome(next(answers), outputs, second.nodes)
        outcomes[name] = (first, second)
    return outcomes


def batch_of_one(model) -> dict[str, int]:
    """1 for each symbolic size of the inputs."""
    dims = (d for x in model.graph.input for d in x.type.tensor_type.shape.dim)
    return {d.dim_param: 1 for d in dims if d.dim_param}


def _tensor(v: np.ndarray) -> dict[str, Any]:
    data = v.astype(float).ravel().tolist()
    return {"type": _TYPES[v.dtype.kind], "dims": v.shape, "data": data}


def _job(path: Path, model, inputs: list[dict[str, Any]]) -> dict[str, Any]:
    path.write_bytes(model.SerializeToString())
    return {"model": str(path), "inputs": inputs}


def _run(jobs: list[dict[str, Any]], listing: Path) -> list[dict[str, Any]]:
    listing.write_text(json.dumps(jobs))
    done = subprocess.run(
        ["node", FOLDER / "run.cjs", listing, "cpu"],
        capture_output=True,
        text=True,
        check=True,
        timeout=1200,
        env={**os.environ, "NODE_PATH": str(FOLDER / "node_modules")},
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _outcome(answer: dict[str, Any], expected: list[np.ndarray], nodes: int = 0) -> Outcome:
    if "error" in answer:
        return Outcome("refused", answer["error"], nodes)
    for a, y in zip(expected, answer["outputs"], strict=True):
        b = np.asarray([float(v) for v in y["data"]]).reshape(y["dims"])
        scale = max(float(np.abs(a).max(initial=0)), 1e-3) if a.dtype.kind == "f" else 0
        if a.shape != b.shape or not np.allclose(b, a, rtol=1e-3, atol=1e-3 * scale):
            return Outcome("wrong", f"output {y['name']!r} differs", nodes)
    return Outcome("right", nodes=nodes)
