"""Lowered zoo models in real onnxjs 0.1.8, in Node, at batch 1.

onnxjs is found through ``ONNXJS_MODULES``, a ``node_modules`` folder: ``npm install onnxjs@0.1.8``.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from onnxtrain.convert import lower
from tests.zoo.export import export, input_names
from tests.zoo.models import ZOO

from .single import run
from .zoo import fixed_sizes

_MODULES = os.environ.get("ONNXJS_MODULES", "")
pytestmark = pytest.mark.skipif(
    not shutil.which("node") or not (Path(_MODULES) / "onnxjs").is_dir(),
    reason="needs node, and ONNXJS_MODULES to name a node_modules folder with onnxjs",
)

NAMES = [
    *("style_transfer", "resnet", "lenet", "vit", "swin", "densenet", "convnext", "mobilenet_v2"),
    *("mobilenet_v3", "squeezenet", "mlp", "unet", "lstm", "gru", "gpt2", "llama", "tcn", "bilstm"),
]
_TYPES = {"f": "float32", "i": "int32", "b": "bool"}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What onnxjs makes of the un-lowered and the lowered models, and what it should."""
    folder = tmp_path_factory.mktemp("onnxjs")
    jobs, expected = [], []
    for name in NAMES:
        entry = ZOO[name]
        model = export(entry).model
        values = [x.numpy() for x in entry.inputs(1)]
        inputs = [
            {
                "type": _TYPES[v.dtype.kind],
                "dims": v.shape,
                "data": v.astype(float).ravel().tolist(),
            }
            for v in values
        ]
        lowered = lower(model, "onnxjs-0.1.8-cpu", dims=fixed_sizes(model, 1))
        for kind, proto in (("original", model), ("lowered", lowered)):
            path = folder / f"{name}-{kind}.onnx"
            path.write_bytes(proto.SerializeToString())
            jobs.append({"model": str(path), "inputs": inputs})
        expected.append(run(model, dict(zip(input_names(entry), values, strict=True))))
    listing = folder / "jobs.json"
    listing.write_text(json.dumps(jobs))
    script = Path(__file__).parent / "onnxjs" / "run.cjs"
    done = subprocess.run(
        ["node", script, listing, "cpu"],
        capture_output=True, text=True, check=True, timeout=300,
        env={**os.environ, "NODE_PATH": _MODULES},
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    pairs = zip(lines[::2], lines[1::2], expected, strict=True)
    return dict(zip(NAMES, pairs, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_lowered_model_is_right(results, name: str):
    _, found, expected = results[name]
    assert "error" not in found, found
    for a, y in zip(expected, found["outputs"], strict=True):
        b = np.asarray([float(v) for v in y["data"]]).reshape(y["dims"])
        np.testing.assert_allclose(b, a, rtol=1e-3, atol=1e-3 * max(float(np.abs(a).max()), 1e-3))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "mlp"])  # Gemm and Relu only
def test_original_is_refused(results, name: str):
    assert "error" in results[name][0]
