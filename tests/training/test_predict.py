"""Predictions with weights that must be constants in onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from onnxtrain import losses
from onnxtrain.artifacts.build import build
from onnxtrain.training import Trainer

BLOCK, ROWS, COLUMNS = 32, 64, 16


def quantised(bits: int, accuracy_level: int) -> ir.Model:
    """A product with a weight of 4 or 8 bits, and a float head behind it."""
    rng = np.random.default_rng(3)
    blocks = ROWS // BLOCK
    packed = rng.integers(0, 256, (COLUMNS, blocks, BLOCK * bits // 8), dtype=np.uint8)
    scales = rng.uniform(0.01, 0.02, COLUMNS * blocks).astype(np.float32)
    head = rng.standard_normal((COLUMNS, 4)).astype(np.float32)
    tensors = {"w": packed, "scales": scales, "head": head}
    values = {n: _initializer(n, a) for n, a in tensors.items()}
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", ROWS]))
    product = ir.node(
        "MatMulNBits",
        [x, values["w"], values["scales"]],
        {
            "K": ROWS,
            "N": COLUMNS,
            "bits": bits,
            "block_size": BLOCK,
            "accuracy_level": accuracy_level,
        },
        domain="com.microsoft",
    )
    hidden = product.outputs[0]
    hidden.type, hidden.shape = x.type, ir.Shape(["batch", COLUMNS])
    scores = ir.node("MatMul", [hidden, values["head"]])
    y = scores.outputs[0]
    y.name, y.type, y.shape = "y", x.type, ir.Shape(["batch", 4])
    graph = ir.Graph(
        [x],
        [y],
        nodes=[product, scores],
        initializers=list(values.values()),
        opset_imports={"": 21, "com.microsoft": 1},
        name="quantised",
    )
    return ir.Model(graph, ir_version=10)


def _initializer(name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.Tensor(array, name=name)
    shape = ir.Shape(array.shape)
    return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)


def stock(model: bytes, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["y"], {"x": x})[0])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("accuracy_level", [0, 4])
def test_scales_of_quantized_weights_stay_constants(tmp_path, bits, accuracy_level):
    model = quantised(bits, accuracy_level)
    batch = np.random.default_rng(4).standard_normal((3, ROWS)).astype(np.float32)
    trainer = Trainer(
        build(
            model,
            loss=losses.LossTerm("mse", output="y"),
            optimizer="sgd:lr=1e-3",
            train=["scales", "head"],
        )
    )
    before = stock(ir.to_proto(model).SerializeToString(), batch)
    np.testing.assert_allclose(trainer.predict(batch)["y"], before, rtol=1e-5, atol=1e-6)
    assert np.abs(before).max() > 0.1
    for _ in range(3):
        trainer.step(batch, np.zeros_like(before))
    trainer.export(tmp_path / "trained.onnx")
    after = stock((tmp_path / "trained.onnx").read_bytes(), batch)
    assert np.abs(after - before).max() > 1e-3
    np.testing.assert_allclose(trainer.predict(batch)["y"], after, rtol=1e-5, atol=1e-6)


def test_sessions_are_reused(monkeypatch):
    trainer = Trainer(build(quantised(4, 4), loss="mse", optimizer="sgd", train=["scales"]))
    batch = np.ones((2, ROWS), np.float32)
    trainer.predict(batch)
    session = trainer._predictor._session
    trainer.predict(batch)
    assert trainer._predictor._session is session
    trainer.step(batch, np.zeros((2, 4), np.float32))
    trainer.predict(batch)
    assert trainer._predictor._session is not session
