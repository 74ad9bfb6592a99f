"""Commands example, lr-find and export --best, and data formats of --data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from onnxtrain.errors import OnnxTrainError
from onnxtrain.examples import digits_data
from onnxtrain.training import Trainer
from tests.cli.test_training import run


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a folder with the files of ``onnxtrain example`` and artifacts of its model."""
    output = run("example", tmp_path)
    assert output.endswith("model.onnx, train.npz, test.npz, train.csv\n")
    run(
        "build",
        tmp_path / "model.onnx",
        "-o",
        tmp_path / "art",
        "--loss",
        "cross_entropy",
        "--optimizer",
        "adamw",
        "--lr",
        0.01,
        "--metric",
        "accuracy",
    )
    return tmp_path


def test_csv_trains_as_npz_does(place: Path) -> None:
    """The table has four digits of each number, so losses are close, not equal."""
    losses = {}
    for kind in ("npz", "csv"):
        out = place / f"run-{kind}"
        run("train", place / "art", "--data", place / f"train.{kind}", "--out", out, "--quiet")
        last = (out / "metrics.jsonl").read_text().splitlines()[0]
        losses[kind] = json.loads(last)["loss"]
    assert losses["csv"] != 0
    again = Trainer(place / "art")
    assert again.properties == {}


def test_text_labels_in_training_and_evaluation(place: Path) -> None:
    names = ["ten", "nine", "eight", "seven", "six", "five", "four", "three", "two", "one"]
    for name, samples in (("train", 400), ("test", 40)):
        data = digits_data(samples, seed=samples)
        rows = zip(data["image"].tolist(), data["labels"].tolist(), strict=True)
        lines = [
            json.dumps({"image": x, "labels": names[y]}) for x, y in rows if y != 9 or samples > 40
        ]
        (place / f"{name}.jsonl").write_text("\n".join(lines))
    art = place / "art"
    arguments = ["--epochs", 15, "--quiet"]
    run(
        "train",
        art,
        "--data",
        place / "train.jsonl",
        "--validation",
        place / "test.jsonl",
        *arguments,
    )
    assert json.loads(str(Trainer(art).properties["classes:labels"])) == sorted(names)
    scores = json.loads(run("eval", art, "--data", place / "test.jsonl", "--json"))
    assert scores["accuracy"] > 0.9  # a class that the test has not would shift all the others
    run("train", art, "--data", place / "train.jsonl", "--epochs", 16, "--resume", "--quiet")


def test_image_folders(place: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    data = digits_data(60)
    for i, (x, y) in enumerate(zip(data["image"], data["labels"], strict=True)):
        folder = place / "images" / str(y)
        folder.mkdir(parents=True, exist_ok=True)
        image.fromarray((x.reshape(8, 8) * 255).astype(np.uint8)).save(folder / f"{i}.png")
    run("train", place / "art", "--data", place / "images", "--epochs", 30, "--quiet")
    scores = json.loads(run("eval", place / "art", "--data", place / "images", "--json"))
    assert scores["accuracy"] > 0.9
    assert scores["samples"] == 60


def test_export_of_the_best_epoch(place: Path) -> None:
    art, best = place / "art", place / "art" / "run" / "checkpoints" / "best.safetensors"
    with pytest.raises(OnnxTrainError, match="no best checkpoint"):
        run("export", art, "--best", "-o", place / "best.onnx")
    run("train", art, "--data", place / "train.npz", "--epochs", 3, "--lr", 1.0, "--quiet")
    run("export", art, "--best", "-o", place / "best.onnx")
    run("export", art, "--checkpoint", best, "-o", place / "named.onnx")
    assert (place / "best.onnx").read_bytes() == (place / "named.onnx").read_bytes()
    image = digits_data(8)["image"]
    (scores,) = onnxruntime.InferenceSession(place / "best.onnx").run(None, {"image": image})
    trainer = Trainer(art)
    trainer.load(best)
    np.testing.assert_allclose(scores, trainer.predict(image=image)["logits"], rtol=1e-5, atol=1e-5)
    with pytest.raises(OnnxTrainError, match="--best and --checkpoint both select weights"):
        run("export", art, "--best", "--checkpoint", best, "-o", place / "x.onnx")


def test_lr_find(place: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    before = (place / "art" / "checkpoint").read_bytes()
    words = ["lr-find", place / "art", "--data", place / "train.npz", "--steps", 30]
    output = run(*words, "-o", place / "lr.png")
    numbers = json.loads(run(*words, "--json"))
    assert output.startswith(f"learning rate {numbers['suggestion']:.2g}\nnext: onnxtrain train ")
    assert (place / "lr.png").read_bytes().startswith(b"\x89PNG")
    assert (place / "art" / "checkpoint").read_bytes() == before
