"""``onnxtrain probe``: run a small pack in onnxruntime and onnxjs, and build their profiles."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from onnxtrain.cli.main import app
from onnxtrain.errors import MissingExtraError, ProbeError
from onnxtrain.lowering import profile as profiles
from onnxtrain.lowering.probe.case import Case, case_at
from onnxtrain.lowering.probe.pack import read_pack, run_pack, write_pack
from onnxtrain.lowering.probe.results import (
    analyze_operator,
    build_profile,
    format_profile,
    read_results,
)
from onnxtrain.lowering.probe.sources import extra_cases

from . import onnxjs_zoo

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def tiny_cases():
    """Return convolutions, an activation, a sum, and a node with wrong expected outputs."""
    axes = np.asarray([1], np.int64)
    return [
        *(c for c in extra_cases() if c.op == "Conv"),
        Case("relu", "Relu", 14, (X,), (np.maximum(X, 0),)),
        Case("sum", "ReduceSum", 13, (X, axes), (X.sum(1, keepdims=True),)),
        Case("sin", "Sin", 22, (X,), (X,)),
        Case("where", "Where", 16, (X > 0, X, -X), (np.abs(X),)),
    ]


@pytest.fixture(scope="module")
def pack(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    write_pack(folder, [7, 13, 21], tiny_cases())
    return folder


@pytest.fixture(scope="module")
def in_onnxruntime(pack):
    output = pack / "ort.json"
    assert " crashed" in run_pack(pack, "onnxruntime", output)
    return read_results(output)


def test_pack_lists_each_version_once(pack):
    nodes = {n["id"]: n for n in read_pack(pack)["nodes"]}
    assert {n["since_version"] for n in nodes.values() if n["op"] == "Relu"} == {6, 13, 14}
    assert nodes["sum@7"]["inputs"][0]["dims"] == [3, 4]
    assert nodes["sum@13"]["stored"] == [1]
    assert len(nodes["sum-fed@13"]["inputs"]) == 2
    assert {n["batch"] for n in nodes.values() if n["op"] == "Conv"} == {1, 2}
    assert nodes["relu-double@21"]["dtypes"] == {"inputs": ["double"], "outputs": ["double"]}
    assert "where@7" not in nodes  # Where exists since opset 9
    assert (pack / "probe.mjs").stat().st_size > 0
    assert (pack / "probe.html").stat().st_size > 0


def test_onnxruntime(in_onnxruntime):
    states = {k: r["status"] for k, r in in_onnxruntime["results"].items()}
    assert {k for k, s in states.items() if s == "wrong"} == {"sin@7"}
    assert states["conv_2d_batch2@7"] == states["sum-fed@13"] == states["relu@21"] == "right"
    assert in_onnxruntime["results"]["sin@7"]["error"] == pytest.approx(
        np.abs(np.sin(X) - X).max(), rel=1e-3
    )


def test_profile(in_onnxruntime):
    profile = build_profile(in_onnxruntime, "mine")
    assert profile["ops"]["Relu"]["since"] == [6, 13, 14]
    assert profile["probed"]
    assert any(q.startswith("Sin: ") for q in profile["quirks"])
    assert "Sin" not in profile["ops"]  # right for some types and ranks, but not clear which
    again = profiles.parse(json.loads(format_profile(profile)))
    assert again.name == "mine"
    assert "batch" not in again.ops["Conv"]


def test_profile_copies_unprobed_operators_from_its_base(in_onnxruntime):
    base = profiles.parse({"name": "b", "ops": {"Cos": {}, "Relu": {}}, "control_flow": ["If"]})
    profile = build_profile(in_onnxruntime, "mine", base)
    assert profile["ops"]["Cos"] == {}
    assert profile["comments"]["Cos"] == "not probed"
    assert profile["control_flow"] == ["If"]


@pytest.mark.skipif(bool(onnxjs_zoo.why_unavailable()), reason=onnxjs_zoo.why_unavailable())
def test_profile_limits_onnxjs_conv_to_batch_1(pack, tmp_path):
    output = tmp_path / "onnxjs.json"
    command = ["node", pack / "probe.mjs", pack, "onnxjs", output]
    environment = {**os.environ, "NODE_PATH": str(onnxjs_zoo.FOLDER / "node_modules")}
    subprocess.run(command, check=True, capture_output=True, timeout=1200, env=environment)
    results = read_results(output)
    states = {k: r["status"] for k, r in results["results"].items()}
    assert results["version"] == "0.1.8"
    assert states["conv_2d_batch1@7"] == "right"
    assert states["conv_2d_batch2@7"] == "wrong"
    assert states["conv_1d_batch1@7"] == "refused"
    profile = build_profile(results, "onnxjs")
    assert profile["ops"]["Conv"]["batch"] == 1
    assert 3 not in profile["ops"]["Conv"]["ranks"]
    assert any(q.startswith("Conv: wrong for batch above 1") for q in profile["quirks"])


def test_crash_loses_only_one_node(pack, tmp_path):
    """A fake tract ends the process at some nodes."""
    (tmp_path / "tract.py").write_text(
        "import os\n"
        "def version(): return '0'\n"
        "class Onnx:\n"
        "    def load(self, path):\n"
        "        if 'relu' in str(path): os._exit(9)\n"
        "        raise ValueError('no\\nmore')\n"
    )
    script = pack / "probe.py"
    output = tmp_path / "results.json"
    python = sys.executable
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([python, script, "tract", "-o", output], check=True, env=environment)
    results = read_results(output)["results"]
    assert {r["status"] for k, r in results.items() if "relu" in k} == {"crashed"}
    assert {r["message"] for k, r in results.items() if "relu" not in k} == {"no"}
    with pytest.raises(ProbeError, match="no node is right"):
        build_profile(read_results(output), "none")


def test_error_messages(pack, tmp_path):
    with pytest.raises(ProbeError, match="hint: onnxtrain probe pack"):
        run_pack(tmp_path, "onnxruntime", tmp_path / "r.json")
    with pytest.raises(ProbeError, match="unknown runtime: 'abacus'"):
        run_pack(pack, "abacus", tmp_path / "r.json")
    with pytest.raises(ProbeError, match="has no providers"):
        run_pack(pack, "tract", tmp_path / "r.json", provider="CUDAExecutionProvider")
    with pytest.raises(ProbeError, match="has no NoSuchProvider"):
        run_pack(pack, "onnxruntime", tmp_path / "r.json", provider="NoSuchProvider")
    with pytest.raises(ProbeError, match="unknown opset: 5"):
        write_pack(tmp_path, [5], [])
    (tmp_path / "pack.json").write_text("{}")
    with pytest.raises(ProbeError, match="not the manifest of a pack"):
        read_pack(tmp_path)
    with pytest.raises(ProbeError, match="not a results file"):
        read_results(tmp_path / "pack.json")


def test_missing_runtime_is_reported(pack, tmp_path):
    assert importlib.util.find_spec("tract") is None, "the test environment has no tract"
    with pytest.raises(MissingExtraError, match="hint: pip install tract"):
        run_pack(pack, "tract", tmp_path / "r.json")


def test_profile_command(pack, in_onnxruntime, tmp_path):
    output = tmp_path / "mine.json"
    arguments = ["probe", "profile", str(pack / "ort.json"), "-o", str(output), "--base", "ort-cpu"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert profiles.parse(json.loads(output.read_text())).name == "mine"


def test_wrong_outputs_limit_ranks_only_if_the_same_node_is_right_elsewhere():
    about = {
        "op": "Celu",
        "since_version": 12,
        "opset": 12,
        "batch": 3,
        "arity": [1, 1],
        "attrs": {},
        "dtypes": {"inputs": ["float"], "outputs": ["float"]},
        "stored": [],
        "variant": "",
        "empty": False,
    }
    right, wrong = ({**about, "status": s} for s in ("right", "wrong"))
    others = {"celu@12": {**right, "rank": 4}, "celu_both_sides@12": {**wrong, "rank": 2}}
    assert analyze_operator("Celu", others, lenient=False, every_type=[]).versions == []
    same = {"celu_4d@12": {**right, "rank": 4}, "celu_2d@12": {**wrong, "rank": 2}}
    finding = analyze_operator("Celu", same, lenient=False, every_type=[])
    assert finding.versions == [12]
    assert 2 not in finding.limits["ranks"]


@pytest.mark.parametrize(
    ("mode", "convertible"), [("half_pixel", False), (None, False), ("output_half_pixel", True)]
)
def test_roi_align_converts_to_opset_10_only_in_its_mode(mode, convertible):
    """Opset 10 has no coordinate_transformation_mode; its mode is not the default of opset 16."""
    x = np.ones((1, 1, 4, 4), np.float32)
    boxes, of = np.asarray([[0, 0, 3, 3]], np.float32), np.zeros(1, np.int64)
    attributes = {} if mode is None else {"coordinate_transformation_mode": mode}
    case = Case("roi", "RoiAlign", 22, (x, boxes, of), (x[:, :, :1, :1],), attributes)
    assert (case_at(case, 10) is not None) == convertible
