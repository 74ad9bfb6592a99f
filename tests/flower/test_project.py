"""The project that ``onnxtrain federate init`` writes."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import onnxtrain
from onnxtrain.cli.main import app
from onnxtrain.errors import CheckpointError, SaveError
from onnxtrain.federation import write_project
from tests.small_nets import LOSS, parse


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    artifacts = onnxtrain.build(parse(LOSS), loss="loss", optimizer="sgd:lr=0.25", check=False)
    artifacts.save(tmp_path / "my artifacts")
    return tmp_path / "my artifacts"


def test_init_writes_a_project(tmp_path: Path, artifacts: Path) -> None:
    folder, data = tmp_path / "My Study 2", tmp_path / 'odd"name.npz'
    arguments = ["federate", "init", str(folder), "--artifacts", str(artifacts)]
    result = CliRunner().invoke(app, [*arguments, "--data", str(data), "--clients", "5"])
    assert result.exit_code == 0, result.output
    project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
    assert project["project"]["name"] == "my-study-2"
    flower = project["tool"]["flwr"]["app"]
    assert flower["config"]["artifacts"] == str(artifacts.resolve())
    assert flower["config"]["data"] == str(data.resolve())
    assert (flower["config"]["lr"], flower["config"]["clients"]) == (0.25, 5)
    for component in flower["components"].values():
        module, name = component.split(":")
        source = (folder / f"{module.replace('.', '/')}.py").read_text("utf-8")
        targets = [n.targets[0] for n in ast.parse(source).body if isinstance(n, ast.Assign)]
        assert name in [t.id for t in targets if isinstance(t, ast.Name)]


def test_nothing_is_overwritten(tmp_path: Path, artifacts: Path) -> None:
    write_project(tmp_path / "one", artifacts)
    with pytest.raises(SaveError, match=r"pyproject\.toml already exists"):
        write_project(tmp_path / "one", artifacts)


def test_a_folder_without_artifacts_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        write_project(tmp_path / "one", tmp_path)
    assert not (tmp_path / "one").exists()
