"""``lora``: targets, ranks, initial values, and what it does not change."""

from __future__ import annotations

import hashlib

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import onnxtrain
from onnxtrain.errors import PrepareError
from onnxtrain.graph.io import external_data
from onnxtrain.losses import CrossEntropy, LossTerm
from tests.adapters.decoders import VOCABULARY, batch, write


def loss() -> LossTerm:
    return LossTerm(CrossEntropy(axis=-1), output="logits")


def test_targets_and_module_names_of_genai_files(tmp_path):
    path = write(tmp_path, int4=True).path
    adapted = onnxtrain.lora(path, rank=4)
    assert [a.module for a in adapted.adapters[:4]] == [
        f"model.layers.0.self_attn.{p}_proj" for p in "qkvo"
    ]
    assert len(adapted.adapters) == 8
    every = onnxtrain.lora(path, rank=4, targets="all-linear")
    assert {a.module.split(".")[-1] for a in every.adapters} == {
        *(f"{p}_proj" for p in ("q", "k", "v", "o", "gate", "up", "down"))
    }
    by_glob = onnxtrain.lora(path, rank=4, targets=["*.1.mlp.*", "lm_head", "embed_tokens"])
    assert [a.kind for a in by_glob.adapters] == ["embedding", *["linear"] * 4]
    assert by_glob.adapters[0].inputs == VOCABULARY
    assert "accuracy_level 4" in adapted.notes[0]


def test_packed_modules_of_phi3_get_one_adapter(tmp_path):
    path = write(tmp_path, family="phi3").path
    adapted = onnxtrain.lora(path, rank=4, targets="all-linear")
    first = {a.module.removeprefix("model.layers.0."): a for a in adapted.adapters[:4]}
    assert list(first) == [
        *("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    ]
    assert first["mlp.gate_up_proj"].outputs == 192
    assert len(first["mlp.gate_up_proj"].nodes) == 2
    apart = onnxtrain.lora(path, rank=4, targets="all-linear", family="llama")
    assert len(apart.adapters) == 14


@pytest.mark.parametrize("int4", [False, True], ids=["fp32", "int4"])
def test_only_adapters_train_and_the_file_does_not_change(tmp_path, int4):
    decoder = write(tmp_path, int4=int4)
    before = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in tmp_path.iterdir()}
    adapted = onnxtrain.lora(decoder.path, rank=4, targets="all-linear")
    artifacts = onnxtrain.build(adapted, loss=loss(), optimizer="adamw")
    assert {p.name for p in artifacts.manifest.parameters} == set(adapted.names)
    assert onnxtrain.explain(adapted).parameters.keys() == set(adapted.names)
    trainer = onnxtrain.Trainer(artifacts)
    feeds = batch()
    start = float(trainer.step(**feeds, labels=feeds["input_ids"]).loss)
    for _ in range(5):
        end = float(trainer.step(**feeds, labels=feeds["input_ids"]).loss)
    assert end < start
    after = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in tmp_path.iterdir()}
    assert before == after
    original = {t.name: t for t in onnx.load(decoder.path).graph.initializer}
    kept = adapted.model.graph.initializers
    for name, tensor in original.items():
        assert kept[name].const_value.tobytes() == tensor.raw_data


def test_a_new_adapter_does_not_change_outputs(tmp_path):
    path = write(tmp_path).path
    feeds = batch()
    plain = _logits(onnxtrain.load(path), feeds)
    adapted = onnxtrain.lora(path, rank=4, targets=["*_proj", "embed_tokens"])
    np.testing.assert_allclose(_logits(adapted.model, feeds), plain, atol=1e-6)


def _logits(model, feeds):
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    return session.run(["logits"], feeds)[0]


def test_initial_values_match_peft(tmp_path):
    path = write(tmp_path).path
    adapted = onnxtrain.lora(path, rank=4, targets="all-linear", seed=1)
    for a in adapted.adapters:
        first, second = adapted.parameters[a.a], adapted.parameters[a.b]
        assert np.abs(first).max() <= 1 / np.sqrt(a.inputs)
        assert np.abs(first).max() > 0.8 / np.sqrt(a.inputs)
        assert not second.any()
    again = onnxtrain.lora(path, rank=4, targets="all-linear", seed=1)
    other = onnxtrain.lora(path, rank=4, targets="all-linear", seed=2)
    name = adapted.adapters[0].a
    np.testing.assert_array_equal(adapted.parameters[name], again.parameters[name])
    assert (adapted.parameters[name] != other.parameters[name]).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": "q_prj"}, r"matches no layer: 'q_prj'\n.*q_proj"),
        ({"targets": ["q_proj", "*.nothing"]}, r"matches no layer: '\*.nothing'"),
        ({"targets": []}, "`targets` is empty"),
        ({"rank": 40, "targets": "all-linear"}, r"rank 40 is larger than a layer: .*k_proj"),
        ({"rank": 0}, "rank must be at least 1"),
        ({"alpha": 0}, "alpha must be positive"),
        ({"dropout": 1.0}, "dropout must be in"),
    ],
)
def test_invalid_options_raise(tmp_path, options, message):
    path = write(tmp_path).path
    with pytest.raises(PrepareError, match=message):
        onnxtrain.lora(path, **options)


def test_large_external_weights_are_not_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(external_data, "LARGE_MODEL_BYTES", 60_000)
    path = write(tmp_path).path
    adapted = onnxtrain.lora(path, rank=2)
    artifacts = onnxtrain.build(adapted, loss=loss(), optimizer="adamw", check=False)
    assert artifacts.shared is not None
    assert artifacts.shared.path == path.with_name("model.onnx.data")
