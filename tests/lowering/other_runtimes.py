"""Run the zoo in tract or OpenCV: ``python -m tests.lowering.other_runtimes RUNTIME``.

Lowers each model for batch 1 to the runtime's profile. The runner of ``onnxtrain probe`` runs the
original and the lowered model with the given Python interpreter, which has the runtime.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxtrain.errors import OnnxTrainError
from onnxtrain.lowering.lower import lower
from onnxtrain.lowering.probe.pack import FORMAT, _tensor, run_pack
from onnxtrain.lowering.probe.results import read_results
from tests.zoo.export import export, input_names
from tests.zoo.models import ZOO

from .onnxjs_zoo import batch_of_one
from .single import run

PROFILES = {"tract": "tract-0.23.9", "opencv": "opencv-5.0.0"}


def outcomes(
    runtime: str, python: str, names: list[str], folder: Path
) -> dict[str, tuple[str, str]]:
    """Return the outcomes of each model: (original, lowered)."""
    (folder / "models").mkdir()
    nodes: list[dict[str, Any]] = []
    lowering_errors = {}
    for name in names:
        entry = ZOO[name]
        model = export(entry).model
        feeds = dict(zip(input_names(entry), (x.numpy() for x in entry.inputs(1)), strict=True))
        expected = run(model, feeds)
        nodes.append(_entry(folder, name, "original", model, feeds, expected))
        try:
            lowered = lower(model, PROFILES[runtime], dims=batch_of_one(model), verify=False)
        except OnnxTrainError as error:
            lowering_errors[name] = "not lowered: " + " / ".join(str(error).splitlines()[:3])
            continue
        nodes.append(_entry(folder, name, "lowered", lowered, feeds, expected))
    manifest = {"format": FORMAT, "onnx": onnx.__version__, "opsets": [], "nodes": nodes}
    (folder / "pack.json").write_text(json.dumps(manifest))
    run_pack(folder, runtime, folder / "results.json", python=python)
    results = read_results(folder / "results.json")["results"]
    pairs = {}
    for name in names:
        before, after = (results.get(f"{name} {kind}") for kind in ("original", "lowered"))
        pairs[name] = (_describe(before), lowering_errors.get(name) or _describe(after))
    return pairs


def _entry(
    folder: Path,
    name: str,
    kind: str,
    model: onnx.ModelProto,
    feeds: dict[str, np.ndarray],
    expected: list[np.ndarray],
) -> dict[str, Any]:
    file = f"models/{name} {kind}.onnx"
    (folder / file).write_bytes(model.SerializeToString())
    outputs = zip((y.name for y in model.graph.output), expected, strict=True)
    inputs = {x.name for x in model.graph.input}
    return {
        "id": f"{name} {kind}",
        "file": file,
        "inputs": [_tensor(k, v) for k, v in feeds.items() if k in inputs],
        "outputs": [_tensor(k, v) for k, v in outputs],
    }


def _describe(result: dict[str, Any] | None) -> str:
    assert result is not None
    return f"{result['status']}: {result['message']}" if "message" in result else result["status"]


def main(arguments: list[str]) -> int:
    """Print the outcome of each model and the counts; return 1 if a lowered model is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.lowering.other_runtimes")
    parser.add_argument("runtime", choices=sorted(PROFILES))
    parser.add_argument("names", nargs="*", metavar="NAME", help="models (default: all)")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the runtime")
    options = parser.parse_args(arguments)
    names = options.names or list(ZOO)
    with tempfile.TemporaryDirectory() as folder:
        pairs = outcomes(options.runtime, options.python, names, Path(folder))
    for name, (before, after) in pairs.items():
        print(f"{name:26} {before[:60]:60} {after[:200]}")
    for i, kind in enumerate(("original", "lowered")):
        print(kind, dict(Counter(pair[i].partition(":")[0] for pair in pairs.values())))
    return int(any(after.startswith("wrong") for _, after in pairs.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
