"""The loss of language models, against torch."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import onnxtrain
from onnxtrain.errors import LabelError, PrepareError, ShapeError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.losses import CausalLM
from tests.losses.small import weight

V, H = 40, 6
rng = np.random.default_rng(3)
TABLE, MIDDLE = (rng.standard_normal(s).astype(np.float32) for s in ((V, H), (H, H)))
HEAD, BIAS = (rng.standard_normal(s).astype(np.float32) for s in ((H, V), (V,)))
LOW_A, LOW_B = (rng.standard_normal(s).astype(np.float32) for s in ((H, 2), (2, V)))
WEIGHTS = {"table": TABLE, "middle": MIDDLE, "head": HEAD, "bias": BIAS, "a": LOW_A, "b": LOW_B}


def model(kind: str) -> ir.Model:
    """Return logits [batch, length, V] of ids: a plain head, one with a cap, or with a branch."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="model")
    op = OpBuilder(graph)
    ids = op.input("input_ids", ir.DataType.INT64, ["batch", "length"])
    names = WEIGHTS if kind == "branch" else list(WEIGHTS)[:4]
    w = {name: weight(op, name, WEIGHTS[name]) for name in names}
    h = op.Tanh(op.MatMul(op.Gather(w["table"], ids), w["middle"]))
    y = op.Add(op.MatMul(h, w["head"]), w["bias"])
    if kind == "cap":
        y = op.Mul(op.Tanh(op.Div(y, 3.0)), 3.0)
    if kind == "branch":
        y = op.Add(y, op.Mul(op.MatMul(op.MatMul(h, w["a"]), w["b"]), 0.5))
    y.name = "logits"
    graph.outputs.append(y)
    return ir.Model(graph, ir_version=10)


def oracle(kind: str, ids: np.ndarray, labels: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    w = {n: torch.tensor(a, dtype=torch.float64, requires_grad=True) for n, a in WEIGHTS.items()}
    h = torch.tanh(w["table"][torch.tensor(ids)] @ w["middle"])
    y = h @ w["head"] + w["bias"]
    if kind == "cap":
        y = torch.tanh(y / 3) * 3
    if kind == "branch":
        y = y + 0.5 * (h @ w["a"] @ w["b"])
    target = torch.tensor(labels)[:, 1:].reshape(-1)
    loss = torch.nn.functional.cross_entropy(y[:, :-1].reshape(-1, V), target)
    loss.backward()
    return loss.item(), {n: p.grad.numpy() for n, p in w.items() if p.grad is not None}


def batch(size: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and labels; with several rows, one does not count at all."""
    ids = rng.integers(0, V, (size, length))
    labels = ids.copy()
    labels[-1, : length // 2] = -100
    if size > 1:
        labels[0] = -100
    return ids, labels


@pytest.mark.parametrize("kind", ["plain", "cap", "branch"])
@pytest.mark.parametrize("rows", [0, 1, 4, 1000])
def test_value_and_gradients_are_those_of_torch(kind: str, rows: int) -> None:
    artifacts = onnxtrain.build(model(kind), loss=CausalLM(rows=rows), optimizer="sgd")
    trainer = onnxtrain.Trainer(artifacts)
    for size, length in ((2, 5), (3, 9), (1, 2)):
        ids, labels = batch(size, length)
        loss, gradients = oracle(kind, ids, labels)
        assert trainer.evaluate_batch(ids, labels).loss == pytest.approx(loss, rel=1e-5)
        mine = trainer.gradients(ids, labels)
        assert set(mine) <= set(gradients)
        for name, gradient in mine.items():
            scale = np.abs(gradients[name]).max()
            np.testing.assert_allclose(gradient, gradients[name], rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("target", ["cpu", "cuda", "wasm", "webgpu", "portable"])
def test_every_target_gives_the_same(target: str) -> None:
    ids, labels = batch(2, 5)
    loss, _ = oracle("plain", ids, labels)
    artifacts = onnxtrain.build(
        model("plain"), loss=CausalLM(rows=3), optimizer="sgd", target=target
    )
    trainer = onnxtrain.Trainer(artifacts)
    assert trainer.step(ids, labels).loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("rows", [0, 3])
def test_a_batch_without_labels_changes_nothing(rows: int) -> None:
    artifacts = onnxtrain.build(model("plain"), loss=CausalLM(rows=rows), optimizer="sgd")
    trainer = onnxtrain.Trainer(artifacts)
    ids = rng.integers(0, V, (2, 4))
    none = np.full((2, 4), -100)
    assert trainer.evaluate_batch(ids, none).loss == 0.0
    assert all(not g.any() for g in trainer.gradients(ids, none).values())


def test_sum_is_mean_times_count() -> None:
    ids, labels = batch(3, 5)
    results = [
        onnxtrain.Trainer(
            onnxtrain.build(model("plain"), loss=CausalLM(rows=2, reduction=how), optimizer="sgd")
        )
        .evaluate_batch(ids, labels)
        .loss
        for how in ("mean", "sum")
    ]
    assert results[1] == pytest.approx(results[0] * (labels[:, 1:] >= 0).sum(), rel=1e-5)


def outer_sizes(proto: onnx.ModelProto) -> set[int | str]:
    """The last sizes of all that nodes of the main graph compute."""
    made = {name for node in proto.graph.node for name in node.output}
    values = [v for v in (*proto.graph.value_info, *proto.graph.output) if v.name in made]
    dims = [v.type.tensor_type.shape.dim for v in values]
    return {d[-1].dim_value or d[-1].dim_param for d in dims if len(d)}


def test_all_logits_never_exist() -> None:
    frozen = {"train": ["table", "middle"], "optimizer": "sgd"}
    whole = onnxtrain.build(model("plain"), loss=CausalLM(rows=0), **frozen).models["train"]
    rows = onnxtrain.build(model("plain"), loss=CausalLM(rows=4), **frozen).models["train"]
    assert V in outer_sizes(whole)
    assert V not in outer_sizes(rows)
    assert sum(n.op_type == "Scan" for n in rows.graph.node) == 1  # none for the backward pass


def test_large_vocabularies_are_cut_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxtrain.thresholds.CHUNKED_LOSS_CLASSES", V)
    monkeypatch.setattr("onnxtrain.thresholds.LOSS_CHUNK_SCORES", 3 * V)
    artifacts = onnxtrain.build(model("cap"), loss="causal_lm", optimizer="sgd")
    assert any(n.op_type == "Scan" for n in artifacts.models["train"].graph.node)
    ids, labels = batch(2, 5)
    assert onnxtrain.Trainer(artifacts).step(ids, labels).loss == pytest.approx(
        oracle("cap", ids, labels)[0], rel=1e-5
    )


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("wrong", [V, -1])
def test_labels_out_of_range_are_named(rows: int, wrong: int) -> None:
    artifacts = onnxtrain.build(model("plain"), loss=CausalLM(rows=rows), optimizer="sgd")
    ids, labels = batch(2, 5)
    labels[1, 3] = wrong
    with pytest.raises(LabelError, match=f"has {wrong} in row 1.*{V} classes"):
        onnxtrain.Trainer(artifacts).step(ids, labels)


def test_bad_requests_are_refused() -> None:
    with pytest.raises(PrepareError, match="rows must not be negative"):
        CausalLM(rows=-1)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="model")
    op = OpBuilder(graph)
    last = op.Relu(op.input("x", ir.DataType.FLOAT, ["batch", 1, V]))
    with pytest.raises(ShapeError, match="one position only"):
        CausalLM().targets(last)
