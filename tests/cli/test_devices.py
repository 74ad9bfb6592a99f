"""Commands devices and check-device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onnxtrain.cli import hardware as commands
from onnxtrain.cli.main import app
from onnxtrain.errors import OnnxTrainError
from onnxtrain.runtime.devices import DEVICES


def test_devices_lists_what_is_here_and_what_a_wheel_would_add() -> None:
    rows = json.loads(CliRunner().invoke(app, ["devices", "--json"]).stdout)
    by_name = {row["device"]: row for row in rows}
    assert list(by_name) == list(DEVICES)
    assert by_name["cpu"]["here"] is True
    assert by_name["openvino"]["here"] is False
    assert by_name["openvino"]["install"].startswith("pip install onnxruntime-openvino, in place")
    table = CliRunner().invoke(app, ["devices"], env={"COLUMNS": "200"}).stdout
    assert "untested: onnxtrain check-device directml" in table
    assert "pip install onnxruntime-ep-webgpu" in table


def test_a_report_of_three_nets(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    result = CliRunner().invoke(app, ["check-device", "cpu", "-o", str(path)])
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert set(report) >= {"onnxtrain", "onnxruntime", "platform", "device", "provider", "nets"}
    assert set(report["nets"]) == {"dense", "convolution", "attention"}
    for net in report["nets"].values():
        assert net["difference"] == 0
        assert net["ms"] > 0
    assert "dense: trains; losses equal the CPU's to 0e+00; " in result.output
    assert "please attach it to an issue" in result.output


def test_a_net_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(artifacts: object, batch: object, device: object) -> object:
        if device == "cpu":
            return original(artifacts, batch, device)  # type: ignore[arg-type]
        raise OnnxTrainError("no kernel for Tanh")

    original = commands._train
    monkeypatch.setattr(commands, "_train", train)
    monkeypatch.setattr(commands, "_NETS", {"dense": commands._NETS["dense"]})
    path = tmp_path / "report.json"
    result = CliRunner().invoke(app, ["check-device", "cpu", "-o", str(path)])
    assert result.exit_code == 1
    assert "dense: failed\nno kernel for Tanh" in result.output
    assert json.loads(path.read_text())["nets"]["dense"] == {"error": "no kernel for Tanh"}


def test_options_of_the_provider_are_checked() -> None:
    result = CliRunner().invoke(app, ["check-device", "cpu", "--option", "GPU"])
    assert isinstance(result.exception, OnnxTrainError)
    assert "invalid option 'GPU' (expected NAME=VALUE)" in str(result.exception)
    with pytest.raises(OnnxTrainError, match=r"unknown device: 'tpu'"):
        raise CliRunner().invoke(app, ["check-device", "tpu"]).exception  # type: ignore[misc]
