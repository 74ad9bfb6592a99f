"""The loss of language models over a packed last layer, a part of the vocabulary at a time."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import onnxtrain
from onnxtrain.errors import OnnxTrainError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.losses import CausalLM
from tests.adapters.decoders import quantized
from tests.losses.small import weight

WORDS, WIDTH = 8192, 64
rng = np.random.default_rng(5)
TABLE, MIDDLE = (rng.standard_normal(s).astype(np.float32) for s in ((50, WIDTH), (WIDTH, WIDTH)))
PACKED, SCALES, HEAD = quantized(rng.standard_normal((WORDS, WIDTH)).astype(np.float32))


def model() -> ir.Model:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21, "com.microsoft": 1}, name="model")
    op = OpBuilder(graph)
    ids = op.input("input_ids", ir.DataType.INT64, ["batch", "length"])
    table, middle = weight(op, "table", TABLE), weight(op, "middle", MIDDLE / 8)
    h = op.Tanh(op.MatMul(op.Gather(table, ids), middle))
    inputs = [h, weight(op, "bits", PACKED), weight(op, "scales", SCALES)]
    sizes = {"K": WIDTH, "N": WORDS, "bits": 4, "block_size": 32}
    node = ir.Node("com.microsoft", "MatMulNBits", inputs, ir.convenience.convert_attributes(sizes))
    y = op.append(node)
    y.name, y.type = "logits", ir.TensorType(ir.DataType.FLOAT)
    y.shape = ir.Shape(["batch", "length", WORDS])
    graph.outputs.append(y)
    return ir.Model(graph, ir_version=10)


def oracle(ids: np.ndarray, labels: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    w = {"table": TABLE, "middle": MIDDLE / 8}
    w = {n: torch.tensor(a, dtype=torch.float64, requires_grad=True) for n, a in w.items()}
    h = torch.tanh(w["table"][torch.tensor(ids)] @ w["middle"])
    y = h @ torch.tensor(HEAD, dtype=torch.float64).T
    target = torch.tensor(labels)[:, 1:].reshape(-1)
    loss = torch.nn.functional.cross_entropy(y[:, :-1].reshape(-1, WORDS), target)
    loss.backward()
    return loss.item(), {n: p.grad.numpy() for n, p in w.items() if p.grad is not None}


@pytest.mark.parametrize("target", ["cpu", "wasm"])
@pytest.mark.parametrize(("size", "length"), [(1, 7), (3, 5)])
def test_value_and_gradients_are_those_of_torch(size: int, length: int, target: str) -> None:
    artifacts = onnxtrain.build(
        model(), loss="causal_lm", optimizer="sgd", train=["table", "middle"], target=target
    )
    kinds = {n.op_type for n in artifacts.models["step"].graph.node}
    assert "Scan" in kinds
    assert "MatMulNBits" not in kinds
    ids = rng.integers(0, 50, (size, length))
    labels = rng.integers(0, WORDS, (size, length))
    labels[-1, : length // 2] = -100
    trainer = onnxtrain.Trainer(artifacts)
    loss, gradients = oracle(ids, labels)
    for name, g in trainer.gradients(input_ids=ids, labels=labels).items():
        assert np.abs(g - gradients[name]).max() < 1e-5 * np.abs(gradients[name]).max() + 1e-7
    assert trainer.evaluate_batch(input_ids=ids, labels=labels).loss == pytest.approx(loss, 1e-5)
    assert trainer.step(input_ids=ids, labels=labels).loss == pytest.approx(loss, 1e-5)


def products_in_the_loop(model: onnx.ModelProto) -> int:
    (loop,) = (n for n in model.graph.node if n.op_type == "Scan")
    (body,) = (a.g for a in loop.attribute if a.name == "body")
    return sum("MatMul" in n.op_type for n in body.node)


def test_words_are_unpacked_by_operators_on_bytes_where_that_is_faster() -> None:
    models = onnxtrain.build(
        model(), loss="causal_lm", optimizer="sgd", train=["middle"], target="wasm", check=False
    ).models
    for name in ("step", "eval"):
        (loop,) = (n for n in models[name].graph.node if n.op_type == "Scan")
        (body,) = (a.g for a in loop.attribute if a.name == "body")
        kinds = [n.op_type for n in body.node]
        assert "GatherBlockQuantized" not in kinds
        assert kinds.count("DequantizeLinear") == 2
        assert kinds.count("Gemm") == 2


def test_an_evaluation_computes_no_gradient() -> None:
    models = onnxtrain.build(
        model(), loss="causal_lm", optimizer="sgd", train=["middle"], check=False
    ).models
    assert products_in_the_loop(models["gradients"]) == 2
    assert products_in_the_loop(models["eval"]) == 1


def test_a_batch_in_which_no_label_counts_has_no_loss_and_no_gradient() -> None:
    artifacts = onnxtrain.build(model(), loss="causal_lm", optimizer="sgd", train=["middle"])
    trainer = onnxtrain.Trainer(artifacts)
    ids = np.zeros((1, 4), np.int64)
    labels = np.full((1, 4), -100)
    assert not trainer.gradients(input_ids=ids, labels=labels)["middle"].any()
    assert trainer.step(input_ids=ids, labels=labels).loss == 0


def test_scales_that_train_are_refused_or_have_their_gradient() -> None:
    with pytest.raises(OnnxTrainError, match="scales"):
        onnxtrain.build(model(), loss="causal_lm", optimizer="sgd", train=["middle", "scales"])
    onnxtrain.build(
        model(), loss=CausalLM(rows=4), optimizer="sgd", train=["middle", "scales"], check=False
    )
