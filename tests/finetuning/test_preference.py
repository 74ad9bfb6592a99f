"""Preference tuning of a small language model: what the margins become, and refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.errors import LoadError, PrepareError
from onnxtrain.finetuning import FineTuneOptions, FineTuneRun
from onnxtrain.text.data import read_records
from onnxtrain.training import Trainer
from tests.text.models import genai_folder, llama
from tests.text.words import write_lines, write_tokenizer

SOUNDS = {"cat": "meow", "dog": "woof", "mouse": "hello"}
PAIRS = [
    {"prompt": f"what does the {a} say?", "chosen": f"the {a} says {s}", "rejected": "the mat"}
    for a, s in SOUNDS.items()
] * 2
SINGLE = [
    {"prompt": p["prompt"], "completion": p[k], "label": k == "chosen"}
    for p in PAIRS
    for k in ("chosen", "rejected")
]
FAST: dict[str, Any] = {"progress": False, "lr": 0.01, "batch_size": 3, "validation": "0"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tokenizers", reason="the extra onnxtrain[text] is not installed")
    return genai_folder(write_tokenizer(tmp_path_factory.mktemp("model")), llama(layers=1))


def log_probability(model: Path, run: FineTuneRun, prompt: str, answer: str) -> float:
    """Return the summed log-probability of an answer, computed by numpy."""
    tokenizer = run.task.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(f"{prompt} {answer}").ids
    start = len(tokenizer.encode(prompt).ids)
    session = onnxruntime.InferenceSession(str(model))
    feeds = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
    for x in session.get_inputs():
        if x.name.startswith("past"):
            feeds[x.name] = np.zeros((1, x.shape[1], 0, x.shape[3]), np.float32)
    logits = session.run(["logits"], feeds)[0][0].astype(np.float64)
    each = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return sum(each[i - 1, ids[i]] for i in range(start, len(ids)))


@pytest.mark.parametrize("method", ["dpo", "ipo", "orpo"])
def test_pairs_raise_the_margin_of_the_chosen_answer(
    method: str, folder: Path, tmp_path: Path
) -> None:
    data = write_lines(tmp_path / "pairs.jsonl", *PAIRS)
    out = tmp_path / "out"
    result = onnxtrain.finetune(folder, data, out, method=method, epochs=12, **FAST)
    losses = result.history.losses
    steps = result.history.steps
    assert steps[-1]["rewards/accuracies"] == 1
    assert steps[-1]["rewards/margins"] > steps[0]["rewards/margins"]
    if method == "dpo":  # the adapters start at zero: the model is its reference
        assert losses[0] == pytest.approx(math.log(2), rel=1e-4)
    assert losses[-1] < losses[0]
    run = FineTuneRun(folder, data, FineTuneOptions(method=method))
    margins = []
    for model in (folder / "model.onnx", out / "merged" / "model.onnx"):
        chosen, rejected = (
            np.mean([log_probability(model, run, p["prompt"], p[k]) for p in PAIRS[:3]])
            for k in ("chosen", "rejected")
        )
        margins.append(chosen - rejected)
    assert margins[1] > margins[0] + 1
    assert {"peft/", "adapter.onnx_adapter", "merged/"} <= set(result.files)


def test_adapters_by_block_leave_no_branch(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"method": "dpo", "lora_blocks": True, "epochs": 1, **FAST}
    onnxtrain.finetune(folder, PAIRS, tmp_path, **options)
    merged = onnx.load(tmp_path / "merged" / "model.onnx")
    plain = onnx.load(folder / "model.onnx")
    count = [sum(n.op_type == "MatMulNBits" for n in m.graph.node) for m in (plain, merged)]
    assert count[0] == count[1]
    assert not any("lora_" in i.name for i in merged.graph.initializer)
    assert any(i.name.endswith(".zero_points") for i in merged.graph.initializer)


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_stored_reference_trains_alike(method: str, folder: Path) -> None:
    data = PAIRS if method == "dpo" else SINGLE
    losses = []
    for cached in (False, True):
        options = FineTuneOptions(method=method, cache_reference=cached, batch_size=3, lr=0.01)
        run = FineTuneRun(folder, data, options)
        _, artifacts = run.build()
        trainer = Trainer(artifacts)
        trainer.lr = 0.01
        assert ("reference_logps" in trainer.inputs) == cached
        batches = run.task.batches(trainer.inputs)
        assert batches is not None
        steps = [trainer.step(**b.arrays).loss for e in range(4) for b in batches(e)]
        losses.append(steps)
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-4)
    assert losses[0][-1] < losses[0][0]


def test_without_adapters_the_reference_is_stored(folder: Path, tmp_path: Path) -> None:
    result = onnxtrain.finetune(
        folder,
        PAIRS,
        tmp_path / "out",
        method="dpo",
        lora_rank=0,
        epochs=4,
        **FAST,
    )
    losses = result.history.losses
    assert losses[0] == pytest.approx(math.log(2), rel=1e-3)
    assert losses[-1] < 0.9 * losses[0]


def test_conversations_as_trl_stores_them() -> None:
    question = [{"role": "user", "content": "what does the cat say?"}]
    good, bad = ([{"role": "assistant", "content": t}] for t in ("meow", "woof"))
    explicit = {"prompt": question, "chosen": good, "rejected": bad}
    implicit = {"chosen": question + good, "rejected": question + bad}
    for row in (explicit, implicit):
        (record,) = read_records([row]).records
        assert record.format == "preference"
        assert record.fields["prompt"] == question
        assert record.fields["chosen"] == question + good
        assert record.fields["rejected"] == question + bad


def test_only_the_answer_counts(folder: Path) -> None:
    question = [{"role": "user", "content": "what does the cat say?"}]
    earlier = [{"role": "assistant", "content": "hello"}, *question]
    chosen, rejected = ([{"role": "assistant", "content": t}] for t in ("meow", "woof"))
    rows = [{"prompt": question + earlier, "chosen": chosen, "rejected": rejected}] * 2
    run = FineTuneRun(folder, rows, FineTuneOptions(method="dpo"))
    assert run.task.tokenizer is not None
    groups = run.task.groups  # pyright: ignore[reportAttributeAccessIssue]
    texts = [run.task.tokenizer.decode(e.labels[e.labels >= 0].tolist()) for e in groups[0]]
    assert [t.strip() for t in texts] == ["meow", "woof"]


def test_refusals(folder: Path) -> None:
    with pytest.raises(PrepareError, match="unknown method: 'ppo'"):
        FineTuneOptions(method="ppo")
    with pytest.raises(PrepareError, match="options of preference tuning\nhint: method='dpo'"):
        FineTuneOptions(beta=0.2)
    with pytest.raises(PrepareError, match=r'hint: use \{"prompt": \.\.\., "chosen"'):
        FineTuneRun(folder, SINGLE, FineTuneOptions(method="dpo"))
    with pytest.raises(PrepareError, match="or method='dpo' for pairs"):
        FineTuneRun(folder, PAIRS, FineTuneOptions())
    with pytest.raises(PrepareError, match="two examples or more in a batch"):
        FineTuneRun(folder, SINGLE, FineTuneOptions(method="kto", batch_size=1))
    with pytest.raises(LoadError, match="neither all texts nor all lists"):
        read_records([{"prompt": "a", "chosen": [{"role": "user"}], "rejected": "b"}])
