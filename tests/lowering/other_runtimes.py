"""The zoo in tract and OpenCV: ``python -m tests.lowering.other_runtimes tract --python PYTHON``.

Models are lowered for batch 1 to the runtime's profile, and run there by the runner of
``onnxtrain probe``; the Python given has the runtime. Un-lowered models are run beside them.
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
    """What becomes of each model: as it is, and lowered."""
    (folder / "models").mkdir()
    nodes: list[dict[str, Any]] = []
    failed = {}
    for name in names:
        entry = ZOO[name]
        model = export(entry).model
        feeds = dict(zip(input_names(entry), (x.numpy() for x in entry.inputs(1)), strict=True))
        expected = run(model, feeds)
        nodes.append(_entry(folder, name, "as it is", model, feeds, expected))
        try:
            small = lower(model, PROFILES[runtime], dims=batch_of_one(model), verify=False)
        except OnnxTrainError as error:
            failed[name] = "not lowered: " + " / ".join(str(error).splitlines()[:3])
            continue
        nodes.append(_entry(folder, name, "lowered", small, feeds, expected))
    listing = {"format": FORMAT, "onnx": onnx.__version__, "opsets": [], "nodes": nodes}
    (folder / "pack.json").write_text(json.dumps(listing))
    run_pack(folder, runtime, folder / "results.json", python=python)
    results = read_results(folder / "results.json")["results"]
    pairs = {}
    for name in names:
        before, after = (results.get(f"{name} {how}") for how in ("as it is", "lowered"))
        pairs[name] = (_words(before), failed.get(name) or _words(after))
    return pairs


def _entry(
    folder: Path,
    name: str,
    how: str,
    model: onnx.ModelProto,
    feeds: dict[str, np.ndarray],
    expected: list[np.ndarray],
) -> dict[str, Any]:
    file = f"models/{name} {how}.onnx"
    (folder / file).write_bytes(model.SerializeToString())
    outputs = zip((y.name for y in model.graph.output), expected, strict=True)
    read = {x.name for x in model.graph.input}
    return {
        "id": f"{name} {how}",
        "file": file,
        "inputs": [_tensor(k, v) for k, v in feeds.items() if k in read],
        "outputs": [_tensor(k, v) for k, v in outputs],
    }


def _words(result: dict[str, Any] | None) -> str:
    assert result is not None
    return f"{result['status']}: {result['message']}" if "message" in result else result["status"]


def main(arguments: list[str]) -> int:
    """Print what becomes of each model, and the counts; 1 if a lowered one is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.lowering.other_runtimes")
    parser.add_argument("runtime", choices=sorted(PROFILES))
    parser.add_argument("names", nargs="*", metavar="NAME", help="models (default: all)")
    parser.add_argument("--python", default=sys.executable, help="that has the runtime")
    options = parser.parse_args(arguments)
    names = options.names or list(ZOO)
    with tempfile.TemporaryDirectory() as folder:
        pairs = outcomes(options.runtime, options.python, names, Path(folder))
    for name, (before, after) in pairs.items():
        print(f"{name:26} {before[:60]:60} {after[:200]}")
    for i, how in enumerate(("as it is", "lowered")):
        print(how, dict(Counter(pair[i].partition(":")[0] for pair in pairs.values())))
    return int(any(after.startswith("wrong") for _, after in pairs.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
