"""Linear nets and multi-layer perceptrons as ONNX graphs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.prepare.versions import IR_VERSION, OPSET

ACTIVATIONS = {"relu": "Relu", "tanh": "Tanh", "logistic": "Sigmoid", "identity": "Identity"}


def dense_weights(
    sizes: Sequence[int], activation: str, random: np.random.RandomState
) -> dict[str, np.ndarray]:
    """Return first weights, called ``coefs.0``, ``intercepts.0`` ...

    They start where scikit-learn's nets start with the same random state: uniform within a bound
    that depends on the layer's size; without hidden layers, at zero.
    """
    if activation not in ACTIVATIONS:
        raise PrepareError(
            f"no such activation: {activation!r}\nhint: one of {', '.join(ACTIVATIONS)}"
        )
    factor = 2.0 if activation == "logistic" else 6.0
    weights = {}
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        bound = 0.0 if len(sizes) == 2 else np.sqrt(factor / (fan_in + fan_out))
        weights[f"coefs.{i}"] = random.uniform(-bound, bound, (fan_in, fan_out)).astype(np.float32)
        weights[f"intercepts.{i}"] = random.uniform(-bound, bound, fan_out).astype(np.float32)
    return weights


def dense_net(activation: str, weights: Mapping[str, np.ndarray]) -> ir.Model:
    """Return a net of dense layers, ``X [batch, features] -> raw [batch, outputs]``."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="net")
    op = OpBuilder(graph)
    x = op.input("X", ir.DataType.FLOAT, ["batch", weights["coefs.0"].shape[0]])
    last = len(weights) // 2 - 1
    for i in range(last + 1):
        names = (f"coefs.{i}", f"intercepts.{i}")
        x = op.Gemm(x, *(_weight(graph, n, weights[n]) for n in names))
        if i < last and activation != "identity":
            x = op.emit(ACTIVATIONS[activation], x)
    x.name = "raw"
    graph.outputs.append(x)
    return ir.Model(graph, ir_version=IR_VERSION)


def _weight(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.Tensor(array, name=name)
    value = ir.Value(
        name=name,
        type=ir.TensorType(ir.DataType.FLOAT),
        shape=ir.Shape(array.shape),
        const_value=tensor,
    )
    graph.register_initializer(value)
    return value
