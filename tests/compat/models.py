"""Small forward models, as an exporter would give them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder

WEIGHTS = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]


def model_of(
    inputs: dict[str, Sequence[int | str]],
    weights: dict[str, Sequence[int]],
    build: Callable[..., dict[str, ir.Value]],
    *,
    opset: int = 17,
    seed: int = 0,
) -> onnx.ModelProto:
    """Return the model of ``build(op, *inputs, **weights)``, which returns outputs by name."""
    rng = np.random.default_rng(seed)
    values = {n: ir.val(n, ir.DataType.FLOAT, list(dims)) for n, dims in inputs.items()}
    graph = ir.Graph(list(values.values()), [], nodes=[], opset_imports={"": opset}, name="g")
    parameters = {}
    for name, dims in weights.items():
        array = rng.standard_normal(dims).astype(np.float32) * 0.3
        tensor = ir.Tensor(array, name=name)
        value = ir.Value(
            name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(dims), const_value=tensor
        )
        graph.register_initializer(value)
        parameters[name.replace(".", "_")] = value
    op = OpBuilder(graph)
    for name, value in build(op, *values.values(), **parameters).items():
        value.name = name
        graph.outputs.append(value)
    return ir.to_proto(ir.Model(graph, ir_version=8))


def mlp(opset: int = 17, features: int = 6, classes: int = 3) -> onnx.ModelProto:
    """Gemm, Relu, Gemm: input [batch, features], output [batch, classes]."""

    def build(op, x, fc1_weight, fc1_bias, fc2_weight, fc2_bias):
        hidden = op.Relu(op.Gemm(x, fc1_weight, fc1_bias, transB=1))
        hidden.name = "hidden"
        return {"output": op.Gemm(hidden, fc2_weight, fc2_bias, transB=1)}

    shapes = [[4, features], [4], [classes, 4], [classes]]
    return model_of(
        {"input": ["batch", features]}, dict(zip(WEIGHTS, shapes, strict=True)), build, opset=opset
    )


def two_outputs() -> onnx.ModelProto:
    """Two branches with two layers each; outputs [batch, 3] and [batch, 2]."""

    def build(op, x, weight1, bias1, weight2, bias2, weight3, bias3):
        shared = op.Tanh(op.Gemm(x, weight3, bias3))
        return {
            "output1": op.Gemm(shared, weight1, bias1),
            "output2": op.Gemm(shared, weight2, bias2),
        }

    weights = {"weight1": [5, 3], "bias1": [3], "weight2": [5, 2], "bias2": [2]}
    weights |= {"weight3": [4, 5], "bias3": [5]}
    return model_of({"input": ["batch", 4]}, weights, build)


def batch(features: int = 6, classes: int = 3, size: int = 8, seed: int = 1):
    """Return inputs and class labels."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((size, features)).astype(np.float32)
    return x, rng.integers(0, classes, size)


def arrays_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Return the initializers by name."""
    return {t.name: ir.serde.deserialize_tensor(t).numpy() for t in model.graph.initializer}
