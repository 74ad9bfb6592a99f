"""Fine-tuning of language models: data, adapters, output files, resuming and errors."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.errors import LoadError, OnnxTrainError, PrepareError, ShapeError
from onnxtrain.finetuning import FineTuneOptions, FineTuneRun
from onnxtrain.graph.io import reader
from onnxtrain.text import generate
from onnxtrain.text.generate import make_decoder
from tests.text.models import HEAD, genai_folder, llama
from tests.text.words import write_lines, write_tokenizer

ANIMALS = (("cat", "meow"), ("dog", "woof"), ("mouse", "hello"))
CHAT = [
    {
        "messages": [
            {"role": "user", "content": f"what does the {animal} say?"},
            {"role": "assistant", "content": f"the {animal} says {sound}"},
        ]
    }
    for animal, sound in ANIMALS * 2
]
FAST = {"progress": False, "sample_tokens": 4, "lr": 0.01, "batch_size": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tokenizers", reason="the extra onnxtrain[text] is not installed")
    return genai_folder(write_tokenizer(tmp_path_factory.mktemp("model")), llama(layers=1))


def digests(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_chat_finetuning_learns_and_writes_all_files(folder: Path, tmp_path: Path) -> None:
    before = digests(folder)
    data = write_lines(tmp_path / "chat.jsonl", *CHAT, "", "{bad")
    result = onnxtrain.finetune(
        folder, data, tmp_path / "out", validation=0.34, epochs=25, targets="all-linear", **FAST
    )
    assert digests(folder) == before
    assert result.after["perplexity"] < 0.1 * result.before["perplexity"]
    assert result.after["perplexity"] == pytest.approx(np.exp(result.after["loss"]))
    assert "skipped 2 of 8 lines: line 7: empty; line 8: not JSON" in result.notes[0]
    assert len(result.samples) == 2
    assert set(result.files) == {"peft/", "adapter.onnx_adapter", "base/", "merged/"}
    question = CHAT[0]["messages"][:1]
    answer = generate(tmp_path / "out" / "merged", question, max_tokens=6)
    assert str(answer).strip() in {f"the {a} says {sound}" for a, sound in ANIMALS}
    assert json.loads((tmp_path / "out/report.json").read_text())["after"] == result.after
    check_served_alike(tmp_path / "out")


def check_served_alike(out: Path) -> None:
    """The adapter on its base gives the logits of the merged model."""
    ids = np.array([[5, 17, 40, 8]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    feeds |= {
        f"past_key_values.0.{kind}": np.zeros((1, 1, 0, HEAD), np.float32)
        for kind in ("key", "value")
    }
    adapter = onnxruntime.LoraAdapter()
    adapter.Load(str(out / "adapter.onnx_adapter"))
    active = onnxruntime.RunOptions()
    active.add_active_adapter(adapter)
    base = onnxruntime.InferenceSession(str(out / "base/model.onnx"))
    merged = onnxruntime.InferenceSession(str(out / "merged/model.onnx"))
    (plain,) = base.run(["logits"], feeds)
    (adapted,) = base.run(["logits"], feeds, run_options=active)
    (expected,) = merged.run(["logits"], feeds)
    np.testing.assert_allclose(adapted, expected, rtol=1e-4, atol=1e-4)
    assert np.abs(plain - expected).max() > 0.1


def test_texts_arrays_packing_and_no_validation(folder: Path, tmp_path: Path) -> None:
    texts = ["the cat sat on the mat and looked at the dog"] * 6
    packed = onnxtrain.finetune(
        folder, texts, tmp_path / "a", pack=True, max_length=64, epochs=2, **FAST
    )
    losses = packed.history.losses
    assert losses[-1] < losses[0]
    assert packed.before == packed.after == {}
    rows = {"input_ids": [[5, 6, 7, 8]] * 4, "labels": [[-100, 6, 7, 8]] * 4}
    plain = onnxtrain.finetune(folder, rows, tmp_path / "b", epochs=3, validation=0.25, **FAST)
    assert plain.after["loss"] < plain.before["loss"]


def test_train_selects_weights(folder: Path, tmp_path: Path) -> None:
    rows = {"input_ids": [[5, 6, 7, 8]] * 4}
    result = onnxtrain.finetune(folder, rows, tmp_path / "out", train="norm", epochs=3, **FAST)
    assert result.history.losses[-1] < result.history.losses[0]
    assert set(result.files) == {"merged/"}
    before, after = (onnx.load(p / "model.onnx") for p in (folder, tmp_path / "out/merged"))
    assert [x.name for x in after.graph.input] == [x.name for x in before.graph.input]
    old, new = ({t.name: t for t in m.graph.initializer} for m in (before, after))
    changed = {
        n
        for n, t in old.items()
        if ir.serde.deserialize_tensor(t).tobytes() != ir.serde.deserialize_tensor(new[n]).tobytes()
    }
    assert changed
    assert all("norm" in name for name in changed)


def test_a_killed_run_resumes_bit_exactly(folder: Path, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "chat.jsonl", *CHAT)
    options = ["--epochs", "12", "--batch-size", "2", "--lr", "0.01", "--validation", "0.34"]
    options += ["--sample-tokens", "0", "--checkpoint-every", "1", "--accumulate", "2"]

    def start(out: Path, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "onnxtrain", "finetune", str(folder), "--data", str(data)]
        return subprocess.Popen(
            [*command, "-o", str(out), *options, *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ,
        )

    whole = start(tmp_path / "whole")
    output = whole.communicate(timeout=300)[0]
    assert whole.returncode == 0, output
    broken = start(tmp_path / "broken")
    checkpoints = tmp_path / "broken/run/checkpoints"
    limit = time.monotonic() + 120
    while not list(checkpoints.glob("step-*3.safetensors")):
        assert broken.poll() is None, broken.communicate()[0]
        assert time.monotonic() < limit, "no checkpoint was written"
        time.sleep(0.005)
    broken.send_signal(signal.SIGKILL)
    broken.communicate(timeout=60)
    assert not (tmp_path / "broken/peft").exists()
    resumed = start(tmp_path / "broken", "--resume")
    output = resumed.communicate(timeout=300)[0]
    assert resumed.returncode == 0, output
    assert "resumed at step" in output
    assert "tokens/s" in output
    for name in ("peft/adapter_model.safetensors", "adapter.onnx_adapter"):
        first, second = ((tmp_path / run / name).read_bytes() for run in ("whole", "broken"))
        assert first == second
    other = start(tmp_path / "broken", "--resume", "--lora-rank", "4")
    output = other.communicate(timeout=120)[0]
    assert other.returncode == 1
    assert "options changed: lora_rank was 8, now 4" in output


def test_preview_shows_masks_and_trains_nothing(folder: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from onnxtrain.cli.main import app

    data = write_lines(tmp_path / "chat.jsonl", *CHAT)
    arguments = ["finetune", str(folder), "--data", str(data), "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*arguments, "--preview"])
    assert result.exit_code == 0, result.output
    assert result.output.count("learned | ") == 3
    assert "read    | '<|im_start|>user" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_length": 500}, PrepareError, "max_length=500 exceeds the 128 positions"),
        ({"targets": "qqq*"}, PrepareError, "qqq"),
        ({"lora_rank": 99}, PrepareError, "rank 99 is larger than a layer"),
        ({"lora_rank": -1}, PrepareError, "lora_rank must not be negative"),
        ({"lora_rank": 4, "train": "norm"}, PrepareError, "train cannot be used with adapters"),
        ({"epochs": 0}, PrepareError, "epochs must be at least 1"),
        ({"kind": "poetry"}, PrepareError, "unknown kind of model: 'poetry'"),
        ({"kind": "vision"}, PrepareError, "vision requires a model with one 4-D input"),
        ({"validation": 1.5}, PrepareError, "a fraction in"),
        ({"validation": "missing.jsonl"}, LoadError, "cannot be read"),
        ({"tokenizer": "nowhere"}, LoadError, "tokenizer not found"),
    ],
)
def test_invalid_options_raise_before_training(
    folder: Path, tmp_path: Path, options: dict, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        onnxtrain.finetune(folder, CHAT, tmp_path / "out", **{**FAST, **options})
    assert not (tmp_path / "out").exists()


def test_invalid_data_raises_before_training(folder: Path, tmp_path: Path) -> None:
    def tune(data: object, **options: object) -> None:
        onnxtrain.finetune(folder, data, tmp_path / "out", **{**FAST, **options})  # type: ignore[arg-type]

    with pytest.raises(OnnxTrainError, match="label 96 in row 0 is out of range"):
        tune({"input_ids": [[1, 2]], "labels": [[1, 96]]})
    with pytest.raises(ShapeError, match="1 rows have more than 8 tokens, first row 0"):
        tune({"input_ids": [[1] * 9]}, max_length=8)
    with pytest.raises(PrepareError, match="does not support records with text, label"):
        tune([{"text": "a", "label": "b"}])
    with pytest.raises(LoadError, match="no such file or folder"):
        onnxtrain.finetune(tmp_path / "no", CHAT, tmp_path / "out")
    wide = genai_folder(write_tokenizer(tmp_path / "wide", 140), llama(layers=1))
    with pytest.raises(PrepareError, match="tokenizer does not match the model"):
        onnxtrain.finetune(wide, CHAT, tmp_path / "out", **FAST)
    assert not (tmp_path / "out").exists()


def test_a_used_output_folder_raises(folder: Path, tmp_path: Path) -> None:
    rows = {"input_ids": [[5, 6, 7, 8]] * 4}
    onnxtrain.finetune(folder, rows, tmp_path / "out", epochs=1, **FAST)
    with pytest.raises(OnnxTrainError, match="already contains a run"):
        onnxtrain.finetune(folder, rows, tmp_path / "out", epochs=1, **FAST)


def with_hidden_states(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the input of its last layer as an additional first output."""
    work = ir.from_proto(model)
    (scores,) = [y for y in work.graph.outputs if y.name == "logits"]
    head = scores.producer()
    state = None if head is None else head.inputs[0]
    assert state is not None
    state.name, state.dtype = "hidden_states", ir.DataType.FLOAT
    state.shape = ir.Shape([*(scores.shape or ())[:2], None])
    work.graph.outputs.insert(0, state)
    return ir.to_proto(work)


def test_models_with_extra_outputs_learn_the_same(folder: Path, tmp_path: Path) -> None:
    genai = genai_folder(write_tokenizer(tmp_path / "model"), with_hidden_states(llama(layers=1)))
    texts = [{"text": "the cat says meow"}] * 2
    made = [
        onnxtrain.finetune(source, texts, tmp_path / name, epochs=2, **FAST).history.losses
        for name, source in (("plain", folder), ("more", genai))
    ]
    assert made[0] == made[1]


def test_inputs_embeds_models_raise(tmp_path: Path) -> None:
    model = llama(layers=1)
    model.graph.input[0].name = "inputs_embeds"
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name == "input_ids":
                node.input[i] = "inputs_embeds"
    genai = genai_folder(write_tokenizer(tmp_path / "model"), model)
    with pytest.raises(
        PrepareError, match=r"'inputs_embeds': embeddings instead of token ids\nhint: exp"
    ):
        onnxtrain.finetune(genai, [{"text": "the cat"}] * 2, tmp_path / "out", **FAST)


def test_models_that_do_not_run_train_without_samples(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OnnxTrainError("onnxruntime cannot load the model: no kernel of bfloat16\nhint: none")

    module = sys.modules["onnxtrain.finetuning.finetune"]  # its package has a function of this name
    monkeypatch.setattr(module, "make_decoder", refuse)
    texts = [{"text": "the cat says meow"}] * 2
    result = onnxtrain.finetune(folder, texts, tmp_path / "out", epochs=1, **FAST)
    assert result.samples == ()
    assert "no samples: the model does not run here: onnxruntime cannot" in result.notes[-1]
    assert "merged/" in result.files


@pytest.mark.parametrize("lora_rank", [2, 0])
def test_preparing_a_run_loads_and_checks_the_model_once(
    lora_rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[int] = []
    finish = reader._finish_load
    monkeypatch.setattr(reader, "_finish_load", lambda *args: loads.append(1) or finish(*args))
    options = FineTuneOptions(lora_rank=lora_rank, progress=False)
    run = FineTuneRun(folder, CHAT, options)
    run.build()
    make_decoder(run.folder)
    assert len(loads) == 1
