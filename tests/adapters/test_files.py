"""PEFT directories, ``.onnx_adapter`` files and merged models: export, load and compare."""

from __future__ import annotations

import json
import os

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from safetensors.numpy import load_file, save_file

import onnxtrain
from onnxtrain.adapters.layers import find_base_layers, frozen_weight
from onnxtrain.errors import CheckpointError, PrepareError, SaveError
from onnxtrain.losses import CrossEntropy, LossTerm
from onnxtrain.runtime.ort_values import write_adapter
from tests.adapters.decoders import batch, write
from tests.adapters.test_gradients import conv_net, drawn


def run(model: ir.Model | str | os.PathLike[str], feeds, adapter=None, output="logits"):
    """Return the logits from onnxruntime, optionally with an adapter file."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    source = ir.to_proto(model).SerializeToString() if isinstance(model, ir.Model) else str(model)
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    run_options = ort.RunOptions()
    if adapter is not None:
        run_options.add_active_adapter(adapter)
    return session.run([output], feeds, run_options=run_options)[0]


def exact(path) -> ir.Model:
    """Return a model with accuracy_level 0: MatMulNBits does not round its input."""
    model = onnxtrain.load(path)
    for node in model.graph:
        node.attributes.pop("accuracy_level", None)
    return model


def close(a: np.ndarray, b: np.ndarray, tolerance: float = 1e-5) -> None:
    valid = batch()["attention_mask"] == 1
    if a.ndim == 3:
        a, b = a[valid], b[valid]
    assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


def test_peft_directories_have_peft_names_and_layout(tmp_path):
    path = write(tmp_path).path
    adapted = drawn(onnxtrain.lora(path, rank=4, targets=["q_proj", "embed_tokens"]))
    adapted.export_peft(tmp_path / "out", base_model="me/original", task_type="CAUSAL_LM")
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    stem = "base_model.model.model.layers.1.self_attn.q_proj"
    assert tensors[f"{stem}.lora_A.weight"].shape == (4, 64)
    assert tensors[f"{stem}.lora_B.weight"].shape == (64, 4)
    assert tensors["base_model.model.model.embed_tokens.lora_embedding_A"].shape == (4, 48)
    np.testing.assert_array_equal(
        tensors[f"{stem}.lora_A.weight"],
        adapted.parameters["model.layers.1.self_attn.q_proj.lora_A"].T,
    )
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert (config["r"], config["lora_alpha"]) == (4, 16)
    assert config["target_modules"] == ["embed_tokens", "q_proj"]
    assert config["base_model_name_or_path"] == "me/original"


def test_target_modules_are_paths_if_last_names_are_ambiguous(tmp_path):
    adapted = onnxtrain.lora(write(tmp_path).path, rank=4, targets="*.1.mlp.up_proj")
    adapted.export_peft(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.1.mlp.up_proj"]


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("options", [{}, {"dora": True}, {"rslora": True}], ids=str)
def test_loaded_peft_adapters_continue_training(tmp_path, family, options):
    path = write(tmp_path, int4=True, family=family).path
    adapted = drawn(onnxtrain.lora(path, rank=4, targets="all-linear", **options))
    adapted.export_peft(tmp_path / "out")
    again = onnxtrain.load_adapter(path, tmp_path / "out")
    assert again.adapters == adapted.adapters
    assert (again.rslora, again.dora) == (adapted.rslora, adapted.dora)
    for name, array in adapted.parameters.items():
        np.testing.assert_array_equal(again.parameters[name], array)
    over = onnxtrain.load_adapter(onnxtrain.lora(path, rank=2), tmp_path / "out")
    assert over.adapters == adapted.adapters


def test_rank_and_alpha_patterns_round_trip(tmp_path):
    path = write(tmp_path).path
    adapted = drawn(onnxtrain.lora(path, rank=4, targets=["q_proj", "o_proj"]))
    adapted.export_peft(tmp_path / "out")
    file = tmp_path / "out" / "adapter_model.safetensors"
    tensors = load_file(file)
    stem = "base_model.model.model.layers.0.self_attn.o_proj"
    tensors[f"{stem}.lora_A.weight"] = np.ones((2, 64), np.float32)
    tensors[f"{stem}.lora_B.weight"] = np.ones((64, 2), np.float32)
    save_file(tensors, file)
    config = tmp_path / "out" / "adapter_config.json"
    settings = json.loads(config.read_text())
    settings["alpha_pattern"] = {"layers.0.self_attn.o_proj": 6}
    config.write_text(json.dumps(settings))
    loaded = onnxtrain.load_adapter(path, tmp_path / "out")
    own = next(a for a in loaded.adapters if a.module.endswith("0.self_attn.o_proj"))
    assert (own.rank, own.alpha, own.scaling) == (2, 6.0, 3.0)
    loaded.export_peft(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert written["rank_pattern"] == {own.module: 2}
    assert written["alpha_pattern"] == {own.module: 6}


def test_damaged_peft_directories_raise(tmp_path):
    path = write(tmp_path).path
    adapted = onnxtrain.lora(path, rank=4)
    with pytest.raises(CheckpointError, match="cannot be read"):
        onnxtrain.load_adapter(path, tmp_path / "nowhere")
    out = tmp_path / "out"
    adapted.export_peft(out)
    config = json.loads((out / "adapter_config.json").read_text())

    def refused(message: str, **changes: object) -> None:
        (out / "adapter_config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(CheckpointError, match=message):
            onnxtrain.load_adapter(path, out)

    refused("unsupported peft_type IA3", peft_type="IA3")
    refused("bias='all' is not supported", bias="all")
    (out / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(out / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({**tensors, name: np.ones((4, 63), np.float32)}, out / "adapter_model.safetensors")
    refused(r"has shape \[63, 4\], expected \[64, 4\]")
    other = {k.replace("q_proj", "query"): v for k, v in tensors.items()}
    save_file(other, out / "adapter_model.safetensors")
    refused(r"the model has no layer '.*query'\nhint: it has ")
    save_file({name: tensors[name]}, out / "adapter_model.safetensors")
    refused("lora_A or lora_B is missing for ")
    (out / "adapter_model.safetensors").unlink()
    refused("adapter_model.safetensors is missing")


@pytest.mark.parametrize("int4", [False, True], ids=["fp32", "int4"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_onnxruntime_runs_base_and_adapter(tmp_path, int4, family):
    path = write(tmp_path, int4=int4, family=family).path
    feeds = batch()
    adapted = drawn(onnxtrain.lora(path, rank=4, targets=["*_proj", "embed_tokens"]))
    base = adapted.export_ort_base()
    assert base == path.with_name("model.lora.onnx")
    assert base.stat().st_size < path.with_name("model.onnx.data").stat().st_size
    proto = onnx.load(base, load_external_data=False)
    places = {
        e.value for t in proto.graph.initializer for e in t.external_data if e.key == "location"
    }
    assert places == {"model.onnx.data"}
    np.testing.assert_array_equal(run(base, feeds), run(path, feeds))
    adapted.export_ort_adapter(tmp_path / "a.onnx_adapter")
    adapter = ort.LoraAdapter()
    adapter.Load(str(tmp_path / "a.onnx_adapter"))
    served = run(base, feeds, adapter)
    close(served, run(adapted.model, feeds), 2e-2 if int4 else 1e-5)
    assert np.abs(served - run(path, feeds)).max() > 0.01


def test_a_base_in_another_folder_copies_external_data(tmp_path):
    path = write(tmp_path / "model").path
    adapted = drawn(onnxtrain.lora(path, rank=4))
    base = adapted.export_ort_base(tmp_path / "served" / "base.onnx")
    feeds = batch()
    np.testing.assert_array_equal(run(base, feeds), run(path, feeds))
    with pytest.raises(SaveError, match="would overwrite the model"):
        adapted.export_ort_base(path)


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_float_weights_are_folded(tmp_path, family, dora):
    path = write(tmp_path, family=family).path
    feeds = batch()
    targets = ["*_proj", "lm_head"] if dora else ["*_proj", "lm_head", "embed_tokens"]
    adapted = drawn(onnxtrain.lora(path, rank=4, targets=targets, dora=dora))
    merged = adapted.export_merged(tmp_path / "merged.onnx")
    assert len(merged.folded) == len(adapted.adapters)
    assert not merged.branches
    assert len(merged.model.graph) == len(onnx.load(path).graph.node)
    close(run(tmp_path / "merged.onnx", feeds), run(adapted.model, feeds))


def test_quantized_layers_keep_a_branch_or_are_requantized(tmp_path):
    path = write(tmp_path, int4=True).path
    feeds = batch()
    adapted = drawn(onnxtrain.lora(exact(path), rank=4, targets="all-linear"))
    want = run(adapted.model, feeds)
    kept = adapted.merge()
    assert len(kept.branches) == len(adapted.adapters)
    assert "kept as branches" in str(kept)
    close(run(kept.model, feeds), want)
    rounded = adapted.merge(quantized="requantize")
    assert len(rounded.requantized) == len(adapted.adapters)
    assert [n.op_type for n in rounded.model.graph] == [n.op_type for n in exact(path).graph]
    got, plain = run(rounded.model, feeds), run(adapted.plain, feeds)
    assert np.linalg.norm(got - want) < 0.5 * np.linalg.norm(plain - want)
    with pytest.raises(PrepareError, match="unknown option for quantized: 'guess'"):
        adapted.merge(quantized="guess")


def test_requantization_error_is_below_one_step(tmp_path):
    adapted = drawn(onnxtrain.lora(write(tmp_path, int4=True).path, rank=4, targets="up_proj"))
    merged = adapted.merge(quantized="requantize").model
    before = {x.module: x for x in find_base_layers(adapted.plain.graph)}
    after = {x.module: x for x in find_base_layers(merged.graph)}
    for a in adapted.adapters:
        values = adapted.parameters
        wanted = frozen_weight(before[a.module]) + a.scaling * values[a.a] @ values[a.b]
        got = frozen_weight(after[a.module])
        blocks = wanted.T.reshape(a.outputs, -1, 32)
        step = np.abs(blocks).max(-1, keepdims=True) / 8
        off = np.abs(got.T.reshape(blocks.shape) - blocks)
        assert (off <= step * 1.0001).all()
        assert off.mean() < step.mean() / 3
    untouched = "model.layers.0.mlp.down_proj"
    np.testing.assert_array_equal(frozen_weight(before[untouched]), frozen_weight(after[untouched]))


def test_only_grouped_convolutions_stay_branches():
    adapted = drawn(onnxtrain.lora(conv_net(), rank=2, targets=["first", "second", "third"]))
    merged = adapted.merge()
    assert (merged.folded, merged.branches) == (("first", "third"), ("second",))
    x = np.random.default_rng(0).standard_normal((2, 4, 6, 6)).astype(np.float32)
    close(run(merged.model, {"x": x}, output="y"), run(adapted.model, {"x": x}, output="y"))


@pytest.mark.parametrize("rank", [2, 4])
def test_convolution_adapters_of_any_rank_fit_one_base(tmp_path, rank):
    model = conv_net()
    targets = ["first", "second", "third"]
    base = onnxtrain.lora(model, 2, targets=targets).export_ort_base(tmp_path / "base.onnx")
    adapted = drawn(onnxtrain.lora(model, rank, alpha=3, targets=targets))
    adapted.export_ort_adapter(tmp_path / "a.onnx_adapter")
    adapter = ort.LoraAdapter()
    adapter.Load(str(tmp_path / "a.onnx_adapter"))
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 4, 6, 6)).astype(np.float32)}
    plain = run(adapted.plain, feeds, output="y")
    np.testing.assert_allclose(run(base, feeds, output="y"), plain, atol=1e-6)
    served = run(base, feeds, adapter, output="y")
    close(served, run(adapted.model, feeds, output="y"))
    assert np.abs(served - plain).max() > 0.01


def test_onnx_adapter_files_do_not_support_dora(tmp_path):
    adapted = onnxtrain.lora(conv_net(), 2, targets=["first"], dora=True)
    for write_file in (adapted.export_ort_base, adapted.export_ort_adapter):
        with pytest.raises(PrepareError, match=r"DoRA: first\nhint: export_merged"):
            write_file(tmp_path / "nothing")
    assert not list(tmp_path.iterdir())


def test_exports_accept_a_trainer_or_a_checkpoint(tmp_path):
    path = write(tmp_path).path
    adapted = onnxtrain.lora(path, rank=4)
    loss = LossTerm(CrossEntropy(axis=-1), output="logits")
    trainer = onnxtrain.Trainer(onnxtrain.build(adapted, loss=loss, optimizer="adamw"))
    feeds = batch()
    trainer.step(**feeds, labels=feeds["input_ids"])
    adapted.export_peft(tmp_path / "a", trainer)
    trainer.save(tmp_path / "checkpoint")
    adapted.export_peft(tmp_path / "b", tmp_path / "checkpoint")
    adapted.export_peft(tmp_path / "c", dict(trainer.parameters))
    files = [(tmp_path / d / "adapter_model.safetensors").read_bytes() for d in "abc"]
    assert files[0] == files[1] == files[2]
    served = onnxtrain.load_adapter(path, tmp_path / "a")
    close(run(served.model, feeds), trainer.predict(**feeds)["logits"])
    with pytest.raises(CheckpointError, match="no tensor of this model's adapters"):
        adapted.export_peft(tmp_path / "d", {"other": np.ones(3)})
    wrong = {adapted.adapters[0].a: np.ones((2, 2), np.float32)}
    with pytest.raises(CheckpointError, match=r"has shape \[2, 2\]"):
        adapted.export_peft(tmp_path / "d", wrong)


def test_adapter_files_support_bfloat16(tmp_path):
    arrays = {"a": np.array([[1.5, -2.0]], ml_dtypes.bfloat16)}
    write_adapter(tmp_path / "a.onnx_adapter", arrays)
    (value,) = (
        ort.AdapterFormat.read_adapter(str(tmp_path / "a.onnx_adapter")).get_parameters().values()
    )
    assert value.data_type() == "tensor(bfloat16)"
