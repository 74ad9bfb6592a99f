"""Adapter artifacts for trainers that do not read graphs, such as those in browsers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from benchmarks.finetuning import decoder_file
from benchmarks.finetuning.shapes import Shape

import onnxtrain
from onnxtrain import thresholds
from onnxtrain.artifacts import Artifacts
from onnxtrain.graph.memory_usage import (
    Sizes,
    evaluate_terms,
    peak_bytes,
    run_order,
    symbolic_peaks,
)
from onnxtrain.text import without_cache

SHAPE = Shape(256, 64, 128, 2, 4, 2, positions=64)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decoder_file.write(SHAPE, tmp_path_factory.mktemp("base") / "model.onnx")


def built(base: Path, target: str = "wasm", **options) -> Artifacts:
    adapted = onnxtrain.lora(base, rank=4, targets="all-linear")
    return onnxtrain.build(
        without_cache(adapted), loss="causal_lm", optimizer="adamw", target=target, **options
    )


def batch() -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, SHAPE.vocabulary, (1, 12))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}


def test_both_web_targets_train_alike(base: Path, tmp_path: Path) -> None:
    built(base, "web").save(tmp_path)
    spec = json.loads((tmp_path / "manifest.json").read_text())["models"]
    kinds = {t["dtype"] for m in spec for t in m["inputs"] if t["name"] == "input_ids"}
    assert kinds == {"int64", "int32"}
    losses = [onnxtrain.Trainer(tmp_path, threads=1).step(**batch()).loss]
    losses.append(onnxtrain.Trainer(built(base, "cpu"), threads=1).step(**batch()).loss)
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_several_steps_keep_the_domains_of_the_file(base: Path, tmp_path: Path) -> None:
    artifacts = built(base, steps_per_call=2)
    model = artifacts.models["step.x2"]
    assert {o.domain for o in model.opset_import} == {"", "com.microsoft"}


def test_a_large_frozen_part_has_one_step_per_call(base: Path, monkeypatch) -> None:
    artifacts = built(base)
    assert "step.x8" in artifacts.models
    trained = sum(a.nbytes for part in (artifacts.values, artifacts.state) for a in part.values())
    monkeypatch.setattr(thresholds, "MULTI_STEP_BYTES", trained + 1000)
    assert "step.x8" not in built(base).models


def test_frozen_weights_are_written_once(base: Path, tmp_path: Path) -> None:
    artifacts = built(base)
    expected = onnxtrain.Trainer(artifacts, threads=1).predict(
        **{n: a for n, a in batch().items() if n != "labels"}
    )["logits"]
    artifacts.save(tmp_path / "art")
    infer = onnx.load(tmp_path / "art" / "inference_model.onnx", load_external_data=False)
    names = {p.name for p in artifacts.manifest.parameters}
    large = [t for t in infer.graph.initializer if len(t.raw_data) >= 1024]
    assert {t.name for t in large} <= names
    built(base, "cpu").save(tmp_path / "cpu")  # where no one fetches, the model is whole
    whole = onnx.load(tmp_path / "cpu" / "inference_model.onnx", load_external_data=False)
    assert not any(t.external_data for t in whole.graph.initializer)
    assert any(t.external_data for t in infer.graph.initializer)
    trainer = onnxtrain.Trainer(tmp_path / "art", threads=1)
    again = trainer.predict(**{n: a for n, a in batch().items() if n != "labels"})["logits"]
    np.testing.assert_array_equal(again, expected)
    trainer.export(tmp_path / "model.onnx")  # whole, wherever it goes
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (exported,) = session.run(["logits"], {n: a for n, a in batch().items() if n != "labels"})
    np.testing.assert_allclose(np.asarray(exported), expected, atol=1e-5)
    Artifacts.load(tmp_path / "art").save(tmp_path / "copy")
    other = onnxtrain.Trainer(tmp_path / "copy", threads=1)
    assert other.step(**batch()).loss == trainer.step(**batch()).loss


def test_the_manifest_has_the_names_of_adapters(base: Path, tmp_path: Path) -> None:
    adapted = onnxtrain.lora(base, rank=4, alpha=6, targets="all-linear", family="llama")
    adapted.export_peft(tmp_path / "peft")
    table = built(base).manifest.options["adapters"]
    written = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert table["config"] == {**written, "lora_alpha": 16}
    rows = {(t["a"], t["b"], t["module"]) for t in table["tensors"]}
    assert rows == {(a.a, a.b, a.module) for a in adapted.adapters}
    assert {t["scaling"] for t in table["tensors"]} == {4.0}


@pytest.mark.parametrize("sizes", [(1, 1), (1, 16), (16, 16), (128, 128)])
def test_sums_over_sizes_give_the_peak(base: Path, sizes: tuple[int, int]) -> None:
    """Symbolic peak memory equals the memory counted at concrete sizes."""
    model = ir.from_proto(built(base).models["step"])
    graph = model.graph
    numbers: dict[str, int] = {"batch_size": sizes[0], "sequence_length": sizes[1]}
    nodes = run_order(list(graph))
    plain = peak_bytes(nodes, Sizes(numbers), {y.name or "" for y in graph.outputs})
    peaks = symbolic_peaks(graph)
    found_bytes = max(evaluate_terms(terms, numbers) for terms in peaks)
    bodies = max(
        (
            peak_bytes(list(a.as_graph()), Sizes(numbers))
            for n in nodes
            for a in n.attributes.values()
            if a.type == ir.AttributeType.GRAPH
        ),
        default=0,
    )
    assert plain <= found_bytes <= plain + bodies
