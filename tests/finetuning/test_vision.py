"""Vision models on folders and tables of images; the head becomes ``modules_to_save``."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

import onnxtrain
from onnxtrain.cli.main import app
from onnxtrain.errors import CheckpointError, OnnxTrainError, PrepareError
from onnxtrain.finetuning import FineTuneOptions, FineTuneRun
from onnxtrain.finetuning.tasks import VisionTask
from tests.finetuning.test_docs import vision, write_images

FAST = {"progress": False, "epochs": 15, "lr": 0.02, "batch_size": 4}
ADAPTERS = {"lora_rank": 2, "targets": ["conv*"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    onnx.save(vision(), tmp_path / "vision.onnx")
    write_images(tmp_path / "images")
    return tmp_path


def scores(model: Path, images: np.ndarray) -> np.ndarray:
    return ort.InferenceSession(str(model)).run(["logits"], {"pixel_values": images})[0]


def test_adapters_and_a_new_head_learn_image_classes(folder: Path) -> None:
    out = folder / "out"
    result = onnxtrain.finetune(
        folder / "vision.onnx", folder / "images", out, validation=0.25, **ADAPTERS, **FAST
    )
    assert result.after["accuracy"] == 1.0
    assert json.loads((out / "labels.json").read_text()) == {"0": "cat", "1": "dog"}
    assert any(
        "replaced the classification head: 2 classes instead of 5" in n for n in result.notes
    )
    red = np.full((1, 3, 8, 8), 0.2, np.float32)
    red[:, 0] = 0.8
    assert scores(out / "merged" / "vision.onnx", red).argmax() == 0
    assert scores(out / "merged" / "vision.onnx", red[:, ::-1]).argmax() == 1

    config = json.loads((out / "peft" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["head"]
    tensors = load_file(out / "peft" / "adapter_model.safetensors")
    assert tensors["base_model.model.head.weight"].shape == (2, 8)  # as torch has it
    assert tensors["base_model.model.head.bias"].shape == (2,)
    plain = onnxtrain.replace_head(folder / "vision.onnx", "logits", classes=2)
    again = onnxtrain.load_adapter(plain, out / "peft")
    again.export_merged(folder / "again.onnx")
    got, want = (scores(p, red) for p in (folder / "again.onnx", out / "merged" / "vision.onnx"))
    np.testing.assert_allclose(got, want, atol=1e-5)
    with pytest.raises(CheckpointError, match=r"head\.\w+ has shape \[2.*\nhint: .*replace_head"):
        onnxtrain.load_adapter(folder / "vision.onnx", out / "peft")


def test_command_accepts_a_table_of_paths(folder: Path) -> None:
    table = folder / "list.csv"
    rows = [(f"images/{c}/{i}.png", c) for c in ("dog", "cat") for i in range(8)]
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([("image", "label"), *rows])
    given = [str(folder / "vision.onnx"), "--data", str(table), "-o", str(folder / "out")]
    shown = CliRunner().invoke(app, ["finetune", *given, "--preview"])
    assert shown.exit_code == 0, shown.output
    assert "15 images; 1 for validation" in shown.output or "16 images" in shown.output
    assert "3 x 8 x 8" in shown.output
    done = CliRunner().invoke(app, ["finetune", *given, "--epochs", "2", "--validation", "0.25"])
    assert done.exit_code == 0, done.output
    assert "images/s" in done.output or "accuracy" in done.output
    assert (folder / "out" / "merged" / "vision.onnx").is_file()
    report = json.loads((folder / "out" / "report.json").read_text())
    assert 0 <= report["after"]["accuracy"] <= 1


def test_images_are_normalized_by_the_preprocessor_config(folder: Path) -> None:
    settings = {"do_normalize": True, "image_mean": [0.5, 0.25, 0.0], "image_std": [0.5, 0.5, 2.0]}
    options = FineTuneOptions(progress=False)
    plain = FineTuneRun(folder / "vision.onnx", folder / "images", options).task
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    normal = FineTuneRun(folder / "vision.onnx", folder / "images", options).task
    mean = np.array(settings["image_mean"], np.float32).reshape(1, 3, 1, 1)
    deviation = np.array(settings["image_std"], np.float32).reshape(1, 3, 1, 1)
    assert isinstance(plain, VisionTask)
    assert isinstance(normal, VisionTask)
    assert plain.images.min() >= 0
    assert plain.images.max() <= 1
    np.testing.assert_allclose(normal.images, (plain.images - mean) / deviation, rtol=1e-6)
    assert any("no preprocessor_config.json" in n for n in plain.notes)
    assert not normal.notes


def test_arrays_are_not_preprocessed(folder: Path) -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(["up", "down"], 8)
    images = rng.standard_normal((16, 3, 8, 8)).astype(np.float32)
    images += np.where(labels == "up", 1.0, -1.0)[:, None, None, None]
    data = {"pixel_values": images, "labels": labels}
    result = onnxtrain.finetune(
        folder / "vision.onnx", data, folder / "out", validation=data, **FAST
    )
    assert result.after["accuracy"] == 1.0
    assert json.loads((folder / "out" / "labels.json").read_text()) == {"0": "down", "1": "up"}


def refused(folder: Path, message: str, error: type[Exception] = OnnxTrainError) -> None:
    with pytest.raises(error, match=message):
        onnxtrain.finetune(folder / "vision.onnx", folder / "data.csv", folder / "out", **FAST)


def test_invalid_image_data_raises_before_training(folder: Path) -> None:
    table = folder / "data.csv"
    table.write_text("image,label\nimages/cat/0.png,cat\nnothing.png,dog\n")
    refused(folder, "line 3: image .* does not exist")
    table.write_text("image,label\nimages/cat/0.png,cat\n")
    refused(folder, "at least two classes, got cat", PrepareError)
    table.write_text("a,b\n1,2\n")
    refused(folder, "no columns image and label")
    write_images(folder / "more")
    (folder / "more" / "dog").rename(folder / "more" / "bird")
    options = FineTuneOptions(validation=folder / "more", progress=False)
    with pytest.raises(OnnxTrainError, match="unknown class 'bird'"):
        FineTuneRun(folder / "vision.onnx", folder / "images", options)
    assert not (folder / "out").exists()
