"""Profiles of training steps: sums, phases, modules, placement, trace, command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.build import build
from onnxtrain.cli.main import app
from onnxtrain.errors import OnnxTrainError
from onnxtrain.runtime import session as runtime
from onnxtrain.training import Trainer
from onnxtrain.training.profiler import NodeLabels, node_times
from tests.artifacts.models import finished, graph, weight
from tests.training.made import made
from tests.training.nets import batches, exported

LAYOUTS = ["fused", "separate", "vector"]


@pytest.fixture(scope="module")
def cnn() -> Artifacts:
    return build(exported("cnn"), loss="cross_entropy", optimizer="adamw")


def lstm() -> Artifacts:
    rng, op = np.random.default_rng(0), graph()

    def parameter(name: str, *shape: int) -> ir.Value:
        return weight(op, name, (rng.standard_normal(shape) / 3).astype(np.float32))

    x = op.input("x", ir.DataType.FLOAT, [5, "batch", 3])
    w, r = parameter("lstm.weight", 1, 16, 3), parameter("lstm.recurrence", 1, 16, 4)
    _, h, _ = op.LSTM(x, w, r, hidden_size=4, _outputs=3)
    y = op.MatMul(op.Squeeze(h, op.const([0])), parameter("head.weight", 4, 2))
    return build(finished(op, y=y), loss="mse", optimizer="adamw")


def check_sums(report: Any) -> None:
    tables = (report.by_phase(), report.by_operator(), report.by_module())
    for rows in tables:
        assert sum(row.ms for row in rows) == pytest.approx(report.kernel_ms)
        assert sum(row.share for row in rows) == pytest.approx(1.0)
        assert sum(row.calls for row in rows) == pytest.approx(sum(n.calls for n in report.nodes))
    assert {row.name for row in report.by_phase()} == {"forward", "backward", "update"}
    assert 0 < report.kernel_ms < report.step_ms


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cnn(cnn: Artifacts, layout: str, tmp_path: Path) -> None:
    trainer = Trainer(cnn, threads=1, layout=layout)
    before = trainer.state_dict()
    report = trainer.profile(batches("cnn", 1)[0], steps=3, trace=tmp_path / "trace.json")
    for name, array in trainer.state_dict().items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    assert trainer.global_step == 0
    check_sums(report)
    assert all(node.calls == int(node.calls) for node in report.nodes)
    by_name = {node.name: node for node in report.nodes}
    assert (by_name["/conv2/Conv"].phase, by_name["/conv2/Conv"].module) == ("forward", "conv2")
    modules = {row.name for row in report.by_module()}
    assert {"conv1", "conv2", "head", "loss"} <= modules
    assert any(node.phase == "backward" and node.module == "conv1" for node in report.nodes)
    assert not report.fallbacks
    assert not report.captured
    assert report.memory["parameters, buffers and state"] > 0
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert len(trace["traceEvents"]) == 3 * sum(node.calls for node in report.nodes)
    for event in trace["traceEvents"]:
        assert event["ph"] == "X"
        assert event["dur"] >= 0
        assert event["cat"] in ("forward", "backward", "update")
        assert {"name", "ts", "pid", "tid", "args"} <= event.keys()


def test_lstm() -> None:
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.standard_normal((5, 8, 3)).astype(np.float32),
        "target": rng.standard_normal((8, 2)).astype(np.float32),
    }
    report = Trainer(lstm(), threads=1).profile(batch, steps=2)
    check_sums(report)
    assert {"lstm", "head"} <= {row.name for row in report.by_module()}


def test_report_as_text_and_json(cnn: Artifacts) -> None:
    report = Trainer(cnn, threads=1).profile(batches("cnn", 1)[0], steps=1)
    text = str(report)
    assert all(word in text for word in ("phase", "operator", "module", "backward", "conv1"))
    assert max(map(len, text.splitlines())) <= 100
    data = json.loads(json.dumps(report.to_dict()))
    assert data["layout"] == "vector"
    assert sum(row["ms"] for row in data["phases"]) == pytest.approx(data["kernel_ms"])


def test_nodes_on_another_device_are_fallbacks() -> None:
    """The placement of a GPU, from events as onnxruntime writes them."""
    artifacts = made()
    spec = artifacts.manifest.model("step")
    assert spec is not None
    model = runtime.load_graph(artifacts.source("step"))
    labels = NodeLabels(model, spec, artifacts.manifest)

    def event(node: Any, provider: str, kind: str) -> dict[str, Any]:
        arguments = {
            "op_name": node.op_type,
            "provider": provider,
            "output_size": "64",
            "input_type_shape": [],
            "output_type_shape": [{kind: [8, 2]}],
        }
        return {"name": f"{node.name}_kernel_time", "dur": 5, "ts": 0, "args": arguments}

    first, second, third, *_ = model.graph.node
    copy = type(first)(op_type="MemcpyToHost", name="Memcpy")
    events = [
        event(first, "CUDAExecutionProvider", "float"),
        event(second, "CPUExecutionProvider", "float"),
        event(third, "CPUExecutionProvider", "int64"),
        event(copy, "CUDAExecutionProvider", "float"),
    ]
    report = Trainer(artifacts).profile((np.zeros((8, 6), np.float32), np.zeros(8, np.int64)))
    nodes = tuple(node_times(events, labels, 1))
    report = dataclasses.replace(report, nodes=nodes, device="cuda", capture_obstacle="a reason")
    assert report.fallbacks == (f"{second.op_type} {second.name!r}",)
    assert [node.output_bytes for node in report.copies] == [64]
    text = str(report)
    assert "not captured as a CUDA graph: a reason" in text
    assert "nodes that fall back to the CPU: 1" in text


def test_steps_must_be_positive(cnn: Artifacts) -> None:
    with pytest.raises(OnnxTrainError, match="steps must be at least 1, got 0"):
        Trainer(cnn).profile(batches("cnn", 1)[0], steps=0)


def test_command_line(cnn: Artifacts, tmp_path: Path) -> None:
    cnn.save(tmp_path / "art")
    trace = tmp_path / "trace.json"
    options = ["--steps", "1", "--threads", "1", "--batch-size", "4", "--trace", str(trace)]
    result = CliRunner().invoke(app, ["profile", str(tmp_path / "art"), *options])
    assert result.exit_code == 0, result.output
    assert "backward" in result.output
    assert json.loads(trace.read_text())["traceEvents"]
    x, labels = batches("cnn", 1)[0]
    np.savez(tmp_path / "data.npz", x=x, labels=labels)
    data = ["--data", str(tmp_path / "data.npz"), "--steps", "1", "--layout", "fused", "--json"]
    result = CliRunner().invoke(app, ["profile", str(tmp_path / "art"), *data])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["layout"] == "fused"
