"""The example programs, with assertions on what they reach."""

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_regression(tmp_path):
    scores = load("sklearn_regression").main()
    assert scores["OnnxRegressor"] > scores["SGDRegressor"] - 0.02
    assert scores["pipeline after"] > scores["pipeline before"] + 0.05
    assert (tmp_path / "runs/sklearn/regression.onnx").exists()


def test_mlp():
    losses = load("sklearn_mlp").main(epochs=40)
    assert losses["OnnxRegressor"] < 1.25 * losses["MLPRegressor"]
    assert losses["OnnxRegressor"] < 0.02


def test_classifier(tmp_path):
    assert load("sklearn_classifier").main() > 0.95
    assert (tmp_path / "runs/sklearn/digits.onnx").exists()
