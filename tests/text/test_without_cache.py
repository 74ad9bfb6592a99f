"""``without_cache``: equal logits, constants for settings, and training."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.errors import PrepareError
from onnxtrain.losses import CausalLM
from onnxtrain.text import without_cache
from onnxtrain.text.model_folder import past_of
from tests.text.models import FLOAT, HEAD, INT64, Writer, llama

BATCH, LENGTH = 2, 6
IDS = np.random.default_rng(0).integers(0, 96, (BATCH, LENGTH))
MASK = np.ones((BATCH, LENGTH), np.int64)
MASK[1, 4:] = 0


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    names = [y.name for y in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


@pytest.mark.parametrize("int4", [True, False], ids=["int4", "float"])
def test_logits_without_cache_are_equal(int4: bool) -> None:
    model = llama(int4=int4)
    lean = ir.to_proto(without_cache(model))
    assert [x.name for x in lean.graph.input] == ["input_ids", "attention_mask"]
    assert [y.name for y in lean.graph.output] == ["logits"]
    empty = np.zeros((BATCH, 1, 0, HEAD), np.float32)
    batch = {"input_ids": IDS, "attention_mask": MASK}
    past = {x.name: empty for x in model.graph.input if x.name.startswith("past")}
    with_cache = run(model, {**batch, **past})["logits"]
    np.testing.assert_allclose(
        run(lean, batch)["logits"][MASK > 0], with_cache[MASK > 0], rtol=1e-5, atol=1e-5
    )


def test_caches_with_concat() -> None:
    w = Writer(0)
    ids = w.input("input_ids", INT64, ["batch", "sequence"])
    cache = ["batch", 2, "past", 4]
    past = w.input("past_key_values.0.key", FLOAT, [*cache])
    table = w.normal("table", 7, 8)
    h = w.node("Gather", "embed", [table, ids])
    shape = w.weight("split", np.array([0, 0, 2, 4], np.int64))
    key = w.node("Reshape", "split_heads", [h, shape])
    key = w.node("Transpose", "heads_first", [key], perm=[0, 2, 1, 3])
    joined = w.node("Concat", "join", [past, key], axis=-2)
    length = w.node("Shape", "past_length", [past], start=2, end=3)
    mixed = w.node("MatMul", "mix", [w.node("Softmax", "soften", [key]), _turned(w, joined)])
    moved = w.node("Add", "add", [mixed, w.node("Cast", "as_float", [length], to=1)])
    for name, y, dims in (
        ("logits", moved, ["batch", 2, "a", "b"]),
        ("present.0.key", joined, cache),
    ):
        y.name, y.type, y.shape = name, ir.TensorType(FLOAT), ir.Shape(dims)
        w.graph.outputs.append(y)
    model = ir.to_proto(ir.Model(w.graph, ir_version=10))
    lean = ir.to_proto(without_cache(model))
    assert "join" not in {n.name for n in lean.graph.node}
    ids_of = {"input_ids": IDS % 7}
    full = run(model, {**ids_of, "past_key_values.0.key": np.zeros((BATCH, 2, 0, 4), np.float32)})
    np.testing.assert_allclose(run(lean, ids_of)["logits"], full["logits"], rtol=1e-6)


def _turned(w: Writer, x: ir.Value) -> ir.Value:
    return w.node("Transpose", "turn", [x], perm=[0, 1, 3, 2])


def test_settings_become_constants() -> None:
    w = Writer(0)
    ids = w.input("input_ids", INT64, ["batch", "sequence"])
    kept = w.input("num_logits_to_keep", INT64, [])
    h = w.node("Gather", "embed", [w.normal("table", 7, 8), ids])
    start = w.node("Reshape", "start", [w.node("Neg", "neg", [kept]), w.weight("s", np.array([1]))])
    ends, axes = w.weight("end", np.array([2**31 - 1])), w.weight("axes", np.array([1]))
    y = w.node("Slice", "keep", [h, start, ends, axes])
    y.name, y.type, y.shape = "logits", ir.TensorType(FLOAT), ir.Shape(["batch", "kept", 8])
    w.graph.outputs.append(y)
    lean = ir.to_proto(without_cache(ir.Model(w.graph, ir_version=10)))
    assert [x.name for x in lean.graph.input] == ["input_ids"]
    assert run(lean, {"input_ids": IDS % 7})["logits"].shape == (BATCH, LENGTH, 8)


def test_a_cache_of_unknown_size_raises() -> None:
    w = Writer(0)
    w.input("input_ids", INT64, ["batch", "sequence"])
    past = w.input("past_key_values.0.key", FLOAT, ["batch", 2, "past", "dim"])
    y = w.node("Relu", "relu", [past])
    y.name, y.type, y.shape = "logits", past.type, past.shape
    w.graph.outputs.append(y)
    with pytest.raises(PrepareError, match=r"past_key_values\.0\.key.*\nhint: export"):
        without_cache(ir.Model(w.graph, ir_version=10))


def test_models_without_cache_do_not_change() -> None:
    w = Writer(0)
    x = w.input("past_rain", FLOAT, ["batch", 3])
    y = w.node("Relu", "relu", [x])
    y.name, y.type, y.shape = "y", x.type, x.shape
    w.graph.outputs.append(y)
    assert [v.name for v in without_cache(ir.Model(w.graph, ir_version=10)).graph.inputs] == [
        "past_rain"
    ]


def test_trains_with_padding_and_several_lengths() -> None:
    artifacts = onnxtrain.build(
        without_cache(llama()), loss=CausalLM(rows=5), optimizer="adamw", train="*norm*"
    )
    trainer = onnxtrain.Trainer(artifacts)
    assert trainer.inputs == ["input_ids", "attention_mask", "labels"]
    labels = np.where(MASK > 0, IDS, -100)
    losses = [trainer.step(IDS, MASK, labels).loss for _ in range(5)]
    assert losses[-1] < losses[0]
    short = trainer.step(IDS[:1, :3], MASK[:1, :3], labels[:1, :3])
    assert np.isfinite(short.loss)


def test_padding_does_not_change_the_loss() -> None:
    artifacts = onnxtrain.build(
        without_cache(llama(int4=False)), loss="causal_lm", optimizer="sgd", train="*norm*"
    )
    trainer = onnxtrain.Trainer(artifacts)
    alone = trainer.evaluate_batch(IDS[1:, :4], MASK[1:, :4], IDS[1:, :4]).loss
    labels = np.where(MASK > 0, IDS, -100)
    padded = trainer.evaluate_batch(IDS[1:], MASK[1:], labels[1:]).loss
    assert padded == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    ("present", "past"),
    [
        ("present.3.value", "past_key_values.3.value"),
        ("present_key_values.0.key", "past_key_values.0.key"),
        ("present.1.decoder.key", "past_key_values.1.decoder.key"),
        ("present_value_2", "past_value_2"),
    ],
)
def test_past_of(present: str, past: str) -> None:
    others = ["past_key_values.7.key", "past_key_values.3.key"]
    assert past_of(present, [*others, past]) == past
