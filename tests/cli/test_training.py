"""Commands build, train, eval and export."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from typer.testing import CliRunner

from onnxtrain.artifacts import Artifacts
from onnxtrain.cli.main import app
from onnxtrain.errors import (
    CheckpointError,
    LabelError,
    NonFiniteError,
    OnnxTrainError,
    PrepareError,
    SaveError,
    hints_name_flags,
)
from onnxtrain.training import Trainer
from tests.artifacts.models import classifier, data


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a folder with model.onnx, train.npz, test.npz and artifacts."""
    (tmp_path / "model.onnx").write_bytes(classifier().SerializeToString())
    for name, n, seed in (("train", 160, 0), ("test", 80, 1)):
        x, labels = data(n, seed=seed)
        np.savez(tmp_path / f"{name}.npz", x=x, labels=labels)
    output = run(
        "build",
        tmp_path / "model.onnx",
        "-o",
        tmp_path / "art",
        "--loss",
        "cross_entropy",
        "--loss-output",
        "scores",
        "--optimizer",
        "adamw:weight_decay=0.1",
        "--lr",
        0.02,
        "--metric",
        "accuracy",
        "--freeze",
        "fc1.bias",
        "--ema",
        0.9,
    )
    assert "75 trainable parameters in 3 tensors" in output
    assert "batch: x float32[batch, 6], labels int64[batch]" in output
    return tmp_path


def test_from_model_to_trained_model(place: Path) -> None:
    art, test = place / "art", place / "test.npz"
    manifest = Artifacts.load(art).manifest
    assert (manifest.optimizer["lr"], manifest.optimizer["weight_decay"]) == (0.02, 0.1)
    before = json.loads(run("eval", art, "--data", test, "--json"))
    output = run(
        "train",
        art,
        "--data",
        place / "train.npz",
        "--validation",
        test,
        "--epochs",
        5,
        "--batch-size",
        16,
        "--schedule",
        "cosine",
        "--warmup",
        0.1,
        "--seed",
        4,
    )
    assert "epoch 5/5  step 50  loss " in output
    assert output.endswith("trained to step 50\n")
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
    with pytest.raises(OnnxTrainError, match=r"already contains a run.*\nhint: --resume cont"):
        run("train", art, *common, "--epochs", 3)
    assert "trained to step 15" in run("train", art, *common, "--epochs", 3, "--resume")
    assert Trainer(art).global_step == 15


def test_interrupt_exits_with_130(place: Path) -> None:
    """The directory keeps its weights, and the message says how to continue."""
    script = (
        "import os, signal, sys\n"
        "from onnxtrain.cli.main import main\n"
        "from onnxtrain.training.fit import Run\n"
        "record = Run._record_step\n"
        "def press(self, *a):\n"
        "    record(self, *a)\n"
        "    if self.batch == 3: os.kill(os.getpid(), signal.SIGINT)\n"
        "Run._record_step = press\n"
        "main()\n"
    )
    art = place / "art"
    before = (art / "checkpoint").read_bytes()
    command = [sys.executable, "-c", script, "train", art, "--data", place / "train.npz", "--quiet"]
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 130
    last = art / "run" / "checkpoints" / "step-000000003.safetensors"
    assert done.stderr.splitlines() == [
        f"fit was interrupted after step 3; saved {last}",
        "hint: the same command with --resume continues",
    ]
    assert done.stdout == ""
    assert (art / "checkpoint").read_bytes() == before
    assert "trained to step 5" in run("train", art, "--data", place / "train.npz", "--resume")


def test_flags_of_other_programs(place: Path) -> None:
    words = ["train", place / "art", "--data", place / "train.npz", "--learning-rate", "0.1"]
    result = CliRunner().invoke(app, [str(w) for w in words], env={"COLUMNS": "120"})
    assert result.exit_code == 2
    assert re.search(r"No such option: --learning-rate.*--lr\b", result.output, re.DOTALL)


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


def test_invalid_sizes(place: Path) -> None:
    run(
        "build",
        place / "model.onnx",
        "-o",
        place / "fixed",
        "--loss",
        "cross_entropy",
        "--loss-output",
        "scores",
        "--dim",
        "batch=16",
        "--prefix",
        "p_",
    )
    spec = Artifacts.load(place / "fixed", prefix="p_").manifest.model("step")
    assert spec is not None
    assert spec.inputs[0].shape == (16, 6)
    with pytest.raises(PrepareError, match="invalid size 'batch'"):
        run("build", place / "model.onnx", "-o", place / "x", "--loss", "mse", "--dim", "batch")


def giant() -> bytes:
    """Write an .npz file whose header declares an array larger than any memory."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({2**61 - 1},)}}".encode() + b"\n"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        size = len(header).to_bytes(2, "little")
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + size + header)
    return out.getvalue()


def test_invalid_data_files(place: Path) -> None:
    x, labels = data(200)
    np.save(place / "one.npy", x)
    np.savez_compressed(place / "packed.npz", x=x, labels=labels)
    packed = (place / "packed.npz").read_bytes()
    damaged = bytearray(packed)
    damaged[200:260] = bytes(60)
    contents = {
        "bad.npz": (b"nothing", "not an .npz file"),
        "empty.npz": (b"", "not an .npz file"),
        "one.npz": ((place / "one.npy").read_bytes(), "an .npy file, whose array has no name"),
        "cut.npz": (packed[: len(packed) // 2], "not an .npz file of arrays: "),
        "damaged.npz": (bytes(damaged), "not an .npz file of arrays: "),
        "giant.npz": (giant(), "not an .npz file of arrays: "),
    }
    for name, (content, message) in contents.items():
        if content is not None:
            (place / name).write_bytes(content)
        with pytest.raises(OnnxTrainError, match=f"{name}: {message}(.|\n)*hint: numpy.savez"):
            run("train", place / "art", "--data", place / name)
    with pytest.raises(
        OnnxTrainError, match=r"tran.npz: no such file or folder\nhint: .* has 'train.npz', "
    ):
        run("train", place / "art", "--data", place / "tran.npz")
    os.mkfifo(place / "pipe.npz")
    with pytest.raises(OnnxTrainError, match=r"pipe.npz: cannot be read: not a regular file"):
        run("eval", place / "art", "--data", place / "pipe.npz")
    with pytest.raises(OnnxTrainError, match="art: no images"):
        run("eval", place / "art", "--data", place / "art")


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


def test_unwritable_outputs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    art, npz = place / "art", place / "train.npz"
    (place / "file").write_text("x")
    below = place / "file" / "below"
    for out in (place / "file", below):
        with pytest.raises(SaveError, match=r"file.*: cannot be written\n  .*(File exists|Not a)"):
            run("train", art, "--data", npz, "--quiet", "--out", out)
    for output in (below, place, place / "none" / "m.onnx", place / ("m" * 300)):
        with pytest.raises(SaveError, match="cannot be written\n  "):
            run("export", art, "-o", output)
        with pytest.raises(SaveError, match="cannot be written\n  "):
            run(
                "lower",
                place / "model.onnx",
                "-o",
                place / "m.onnx",
                "--opset",
                13,
                "--no-verify",
                "--config",
                output,
            )
    with pytest.raises(SaveError, match="below: cannot be created: Not a directory"):
        run("build", place / "model.onnx", "-o", below, "--loss", "mse", "--loss-output", "scores")

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    before = {p.name for p in place.iterdir()}
    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(SaveError, match="Read-only file system"):
        run("train", art, "--data", npz, "--quiet", "--out", place / "new")
    monkeypatch.setattr(os, "unlink", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(SaveError, match=r"long.onnx': cannot be written\n  .*Read-only"):
        run("export", art, "-o", place / "long.onnx")
    monkeypatch.undo()
    left = {p.name for p in place.iterdir()} - before
    assert all(name.startswith(".long.onnx.") for name in left)  # it could not be removed


def test_labels_out_of_range(place: Path) -> None:
    x, labels = data(160)
    labels[100] = 3
    np.savez(place / "labels.npz", x=x, labels=labels)
    with pytest.raises(
        LabelError, match=r"'labels' has 3 in .*labels\.npz: row 100; the model has 3"
    ):
        run("train", place / "art", "--data", place / "labels.npz", "--quiet")


def test_invalid_epochs_and_missing_checkpoints(place: Path) -> None:
    common = ("train", place / "art", "--data", place / "train.npz", "--quiet")
    with pytest.raises(OnnxTrainError, match="epochs must be an integer of at least 1, got 0"):
        run(*common, "--epochs", 0)
    with pytest.raises(OnnxTrainError, match=r"run: no checkpoint to resume from\nhint"):
        run(*common, "--resume")


def test_build_over_a_trained_directory(place: Path) -> None:
    art, zero = place / "art", place / "zero.onnx"
    run("train", art, "--data", place / "train.npz", "--quiet", "--validation", place / "test.npz")
    model = classifier()
    for tensor in model.graph.initializer:
        if tensor.name != "fc1.bias":
            tensor.raw_data = bytes(len(tensor.raw_data))
    zero.write_bytes(model.SerializeToString())
    settings = (
        *("--loss", "cross_entropy", "--loss-output", "scores", "--metric", "accuracy"),
        *("--optimizer", "adamw:weight_decay=0.1", "--lr", 0.02, "--freeze", "fc1.bias"),
        *("--ema", 0.9),
    )
    with (
        hints_name_flags(),
        pytest.raises(SaveError, match=r"art has trained weights: .*\nhint: --force replaces them"),
    ):
        run("build", zero, "-o", art, *settings)
    run("export", art, "-o", place / "best.onnx", "--best")
    run("build", zero, "-o", art, *settings, "--force")
    with pytest.raises(CheckpointError, match="this run started from other weights"):
        run("export", art, "-o", place / "other.onnx", "--best")
    assert not (place / "other.onnx").exists()
    with pytest.raises(CheckpointError, match="this run started from other weights"):
        run("train", art, "--data", place / "train.npz", "--quiet", "--resume", "--epochs", 2)


def test_training_info_out_and_in(place: Path) -> None:
    art, file, back = place / "art", place / "trainable.onnx", place / "back"
    run("train", art, "--data", place / "train.npz", "--quiet")
    run("export", art, "-o", file, "--training-info")
    onnx.checker.check_model(file, full_check=True)
    assert len(onnx.load(file).training_info) == 2
    run("build", file, "-o", back)
    first, second = Trainer(art), Trainer(back)
    assert first.global_step == second.global_step > 0
    x, y = data(8)
    assert [first.step(x, y).loss for _ in range(3)] == [second.step(x, y).loss for _ in range(3)]
    with pytest.raises(PrepareError, match=r"--lr, --target|--target, --lr"), hints_name_flags():
        run("build", file, "-o", place / "other", "--target", "wasm", "--lr", 1)
    with pytest.raises(PrepareError, match="--loss is required: the file has no training info"):
        run("build", place / "model.onnx", "-o", place / "other")
    refused = pytest.raises(OnnxTrainError, match=r"leave out --ema, --fold and --opset")
    with hints_name_flags(), refused:
        run("export", art, "-o", file, "--training-info", "--fold")


def test_monitor_is_checked_before_the_first_epoch(place: Path) -> None:
    common = ("train", place / "art", "--data", place / "train.npz", "--quiet")
    with pytest.raises(
        OnnxTrainError,
        match=r"unknown monitor: 'val_acc' .*\nhint: --validation FILE --monitor val_accuracy$",
    ):
        run(*common, "--monitor", "val_acc")
    with pytest.raises(OnnxTrainError, match=r"unknown monitor: .*\nhint: --metric f1 --monitor v"):
        run(*common, "--monitor", "val_f1", "--validation", place / "test.npz")
    assert not list((place / "art" / "run").glob("checkpoints/*"))
    run(*common, "--validation", place / "test.npz", "--metric", "f1", "--monitor", "val_f1")
    rows = (place / "art" / "run" / "metrics.jsonl").read_text().splitlines()
    assert "val_f1" in json.loads(rows[-1])


def test_metrics_of_eval(place: Path) -> None:
    common = ("eval", place / "art", "--data", place / "test.npz")
    words = ("--metric", "f1", "--metric", "confusion_matrix")
    printed = run(*common, *words).splitlines()
    values = json.loads(run(*common, *words, "--json"))
    assert [line.split()[0] for line in printed[:4]] == [
        *("loss", "accuracy", "f1", "confusion_matrix"),
    ]
    assert printed[2] == f"f1 {values['f1']:.6g}"
    assert np.sum(values["confusion_matrix"]) == 80


def test_resume_with_fewer_epochs_says_that_nothing_is_left(place: Path) -> None:
    common = ("train", place / "art", "--data", place / "train.npz")
    run(*common, "--epochs", 2)
    before = (place / "art" / "checkpoint").read_bytes()
    output = run(*common, "--epochs", 1, "--resume")
    assert output.replace("\n", "").endswith(
        "trained to step 10 (nothing to train: the run has 2 epochs; --epochs 3 continues it)"
    )
    assert (place / "art" / "checkpoint").read_bytes() == before
    assert "trained to step 15\n" in run(*common, "--epochs", 3, "--resume")


def test_help_lists_commands_in_the_order_of_use() -> None:
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"})
    listed = re.findall(r"^│ ([a-z][a-z-]*) ", result.output, re.MULTILINE)
    assert listed[:7] == ["example", "explain", "build", "lr-find", "train", "eval", "export"]
