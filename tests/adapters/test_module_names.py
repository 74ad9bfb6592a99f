"""Module names that differ between files and transformers, and packed modules."""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from safetensors.numpy import load_file

import onnxtrain
from onnxtrain.adapters.families import transformers_name
from onnxtrain.errors import PrepareError
from tests.adapters.decoders import write
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
        ("lfm2", "model.layers.0.self_attn.o_proj", "model.layers.0.self_attn.out_proj"),
        ("lfm2", "model.layers.0.mlp.up_proj", "model.layers.0.feed_forward.w3"),
        ("lfm2_moe", "model.layers.0.mlp.down_proj", "model.layers.0.feed_forward.w2"),
    ],
)
def test_exporter_names_become_transformers_names(family: str, module: str, expected: str) -> None:
    assert transformers_name(module, family) == expected
    assert transformers_name(expected, family) == expected


def exported(folder: Path, family: str | None, targets: str, **options: object) -> list[str]:
    """Return the modules of a PEFT export of a decoder by onnxruntime-genai's builder."""
    path = write(folder, **options, family=family or "").path
    adapted = onnxtrain.lora(path, 2, targets=targets, family=family)
    adapted.export_peft(folder / "peft")
    names = load_file(folder / "peft" / "adapter_model.safetensors")
    return sorted({n.partition(".layers.0.")[2].partition(".lora_")[0] for n in names} - {""})


@pytest.mark.parametrize("int4", [False, True])
def test_names_of_lfm2_and_granite_4_hybrid_are_those_of_transformers(
    tmp_path: Path, int4: bool
) -> None:
    attention = [f"self_attn.{c}_proj" for c in "kqv"]
    lfm2 = ["feed_forward.w1", "feed_forward.w2", "feed_forward.w3", *attention]
    assert exported(tmp_path / "a", "lfm2", "all-linear", int4=int4) == sorted(
        [*lfm2, "self_attn.out_proj"]
    )
    hybrid = ["self_attn.o_proj", "shared_mlp.input_linear", "shared_mlp.output_linear"]
    assert exported(tmp_path / "b", "granitemoehybrid", "all-linear", int4=int4) == sorted(
        [*hybrid, *attention]
    )


@pytest.mark.parametrize("family", ["mystery", None])
def test_a_family_without_a_rule_is_refused_by_name(tmp_path: Path, family: str | None) -> None:
    name = "an unknown model_type" if family is None else "'mystery'"
    with pytest.raises(PrepareError, match=f"no rule for the names of {name} in transformers"):
        exported(tmp_path, family, "attention")
    assert not (tmp_path / "peft").exists()


def test_a_module_without_a_rule_is_refused_by_name(tmp_path: Path) -> None:
    model = onnxtrain.load(write(tmp_path).path)
    for x in list(model.graph.initializers.values()):
        if "o_proj" in (x.name or ""):
            x.name = str(x.name).replace("attn.o_proj", "moe.router")
    adapted = onnxtrain.lora(model, 2, targets="*.router", family="llama")
    assert adapted.peft_problem == (
        "no rule for the names of 'llama' in transformers: model.layers.0.moe.router and 1 more"
    )


def test_names_of_other_families_are_compared_with_the_class_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class is a stand-in: a torch module with the names of an OLMo-like model."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    asked: list[tuple[str, int]] = []

    class Net(torch.nn.Module):
        def __init__(self, names: list[str], layers: int) -> None:
            super().__init__()
            self.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList()})
            for _ in range(layers):
                block = torch.nn.ModuleDict({n: torch.nn.Linear(2, 2) for n in names})
                self.model["layers"].append(torch.nn.ModuleDict({"self_attn": block}))

    def config(family: str, num_hidden_layers: int) -> int:
        if family != "olmo7":
            raise ValueError(family)
        asked.append((family, num_hidden_layers))
        return num_hidden_layers

    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    library = types.ModuleType("transformers")
    library.AutoConfig = types.SimpleNamespace(for_model=config)
    library.AutoModelForCausalLM = types.SimpleNamespace(from_config=lambda n: Net(names, n))
    library.__spec__ = importlib.machinery.ModuleSpec("transformers", None)
    monkeypatch.setitem(sys.modules, "transformers", library)
    assert "self_attn.q_proj" in exported(tmp_path / "a", "olmo7", "attention")
    assert asked == [("olmo7", 2)]
    names.remove("o_proj")
    with pytest.raises(PrepareError, match=r"no rule .* 'olmo7' .*o_proj and 1 more"):
        exported(tmp_path / "b", "olmo7", "attention")
    with pytest.raises(PrepareError, match="no rule"):
        exported(tmp_path / "c", "other", "attention")
