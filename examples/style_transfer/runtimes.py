"""Run models in onnxjs 0.1.8 and onnxruntime-web."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

HERE = Path(__file__).resolve().parent
MODULES = Path(
    os.environ.get("ONNXJS_MODULES", HERE.parents[1] / "tests/lowering/onnxjs/node_modules")
)
ENGINES = {
    "onnxjs, Node": ["onnxjs.cjs", "cpu"],
    "onnxruntime-web, Chromium": ["browser.mjs", "ort"],
    "onnxjs WebGL, Chromium": ["browser.mjs", "onnxjs"],
}


@dataclass(frozen=True)
class Result:
    """The output of a model in a runtime, or the error."""

    output: np.ndarray | None
    milliseconds: float = 0.0
    """Time of the fastest run."""
    error: str = ""


def run(
    engine: str, models: list[onnx.ModelProto], image: np.ndarray, repeat: int = 1, limit: int = 900
) -> list[Result]:
    """Run models with one input in a runtime, each in its own session."""
    script, argument = ENGINES[engine]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        image.astype(np.float32).tofile(folder / "image")
        jobs = []
        for i, model in enumerate(models):
            onnx.save(model, folder / f"{i}.onnx")
            jobs.append(
                {
                    "model": str(folder / f"{i}.onnx"),
                    "input": str(folder / "image"),
                    "output": str(folder / f"{i}.out"),
                    "dims": image.shape,
                    "repeat": repeat,
                }
            )
        (folder / "jobs.json").write_text(json.dumps(jobs))
        done = subprocess.run(
            ["node", HERE / "runners" / script, folder / "jobs.json", argument],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=limit,
            env={**os.environ, "NODE_PATH": str(MODULES)},
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return [
            Result(None, error=line["error"])
            if "error" in line
            else Result(np.fromfile(folder / f"{i}.out", np.float32), line["ms"])
            for i, line in enumerate(lines)
        ]
