"""build, train, eval and export on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from typer.testing import CliRunner

from onnxtrain.artifacts import Artifacts
from onnxtrain.commands.main import app
from onnxtrain.errors import LabelError, NonFiniteError, OnnxTrainError, PrepareError
from onnxtrain.training import Trainer
from tests.artifacts.models import classifier, data


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with model.onnx, train.npz, test.npz and the artifacts of the model."""
    (tmp_path / "model.onnx").write_bytes(classifier().SerializeToString())
    for name, n, seed in (("train", 160, 0), ("test", 80, 1)):
        x, labels = data(n, seed=seed)
        np.savez(tmp_path / f"{name}.npz", x=x, labels=labels)
    output = run(
        "build", tmp_path / "model.onnx", "-o", tmp_path / "art", "--loss", "cross_entropy",
        "--loss-output", "scores", "--optimizer", "adamw:weight_decay=0.1", "--lr", 0.02,
        "--metric", "accuracy", "--freeze", "fc1.bias", "--ema", 0.9,
    )  # fmt: skip
    assert "3 parameters, 75 numbers to train" in output
    assert "a batch is x float32[batch, 6], labels int64[batch]" in output
    return tmp_path


def test_from_model_to_trained_model(place: Path) -> None:
    art, test = place / "art", place / "test.npz"
    manifest = Artifacts.load(art).manifest
    assert (manifest.optimizer["lr"], manifest.optimizer["weight_decay"]) == (0.02, 0.1)
    before = json.loads(run("eval", art, "--data", test, "--json"))
    output = run(
        "train", art, "--data", place / "train.npz", "--validation", test, "--epochs", 5,
        "--batch-size", 16, "--schedule", "cosine", "--warmup", 0.1, "--seed", 4,
    )  # fmt: skip
    assert "epoch 5/5  step 50  loss " in output
    assert output.endswith("trained up to step 50\n")
    assert {p.name for p in (art / "run").iterdir()} >= {"metrics.csv", "metrics.jsonl", "loss.png"}
    after = json.loads(run("eval", art, "--data", test, "--json"))
    assert after["loss"] < before["loss"]
    assert after["samples"] == 80
    assert run("eval", art, "--data", test).startswith(f"loss {after['loss']:.6g}\naccuracy 0.")
    run("export", art, "-o", place / "trained.onnx")
    run("export", art, "-o", place / "average.onnx", "--ema")
    run("export", art, "-o", place / "folded.onnx", "--fold")
    run("export", art, "-o", place / "old.onnx", "--opset", 13)
    first = art / "run" / "checkpoints" / "best.safetensors"
    run("export", art, "-o", place / "best.onnx", "--checkpoint", first)
    x, labels = data(80, seed=1)
    scores = {}
    for name in ("trained", "average", "folded", "old", "best"):
        session = onnxruntime.InferenceSession(place / f"{name}.onnx")
        scores[name] = session.run(["scores"], {"x": x})[0]
    accuracy = (scores["trained"].argmax(1) == labels).mean()
    assert accuracy == pytest.approx(after["accuracy"])
    np.testing.assert_allclose(scores["folded"], scores["trained"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(scores["old"], scores["trained"], rtol=1e-4, atol=1e-5)
    assert not np.array_equal(scores["average"], scores["trained"])
    assert onnx.load(place / "old.onnx").opset_import[0].version == 13


def test_resume(place: Path) -> None:
    art, out = place / "art", place / "out"
    common = ("--data", place / "train.npz", "--quiet", "--out", out)
    run("train", art, *common, "--epochs", 2, "--checkpoint-every", 2)
    with pytest.raises(OnnxTrainError, match=r"holds a run already.*\nhint: resume=True"):
        run("train", art, *common, "--epochs", 3)
    assert "trained up to step 15" in run("train", art, *common, "--epochs", 3, "--resume")
    assert Trainer(art).global_step == 15


def test_resume_keeps_settings(place: Path) -> None:
    art = place / "art"
    common = ("train", art, "--data", place / "train.npz")
    run(*common, "--epochs", 2, "--batch-size", 16, "--schedule", "cosine", "--lr", 0.03)
    output = run(*common, "--epochs", 4, "--resume").replace("\n", " ")
    assert "resumed at step 20: batch_size 16, " in output
    assert "lr 0.03, schedule cosine over 40 steps (before: 20)" in output
    rows = [json.loads(r) for r in (art / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [r["lr"] for r in rows if r["kind"] == "step"]
    assert len(rates) == 40
    assert all(rates)


def test_sizes(place: Path) -> None:
    run(
        "build", place / "model.onnx", "-o", place / "fixed", "--loss", "cross_entropy",
        "--loss-output", "scores", "--dim", "batch=16", "--prefix", "p_",
    )  # fmt: skip
    spec = Artifacts.load(place / "fixed", prefix="p_").manifest.model("step")
    assert spec is not None
    assert spec.inputs[0].shape == (16, 6)
    with pytest.raises(PrepareError, match="not a size: 'batch'"):
        run("build", place / "model.onnx", "-o", place / "x", "--loss", "mse", "--dim", "batch")


def test_data_that_is_none(place: Path) -> None:
    (place / "bad.npz").write_bytes(b"nothing")
    for name in ("bad.npz", "nowhere.npz"):
        with pytest.raises(OnnxTrainError, match=f"{name}: not an .npz file"):
            run("train", place / "art", "--data", place / name)


def test_debug_nan(place: Path) -> None:
    x, labels = data(32)
    x[7] = np.inf
    np.savez(place / "inf.npz", x=x, labels=labels)
    with pytest.raises(NonFiniteError, match="first tensor that is not finite: 'x' of the batch"):
        run("train", place / "art", "--data", place / "inf.npz", "--debug-nan", "--quiet")


def test_errors_are_one_block(place: Path) -> None:
    command = [sys.executable, "-m", "onnxtrain", "eval", str(place)]
    command += ["--data", str(place / "test.npz")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("CheckpointError: manifest.json: cannot be read")
    assert "Traceback" not in result.stderr


def test_labels_out_of_range(place: Path) -> None:
    x, labels = data(160)
    labels[100] = 3
    np.savez(place / "labels.npz", x=x, labels=labels)
    with pytest.raises(LabelError, match="'labels' has 3 in row 100; the model has 3 classes"):
        run("train", place / "art", "--data", place / "labels.npz", "--quiet")
