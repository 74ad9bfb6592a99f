"""Generation: equal with and without a cache, sampling, and tokenizers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.errors import OnnxTrainError, PrepareError
from onnxtrain.text import generate, without_cache
from onnxtrain.text.generate import Sampling
from tests.text.models import HEAD, genai_folder, llama
from tests.text.words import write_tokenizer

PROMPT = [5, 17, 40, 8]


def by_hand(model: onnx.ModelProto, ids: list[int], count: int) -> list[int]:
    """Greedy tokens, each from a run over the whole sequence with an empty cache."""
    session = onnxruntime.InferenceSession(model.SerializeToString())
    ids, first = list(ids), len(ids)
    for _ in range(count):
        feeds = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
        for x in session.get_inputs()[2:]:
            feeds[x.name] = np.zeros((1, x.shape[1], 0, HEAD), np.float32)
        ids.append(int(session.run(["logits"], feeds)[0][0, -1].argmax()))
    return ids[first:]


@pytest.mark.parametrize("int4", [True, False], ids=["int4", "float"])
def test_greedy_tokens_are_the_likeliest(int4: bool, tmp_path: Path) -> None:
    model = llama(int4=int4)
    expected = by_hand(model, PROMPT, 8)
    assert generate(model, PROMPT, max_tokens=8) == expected
    assert generate(without_cache(model), PROMPT, max_tokens=8) == expected
    folder = genai_folder(tmp_path, model)
    assert generate(folder, PROMPT, max_tokens=8, stop=[]) == expected
    assert (
        generate(folder / "model.onnx", PROMPT, max_tokens=8, stop=expected[3:4])
        == (expected[: expected.index(expected[3])])
    )


def test_a_trainer_generates_with_its_weights() -> None:
    model = llama(int4=False)
    artifacts = onnxtrain.build(
        without_cache(model), loss="causal_lm", optimizer="sgd", train="*norm*"
    )
    trainer = onnxtrain.Trainer(artifacts)
    assert generate(trainer, PROMPT, max_tokens=6) == by_hand(model, PROMPT, 6)
    name = "model.layers.2.final_norm_layernorm.weight"
    trainer.parameters[name] = -trainer.parameters[name]
    assert generate(trainer, PROMPT, max_tokens=6) != by_hand(model, PROMPT, 6)


def test_sampling_follows_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    rng = np.random.default_rng(0)
    counts = np.bincount([Sampling(1.0).sample(logits, rng) for _ in range(4000)], minlength=4)
    np.testing.assert_allclose(counts / 4000, [0.5, 0.3, 0.15, 0.05], atol=0.03)
    kept = {Sampling(1.0, top_p=0.75).sample(logits, rng) for _ in range(200)}
    assert kept == {0, 1}
    cold = np.mean([Sampling(0.25).sample(logits, rng) == 0 for _ in range(500)])
    assert cold > 0.8
    with pytest.raises(PrepareError, match="top_p must be in"):
        Sampling(1.0, top_p=0.0)


def test_sampling_is_deterministic_for_a_seed() -> None:
    model = llama()
    draw = {"max_tokens": 12, "temperature": 2.0, "top_p": 0.9}
    first, second, other = (generate(model, PROMPT, seed=s, **draw) for s in (1, 1, 2))
    assert first == second != other


def test_text_in_text_out(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="the extra onnxtrain[text] is not installed")
    folder = genai_folder(write_tokenizer(tmp_path), llama())
    assert isinstance(generate(folder, "the cat", max_tokens=4), str)
    chat = [{"role": "user", "content": "hello"}]
    assert isinstance(generate(folder, chat, max_tokens=4), str)


def test_models_that_cannot_generate_raise() -> None:
    with pytest.raises(OnnxTrainError, match="requires a tokenizer"):
        generate(llama(), "the cat")
    with pytest.raises(PrepareError, match="the prompt is empty"):
        generate(llama(), [])
    digits = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[n, 3] x) => (float[n, 3] y)'
        " { y = Relu(x) }"
    )
    with pytest.raises(PrepareError, match="not a language model: its inputs are x"):
        generate(digits, [1, 2])
