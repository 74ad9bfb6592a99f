"""Encoders: text classification, sentence embeddings, and the layers added for them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.errors import LoadError, PrepareError
from onnxtrain.finetuning.arguments import FineTuneOptions
from onnxtrain.finetuning.tasks import TaggingTask
from onnxtrain.text import add_classifier, add_pooling, inspect_model
from tests.text.models import encoder, genai_folder, llama
from tests.text.words import write_tokenizer

IDS = np.array([[5, 6, 7, 8], [9, 10, 0, 0]])
MASK = np.array([[1, 1, 1, 1], [1, 1, 0, 0]])
FEEDS = {"input_ids": IDS, "attention_mask": MASK, "token_type_ids": np.zeros_like(IDS)}
FAST = {"progress": False, "lr": 0.01, "batch_size": 4, "epochs": 8}
LABELLED = [
    {"text": f"the {animal} {verb} {place}", "label": label}
    for animal, label in (("cat", "cats"), ("dog", "dogs"))
    for verb in ("sat", "ran", "looked")
    for place in ("on the mat", "to the house")
]


def run(model: ir.Model) -> np.ndarray:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    return session.run(None, FEEDS)[0]


def folder_of(path: Path, model: onnx.ModelProto) -> Path:
    pytest.importorskip("tokenizers", reason="the extra onnxtrain[text] is not installed")
    write_tokenizer(path)
    onnx.save(model, path / "model.onnx")
    return path


def test_pooling_respects_the_attention_mask() -> None:
    model = encoder()
    hidden = onnxruntime.InferenceSession(model.SerializeToString()).run(None, FEEDS)[0]
    mean = np.stack([hidden[0].mean(0), hidden[1, :2].mean(0)])
    np.testing.assert_allclose(run(add_pooling(model)), mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(run(add_pooling(model, how="first")), hidden[:, 0], rtol=1e-6)
    again = add_pooling(add_pooling(model))
    assert [y.name for y in again.graph.outputs] == ["sentence_embedding"]
    np.testing.assert_allclose(run(again), mean, rtol=1e-5, atol=1e-6)
    assert run(add_classifier(model, 3)).shape == (2, 3)
    with pytest.raises(PrepareError, match="unknown pooling: 'max'"):
        add_pooling(model, how="max")


@pytest.mark.parametrize(
    ("classes", "rank"), [(0, 0), (2, 0), (5, 0), (2, 4)], ids=["new", "same", "other", "adapters"]
)
def test_classification_learns(tmp_path: Path, classes: int, rank: int) -> None:
    folder = folder_of(tmp_path / "model", encoder(classes=classes))
    given = {"kind": "classification"} if not classes else {}
    if rank:
        given |= {"lora_rank": rank, "targets": "all-linear"}
    result = onnxtrain.finetune(
        folder, LABELLED, tmp_path / "out", validation=0.25, **given, **{**FAST, "epochs": 20}
    )
    first, *_, last = (epoch["loss"] for epoch in result.history.epochs)
    assert last < (0.9 if rank else 0.5) * first  # behind a frozen toy only a little is to be had
    assert rank or result.after["accuracy"] == 1.0
    assert json.loads((tmp_path / "out/labels.json").read_text()) == {"0": "cats", "1": "dogs"}
    session = onnxruntime.InferenceSession(str(tmp_path / "out/merged/model.onnx"))
    assert session.run(["logits"], FEEDS)[0].shape == (2, 2)
    assert ("peft/" in result.files) == bool(rank)


@pytest.mark.parametrize("classes", [0, 1, 3], ids=["new", "same", "other"])
def test_regression_learns(tmp_path: Path, classes: int) -> None:
    folder = folder_of(tmp_path / "model", encoder(classes=classes))
    rows = [{**r, "label": 41.5 if "cat" in r["text"] else "42.5"} for r in LABELLED]
    options = {**FAST, "epochs": 25, "validation": 0.25, "kind": "regression"}
    result = onnxtrain.finetune(folder, rows, tmp_path / "out", **options)
    if classes != 1:  # a new head begins at the mean
        assert result.before["mae"] < 2.0
        assert result.after["mae"] < 0.25
        assert any("at first the mean of the labels 4" in note for note in result.notes)
    assert result.after["mae"] < 0.5 * result.before["mae"]
    session = onnxruntime.InferenceSession(str(tmp_path / "out/merged/model.onnx"))
    assert session.run(["logits"], FEEDS)[0].shape == (2, 1)
    with pytest.raises(
        PrepareError, match=r"line 1: the label 'cats' is not a number\nhint: kind="
    ):
        onnxtrain.finetune(folder, LABELLED, tmp_path / "other", **options)


TAGGED = [
    {"tokens": [*r["text"].split(), end], "tags": ["O", r["label"], *["O"] * 5]}
    for r in LABELLED
    for end in (".", "!")
]  # the tokenizer knows neither: such words have no token


@pytest.mark.parametrize("rank", [0, 4], ids=["all", "adapters"])
def test_token_classification_learns(tmp_path: Path, rank: int) -> None:
    folder = folder_of(tmp_path / "model", encoder())
    sentences = ("\n".join(f"{w} X {t}" for w, t in zip(*r.values(), strict=True)) for r in TAGGED)
    (tmp_path / "train.conll").write_text("-DOCSTART- X O\n\n" + "\n\n".join(sentences) + "\n")
    options = {**FAST, "lora_rank": rank, "targets": "all-linear"} if rank else FAST
    result = onnxtrain.finetune(
        *(folder, tmp_path / "train.conll", tmp_path / "out"),
        **{**options, "kind": "token_classification", "validation": 0.25, "epochs": 16},
    )
    assert result.before["accuracy"] < 0.7
    assert result.after["accuracy"] > 0.9
    classes = ["O", "cats", "dogs"]
    assert list(json.loads((tmp_path / "out/labels.json").read_text()).values()) == classes
    session = onnxruntime.InferenceSession(str(tmp_path / "out/merged/model.onnx"))
    assert session.run(["logits"], FEEDS)[0].shape == (2, 4, 3)
    if not rank:
        assert inspect_model(tmp_path / "out/merged").kind == "token_classification"


def test_tags_are_those_of_first_tokens(tmp_path: Path) -> None:
    """Spans of word pieces, and of byte-level tokens, which begin with the space before a word."""
    folder = folder_of(tmp_path / "model", encoder())
    options = FineTuneOptions(kind="token_classification").completed("token_classification")
    rows = [{"words": ["the", "unknown", "cat"], "ner_tags": [0, 1, 2]}] * 2
    task = TaggingTask(inspect_model(folder, "token_classification"), options, rows)
    spans = [(0, 0), (0, 3), (3, 6), (6, 11), (11, 15), (0, 0)]
    task.tokenizer = SimpleNamespace(encode=lambda text: ([1, 5, 6, 7, 8, 2], spans))  # pyright: ignore[reportAttributeAccessIssue]
    (example,) = task._group(task.records.records[0])
    assert example.labels.tolist() == [-100, 0, 1, -100, 2, -100]


def test_refused_tags(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", encoder())
    good = {"tokens": ["the", "cat"], "tags": ["O", "N"]}

    def refused(rows: list, error: type[Exception], match: str, **options: object) -> None:
        options = {**FAST, "kind": "token_classification", **options}
        with pytest.raises(error, match=match):
            onnxtrain.finetune(folder, rows, tmp_path / "out", **options)

    refused([{**good, "tags": ["O"]}], LoadError, "2 tokens have 1 tags")
    refused([{**good, "tokens": "the cat"}], LoadError, "'tokens' is not a list of words")
    refused(LABELLED, PrepareError, "does not support records with text, label\nhint: use .*conll")
    refused([good], PrepareError, r"kind='token_classification'", kind="classification")
    other = [{**good, "tags": ["O", "V"]}]
    refused([good], PrepareError, "unknown tag 'V' in validation data, line 1", validation=other)


@pytest.mark.parametrize("parts", [2, 3])
def test_embeddings_of_pairs_learn(tmp_path: Path, parts: int) -> None:
    folder = folder_of(tmp_path / "model", encoder())
    names = ("anchor", "positive", "negative")[:parts]
    texts = [
        ("what does the cat say?", "the cat says meow", "the dog ran away"),
        ("what does the dog say?", "the dog says woof", "the cat sat on the mat"),
        ("a mouse ran away", "the mouse from the house", "hello, how are you today?"),
        ("hello", "how are you today?", "the dog says woof"),
    ]
    rows = [dict(zip(names, row, strict=False)) for row in texts]
    result = onnxtrain.finetune(folder, rows, tmp_path / "out", **FAST)
    losses = result.history.losses
    assert losses[-1] < 0.7 * losses[0]
    session = onnxruntime.InferenceSession(str(tmp_path / "out/merged/model.onnx"))
    assert [y.name for y in session.get_outputs()] == ["sentence_embedding"]


def test_data_that_does_not_match_the_kind_raises(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", encoder(classes=2))
    with pytest.raises(PrepareError, match="does not support records with text\nhint: use"):
        onnxtrain.finetune(folder, ["a text"], tmp_path / "out", **FAST)
    one = [{"text": "a", "label": "x"}, {"text": "b", "label": "x"}]
    with pytest.raises(PrepareError, match="at least two classes, got x"):
        onnxtrain.finetune(folder, one, tmp_path / "out", **FAST)
    plain = folder_of(tmp_path / "plain", encoder())
    pair = [{"anchor": "a", "positive": "b"}] * 2
    with pytest.raises(PrepareError, match="batch_size must be at least 2"):
        onnxtrain.finetune(plain, pair, tmp_path / "out", **{**FAST, "batch_size": 1})


def test_kind_is_detected_from_the_files(tmp_path: Path) -> None:
    genai = genai_folder(tmp_path / "genai", llama(layers=1))
    assert (inspect_model(genai).kind, inspect_model(genai).reason) == (
        "causal_lm",
        "genai_config.json",
    )
    assert inspect_model(genai).vocab_size == 96
    assert inspect_model(genai).eos_token_ids == (2,)
    (genai / "genai_config.json").unlink()
    assert inspect_model(genai).reason == "its KV cache inputs"
    for name, model, kind in (
        ("scores", encoder(classes=3), "classification"),
        ("vectors", encoder(), "embeddings"),
    ):
        (tmp_path / name).mkdir()
        onnx.save(model, tmp_path / name / "any.onnx")
        assert inspect_model(tmp_path / name).kind == kind
    config = {"architectures": ["OtherForCausalLM"], "max_position_embeddings": 77}
    (tmp_path / "vectors/config.json").write_text(json.dumps(config))
    known = inspect_model(tmp_path / "vectors")
    assert (known.kind, known.max_positions) == ("causal_lm", 77)
    (tmp_path / "empty").mkdir()
    with pytest.raises(LoadError, match=r"no \.onnx file"):
        inspect_model(tmp_path / "empty")
    (tmp_path / "vectors/config.json").write_text("{")
    with pytest.raises(LoadError, match="cannot be read"):
        inspect_model(tmp_path / "vectors")
