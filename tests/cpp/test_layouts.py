"""Which models of a directory C++ runs: those of one step, or gradients and update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import onnxtrain
from tests.cpp import nets
from tests.cpp.hostile_files import lies
from tests.cpp.programs import driver, run


def without(*roles: str) -> Any:
    """Return an edit that takes models out of a manifest."""

    def edit(data: dict[str, Any]) -> None:
        data["models"] = [m for m in data["models"] if m["role"] not in roles]

    return edit


def train(folder: Path, tmp_path: Path, *, fails: bool = False, separate: bool = False) -> str:
    places = (tmp_path / "batches", 3, tmp_path / "losses", tmp_path / "saved")
    env = {"SEPARATE": str(int(separate))}
    return run(driver(), "train", folder, *places, env=env, fails=fails)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Artifacts that have all models, those of a step over vectors among them."""
    nets.batches("mlp-sgd", tmp_path / "batches")
    folder = nets.artifacts("mlp-sgd", tmp_path / "artifacts")
    roles = {m.role for m in onnxtrain.Artifacts.load(folder).manifest.models}
    assert {"step", "train", "optimizer", "gradients"} <= roles
    return folder


def test_without_a_step_model(folder: Path, tmp_path: Path) -> None:
    assert [*lies(folder, tmp_path, {"no step": without("step")})]
    train(tmp_path / "no step", tmp_path)
    expected = (tmp_path / "losses").read_bytes()
    train(folder, tmp_path, separate=True)
    assert (tmp_path / "losses").read_bytes() == expected


def test_vectors_only(folder: Path, tmp_path: Path) -> None:
    """Python runs them; C++ says which layout it lacks."""
    assert [*lies(folder, tmp_path, {"vectors": without("step", "train", "optimizer")})]
    onnxtrain.Trainer(tmp_path / "vectors", threads=1)
    error = train(tmp_path / "vectors", tmp_path, fails=True)
    assert error.startswith("manifest.json: only models of the vector layout (gradients, scalars")


def test_without_models(folder: Path, tmp_path: Path) -> None:
    edit = without("step", "train", "optimizer", "gradients")
    assert [*lies(folder, tmp_path, {"nothing": edit})]
    error = train(tmp_path / "nothing", tmp_path, fails=True)
    assert error == "these artifacts have no train model\nhint: build them again\n"
