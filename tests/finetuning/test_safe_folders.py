"""Folders of others: links out of a model folder or into an output folder; what a run reports."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

import onnxtrain
from onnxtrain.checkpoint.safetensors_file import load_checkpoint
from onnxtrain.cli.main import app
from onnxtrain.errors import OnnxTrainError, PrepareError, SaveError
from onnxtrain.finetuning import FineTuneOptions, FineTuneRun
from onnxtrain.finetuning.finetune import ThroughputReporter
from onnxtrain.training.fit import CheckpointRotation, Run
from onnxtrain.training.results import StepResult
from tests.finetuning.test_docs import vision, write_images
from tests.text.models import encoder, genai_folder, llama
from tests.text.words import write_lines, write_tokenizer

ROWS = {"input_ids": [[5, 6, 7, 8]] * 4}
FAST = {"progress": False, "sample_tokens": 0, "epochs": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("tokenizers", reason="the extra onnxtrain[text] is not installed")
    return genai_folder(write_tokenizer(tmp_path / "model"), llama(layers=1))


def test_a_link_out_of_the_model_folder_is_not_published(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "private_key"
    secret.write_text("secret")
    (folder / "vocab.txt").symlink_to(secret)
    with pytest.raises(SaveError, match=r"vocab.txt'.*leads out of the folder"):
        onnxtrain.finetune(folder, ROWS, tmp_path / "out", **FAST)
    assert not list((tmp_path / "out").rglob("vocab.txt"))


@pytest.mark.parametrize("name", ["merged", "base", "peft", "run", "run/checkpoints"])
def test_an_output_folder_with_links_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    link = tmp_path / "out" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    with pytest.raises(SaveError, match=f"{name}: the output folder has a link"):
        onnxtrain.finetune(folder, ROWS, tmp_path / "out", **FAST)
    assert not list(outside.iterdir())


def test_files_of_an_output_folder_are_replaced_not_written_through(
    folder: Path, tmp_path: Path
) -> None:
    secret, out = tmp_path / "secret", tmp_path / "out"
    secret.write_text("secret")
    out.mkdir()
    for name in ("adapter.onnx_adapter", "adapter.onnx_adapter.part", "report.json"):
        (out / name).symlink_to(secret)
    onnxtrain.finetune(folder, ROWS, out, **FAST)
    assert secret.read_text() == "secret"
    assert not (out / "adapter.onnx_adapter").is_symlink()


def test_an_output_that_is_a_file_is_named_before_training(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(SaveError, match="the output is a file, not a folder"):
        onnxtrain.finetune(folder, ROWS, tmp_path / "out", **FAST)
    data = write_lines(tmp_path / "a.jsonl", {"text": "the cat says meow"})
    arguments = ["finetune", str(folder), "--data", str(data), "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, SaveError)
    assert "hint: -o FOLDER" in str(result.exception)


def test_adapters_that_do_not_reach_the_loss_are_reported(folder: Path, tmp_path: Path) -> None:
    model = ir.from_proto(onnx.load(folder / "model.onnx"))
    (scores,) = [y for y in model.graph.outputs if y.name == "logits"]
    head = scores.producer()
    assert head is not None
    hidden = head.inputs[0]
    tensor = ir.Tensor(np.ones((32, 16), np.float32), name="aside.weight")
    weight = ir.Value(name="aside.weight", const_value=tensor, shape=tensor.shape)
    weight.type = ir.TensorType(ir.DataType.FLOAT)
    model.graph.register_initializer(weight)
    node = ir.node("MatMul", [hidden, weight], name="/aside/MatMul")
    y = node.outputs[0]
    y.name, y.type = "aside", weight.type
    y.shape = ir.Shape(["batch", "sequence", 16])
    model.graph.append(node)
    model.graph.outputs.append(y)
    onnx.save(ir.to_proto(model), folder / "model.onnx")
    targets = ["aside", "*.o_proj"]
    result = onnxtrain.finetune(folder, ROWS, tmp_path / "out", targets=targets, **FAST)
    note = "1 adapters do not train, the loss does not depend on them: aside"
    assert note in result.notes
    assert note in json.loads((tmp_path / "out/report.json").read_text())["notes"]


def test_skipped_rows_and_images_are_reported(folder: Path, tmp_path: Path) -> None:
    rows = {"input_ids": [[5, 6, 7, 8]] * 3 + [[5]]}
    run = FineTuneRun(folder, rows, FineTuneOptions(progress=False))
    assert run.task.notes == [
        "the data: 1 dropped: no token to train on within max_length (line 4)"
    ]
    onnx.save(vision(), tmp_path / "vision.onnx")
    images = write_images(tmp_path / "images")
    (images / "cat" / "9.png").write_bytes(b"\x89PNG\r\n damaged")
    run = FineTuneRun(tmp_path / "vision.onnx", images, FineTuneOptions(progress=False))
    assert "skipped 1 of 17 images:" in run.task.notes[0]
    assert "9.png: not a readable image" in run.task.notes[0]
    for file in images.rglob("*.png"):
        file.write_bytes(b"damaged")
    with pytest.raises(OnnxTrainError, match="17 images cannot be read, 0 can:"):
        FineTuneRun(tmp_path / "vision.onnx", images, FineTuneOptions(progress=False))


def test_an_encoder_with_labels_is_told_the_kind(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="the extra onnxtrain[text] is not installed")
    write_tokenizer(tmp_path)
    onnx.save(encoder(), tmp_path / "model.onnx")
    rows = [{"text": "the cat", "label": "a"}, {"text": "the dog", "label": "b"}]
    with pytest.raises(PrepareError, match=r"embeddings does not.*\n.*, or kind='classification'"):
        onnxtrain.finetune(tmp_path, rows, tmp_path / "out", **FAST)
    data = write_lines(tmp_path / "a.jsonl", *rows)
    arguments = ["finetune", str(tmp_path), "--data", str(data), "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert str(result.exception).endswith(", or --kind classification")


def test_resuming_prints_the_batch_size_of_the_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {**FAST, "batch_size": 2, "validation": 0.25}
    onnxtrain.finetune(folder, ROWS, tmp_path / "out", **options)
    more = {**options, "epochs": 2, "progress": "plain"}
    onnxtrain.finetune(folder, ROWS, tmp_path / "out", resume=True, **more)
    printed = capsys.readouterr()
    resumed = next(t for t in (printed.out + printed.err).splitlines() if "resumed at" in t)
    assert "batch_size" not in resumed  # it is given again, and the same
    path = CheckpointRotation(tmp_path / "out/run/checkpoints").newest()
    assert path is not None
    assert load_checkpoint(path)[1]["run"]["settings"]["batch_size"] == 2


def test_ctrl_c_saves_writes_no_outputs_and_resumes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returned as if the run had ended, with a full output folder and exit code 0."""
    steps: list[int] = []
    on_step = ThroughputReporter.on_step

    def interrupt(self: ThroughputReporter, run: Run, result: StepResult) -> None:
        on_step(self, run, result)
        steps.append(1)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ThroughputReporter, "on_step", interrupt)
    options = {**FAST, "batch_size": 1, "epochs": 2, "validation": 0.25}
    with pytest.raises(KeyboardInterrupt, match=r"hint: finetune\(.*out', resume=True\)"):
        onnxtrain.finetune(folder, ROWS, tmp_path / "out", **options)
    assert not list((tmp_path / "out").glob("merged")) + list((tmp_path / "out").glob("peft"))
    resumed = onnxtrain.finetune(folder, ROWS, tmp_path / "out", resume=True, **options)
    whole = onnxtrain.finetune(folder, ROWS, tmp_path / "whole", **options)
    assert resumed.after == whole.after
