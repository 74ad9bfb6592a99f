"""Small models, built without a framework."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain import losses, optim
from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.build import build
from onnxtrain.graph.builder import OpBuilder

RNG_SEED = 7


def graph() -> OpBuilder:
    return OpBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="net"))


def weight(op: OpBuilder, name: str, array: np.ndarray) -> ir.Value:
    dtype = ir.DataType.from_numpy(array.dtype)
    value = ir.Value(
        name=name,
        type=ir.TensorType(dtype),
        shape=ir.Shape(array.shape),
        const_value=ir.Tensor(array, name=name),
    )
    op.graph.register_initializer(value)
    return value


def finished(op: OpBuilder, **outputs: ir.Value) -> onnx.ModelProto:
    for name, value in outputs.items():
        value.name = name
        op.graph.outputs.append(value)
    return ir.to_proto(ir.Model(op.graph, ir_version=10))


def classifier(
    features: int = 6, hidden: int = 8, classes: int = 3, dtype: type = np.float32
) -> onnx.ModelProto:
    """x [batch, features] -> scores [batch, classes], hidden [batch, hidden]."""
    rng, op = np.random.default_rng(RNG_SEED), graph()

    def draw(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(dtype)

    x = op.input("x", ir.DataType.from_numpy(np.dtype(dtype)), ["batch", features])
    h = op.Tanh(
        op.Gemm(
            x,
            weight(op, "fc1.weight", draw(features, hidden)),
            weight(op, "fc1.bias", draw(hidden)),
        )
    )
    y = op.Gemm(
        h, weight(op, "fc2.weight", draw(hidden, classes)), weight(op, "fc2.bias", draw(classes))
    )
    return finished(op, scores=y, hidden=h)


def with_norm(training: bool = False, shared: bool = False) -> onnx.ModelProto:
    """x [batch, 4, 5] -> y [batch, 3], through one BatchNormalization, or twice through it."""
    rng, op = np.random.default_rng(RNG_SEED), graph()
    x = op.input("x", ir.DataType.FLOAT, ["batch", 4, 5])
    values = {
        "norm.weight": np.ones(4),
        "norm.bias": np.zeros(4),
        "norm.running_mean": np.zeros(4),
        "norm.running_var": np.ones(4),
    }
    norm = [weight(op, n, a.astype(np.float32)) for n, a in values.items()]
    mode = {"training_mode": 1} if training else {}
    h = op.BatchNormalization(x, *norm, **mode, _outputs=3 if training else 1)
    h = op.Sin(h[0] if training else h)
    if shared:
        h = op.BatchNormalization(h, *norm, **mode, _outputs=3 if training else 1)
        h = h[0] if training else h
    h = op.Flatten(h)
    w = weight(op, "head.weight", (rng.standard_normal((20, 3)) / 4).astype(np.float32))
    return finished(op, y=op.MatMul(h, w))


def data(
    n: int, features: int = 6, classes: int = 3, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Rows that a linear classifier separates."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, features)).astype(np.float32)
    plan = np.random.default_rng(99).standard_normal((features, classes))
    return x, (x @ plan).argmax(1).astype(np.int64)


def example() -> Artifacts:
    """Artifacts with one of everything: groups, frozen weights, metrics, averages, clipping."""
    return build(
        classifier(features=40, hidden=16),
        loss=[losses.LossTerm("cross_entropy", output="scores")],
        optimizer=optim.AdamW(groups=[optim.ParamGroup("*.bias", weight_decay=0.0)]),
        freeze="fc1.weight",
        metrics=["accuracy", "grad_norm"],
        ema=0.9,
        clip=1.0,
    )
