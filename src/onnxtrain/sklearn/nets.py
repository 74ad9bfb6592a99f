"""Linear nets and multi-layer perceptrons as ONNX graphs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.versions import IR_VERSION, OPSET

ACTIVATIONS = {"relu": "Relu", "tanh": "Tanh", "logistic": "Sigmoid", "identity": "Identity"}


def dense_net(sizes: Sequence[int], activation: str, random: np.random.RandomState) -> ir.Model:
    """Give a net of dense layers, ``X [batch, sizes[0]] -> raw [batch, sizes[-1]]``.

    Weights are called ``coefs.0``, ``intercepts.0`` ... They start where scikit-learn's nets start
    with the same random state: uniform within a bound that depends on the layer's size; without
    hidden layers, at zero.
    """
    if activation not in ACTIVATIONS:
        raise PrepareError(
            f"no such activation: {activation!r}\nhint: one of {', '.join(ACTIVATIONS)}"
        )
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="net")
    op = OpBuilder(graph)
    x = op.input("X", ir.DataType.FLOAT, ["batch", sizes[0]])
    factor = 2.0 if activation == "logistic" else 6.0
    last = len(sizes) - 2
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        bound = 0.0 if last == 0 else np.sqrt(factor / (fan_in + fan_out))
        w = _weight(graph, f"coefs.{i}", random.uniform(-bound, bound, (fan_in, fan_out)))
        b = _weight(graph, f"intercepts.{i}", random.uniform(-bound, bound, fan_out))
        x = op.Gemm(x, w, b)
        if i < last and activation != "identity":
            x = op.emit(ACTIVATIONS[activation], x)
    x.name = "raw"
    graph.outputs.append(x)
    return ir.Model(graph, ir_version=IR_VERSION)


def _weight(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.Tensor(array.astype(np.float32), name=name)
    value = ir.Value(
        name=name,
        type=ir.TensorType(ir.DataType.FLOAT),
        shape=ir.Shape(array.shape),
        const_value=tensor,
    )
    graph.register_initializer(value)
    return value
