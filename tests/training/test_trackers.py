"""Weights & Biases and MLflow, with fakes that record their calls."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import onnxtrain
from onnxtrain.errors import OnnxTrainError
from onnxtrain.examples import digits_data, digits_model


class FakeWandb:
    """What the callback uses of wandb."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.summary: dict[str, float] = {}
        self.started: dict[str, Any] = {}
        self.finished = 0

    def init(self, **options: Any) -> FakeWandb:
        self.started = options
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        assert not self.rows or step >= self.rows[-1][0]
        self.rows.append((step, numbers))

    def finish(self) -> None:
        self.finished += 1


class FakeMlflow:
    """What the callback uses of MlflowClient."""

    def __init__(self, tracking_uri: str | None = None) -> None:
        self.uri, self.params, self.metrics = tracking_uri, {}, []
        self.experiments: dict[str, str] = {}
        self.ended = ""

    def get_experiment_by_name(self, name: str) -> Any:
        known = self.experiments.get(name)
        return SimpleNamespace(experiment_id=known) if known else None

    def create_experiment(self, name: str) -> str:
        self.experiments[name] = "7"
        return "7"

    def create_run(self, experiment_id: str, run_name: str | None = None) -> Any:
        assert experiment_id == "7"
        return SimpleNamespace(info=SimpleNamespace(run_id=f"run of {run_name}"))

    def log_param(self, run_id: str, name: str, value: Any) -> None:
        self.params[name] = value

    def log_metric(self, run_id: str, name: str, value: float, step: int) -> None:
        self.metrics.append((name, value, step))

    def set_terminated(self, run_id: str, status: str) -> None:
        self.ended = f"{run_id}: {status}"


def fit(*callbacks: onnxtrain.Callback) -> Any:
    artifacts = onnxtrain.build(
        digits_model(hidden=8), loss="cross_entropy", optimizer="sgd", metrics=["accuracy"]
    )
    data = digits_data(96)
    return onnxtrain.Trainer(artifacts).fit(
        data, epochs=2, validation=data, callbacks=callbacks, progress=False
    )


def test_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    history = fit(onnxtrain.WandbLogger("digits", every=2, mode="offline"))
    assert fake.started["project"] == "digits"
    assert fake.started["mode"] == "offline"
    assert fake.started["config"]["optimizer"] == "SGD"
    assert fake.started["config"]["batch_size"] == 32
    steps = [(n, row["step/loss"]) for n, row in fake.rows if "step/loss" in row]
    assert steps == [(r["step"], r["loss"]) for r in history.steps if r["step"] % 2 == 0]
    epochs = [row["epoch/val_accuracy"] for _, row in fake.rows if "epoch/val_accuracy" in row]
    assert epochs == [r["val_accuracy"] for r in history.epochs]
    assert fake.summary["best/val_loss"] == history.best["val_loss"]
    assert fake.finished == 1


def test_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=FakeMlflow))
    logger = onnxtrain.MlflowLogger("digits", uri="file:here", run_name="first")
    history = fit(logger)
    fake = logger._client
    assert fake.uri == "file:here"
    assert fake.params["seed"] == 0
    assert fake.ended == "run of first: FINISHED"
    losses = [(value, step) for name, value, step in fake.metrics if name == "step/loss"]
    assert losses == [(r["loss"], r["step"]) for r in history.steps]
    assert [v for n, v, _ in fake.metrics if n == "epoch/loss"] == [
        r["loss"] for r in history.epochs
    ]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_missing_packages(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    kind = {"wandb": onnxtrain.WandbLogger, "mlflow": onnxtrain.MlflowLogger}[name]
    with pytest.raises(OnnxTrainError, match=rf"hint: pip install {name}"):
        kind("digits")


# -- the packages themselves, without a network -------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed: make hugging-face"
)
def test_the_real_wandb_offline(tmp_path: Path) -> None:
    history = fit(onnxtrain.WandbLogger("digits", mode="offline", dir=str(tmp_path)))
    (record,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert record.stat().st_size > 500
    assert len(history.epochs) == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed: make hugging-face"
)
def test_the_real_mlflow_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    place = (tmp_path / "runs").as_uri()
    logger = onnxtrain.MlflowLogger("digits", uri=place)
    history = fit(logger)
    client = mlflow.MlflowClient(tracking_uri=place)
    run = client.get_run(logger.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["epoch/val_loss"] == history.epochs[-1]["val_loss"]
    steps = client.get_metric_history(logger.run_id, "step/loss")
    assert [(m.step, m.value) for m in steps] == [(r["step"], r["loss"]) for r in history.steps]
