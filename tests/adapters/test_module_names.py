"""Module names that differ between files and transformers, and packed modules."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import onnxtrain
from onnxtrain.adapters.families import transformers_name
from onnxtrain.errors import PrepareError
from tests.small_nets import HEAD

BLOCK = """g (float[N,8] x) => (float[N,8] y)
{
    q = MatMul(x, wq)
    k = MatMul(x, wk)
    v = MatMul(x, wv)
    qk = Mul(q, k)
    s = Tanh(qk)
    h = Mul(s, v)
    y = MatMul(h, wo)
}"""
STEM = "transformer.h.0.self_attention"


def attention_block() -> onnx.ModelProto:
    model = onnx.parser.parse_model(HEAD + BLOCK)
    rng = np.random.default_rng(4)
    names = {f"w{c}": f"{STEM}.{c}_proj.weight" for c in "qkvo"}
    for name in names.values():
        array = rng.standard_normal((8, 8)).astype(np.float32)
        model.graph.initializer.append(ir.serde.serialize_tensor(ir.Tensor(array, name=name)))
    for node in model.graph.node:
        node.input[:] = [names.get(x, x) for x in node.input]
    return model


@pytest.mark.parametrize("family", ["bloom", "falcon"])
def test_modules_interleaved_by_head_cannot_be_exported(family: str, tmp_path: Path) -> None:
    adapted = onnxtrain.lora(attention_block(), 2, targets="attention", family=family)
    assert adapted.not_in_peft == tuple(f"{STEM}.{c}_proj" for c in "qkv")
    with pytest.raises(PrepareError, match=r"packs '.*\.q_proj'.*\nhint: export_merged"):
        adapted.export_peft(tmp_path / "peft")
    assert not (tmp_path / "peft").exists()
    adapted.export_ort_adapter(tmp_path / "a.onnx_adapter")
    assert ort.InferenceSession(str(adapted.export_ort_base(tmp_path / "base.onnx")))


def test_other_modules_of_interleaved_models_have_torch_names(tmp_path: Path) -> None:
    adapted = onnxtrain.lora(attention_block(), 2, targets="*.dense", family="bloom")
    adapted.export_peft(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["dense"]


@pytest.mark.parametrize(
    ("family", "module", "expected"),
    [
        ("starcoder2", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.c_fc"),
        ("gptj", "transformer.h.1.attn.o_proj", "transformer.h.1.attn.out_proj"),
        ("opt", "model.h.3.attn.k_proj", "model.decoder.layers.3.self_attn.k_proj"),
        ("opt", "model.h.3.mlp.down_proj", "model.decoder.layers.3.fc2"),
        ("bert", "encoder.layer.0.attention.query", "encoder.layer.0.attention.self.query"),
        ("bert", "encoder.layer.0.dense", "encoder.layer.0.output.dense"),
        ("bert", "encoder.layer.0.intermediate.dense", "encoder.layer.0.intermediate.dense"),
        ("distilbert", "transformer.layer.0.ffn.up_proj", "transformer.layer.0.ffn.lin1"),
        ("llama", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
    ],
)
def test_exporter_names_become_transformers_names(family: str, module: str, expected: str) -> None:
    assert transformers_name(module, family) == expected
    assert transformers_name(expected, family) == expected
