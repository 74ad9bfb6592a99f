"""Small models to attach losses to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

import onnxtrain
from onnxtrain.autodiff.gradients import load_normalized
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.losses import Attached
from tests.losses.compare import session_of

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def model_of(build: Callable[[OpBuilder], dict[str, ir.Value]]) -> onnx.ModelProto:
    """Return the model of a function that makes inputs and gives outputs by name."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="model")
    op = OpBuilder(graph)
    for name, value in build(op).items():
        out = op.Identity(value)
        out.name = name
        graph.outputs.append(out)
    return ir.to_proto(ir.Model(graph, ir_version=10))


def weight(op: OpBuilder, name: str, array: np.ndarray) -> ir.Value:
    value = ir.Value(
        name=name,
        type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
        shape=ir.Shape(array.shape),
        const_value=ir.Tensor(array, name=name),
    )
    op.graph.register_initializer(value)
    op.names.taken.add(name)
    return value


rng = np.random.default_rng(5)
W1 = rng.standard_normal((4, 3)).astype(np.float32)
W2 = rng.standard_normal((4, 2)).astype(np.float32)
X = rng.standard_normal((6, 4)).astype(np.float32)


def classifier() -> ir.Model:
    """Return logits [batch, 3] of x [batch, 4]."""

    def build(op: OpBuilder) -> dict[str, ir.Value]:
        x = op.input("x", FLOAT, ["batch", 4])
        return {"logits": op.MatMul(x, weight(op, "w", W1))}

    return load_normalized(model_of(build)).model


def two_heads() -> ir.Model:
    """Return a [batch, 3] and b [batch, 2] of x [batch, 4]."""

    def build(op: OpBuilder) -> dict[str, ir.Value]:
        x = op.input("x", FLOAT, ["batch", 4])
        a = op.MatMul(x, weight(op, "wa", W1))
        return {"a": a, "b": op.MatMul(x, weight(op, "wb", W2))}

    return load_normalized(model_of(build)).model


def run(attached: Attached, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    """Return the outputs of a model with its loss."""
    session = session_of(ir.to_proto(attached.model))
    names = [y.name for y in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def gradients(attached: Attached, wrt: list[str], **feeds: np.ndarray) -> dict[str, np.ndarray]:
    """Return the gradients of the loss, by the names of the parameters."""
    proto = ir.to_proto(attached.model)
    values = onnxtrain.parameters(proto, wrt)
    session: onnxruntime.InferenceSession = session_of(onnxtrain.grad(proto, wrt, of="loss"))
    grads = session.run([f"{name}_grad" for name in wrt], {**values, **feeds})
    return dict(zip(wrt, grads, strict=True))
