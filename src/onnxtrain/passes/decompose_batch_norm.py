"""Training-mode BatchNormalization in plain operators, for runtimes that have no kernel for it."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import nodes


def decompose_batch_norm(model: ir.Model, op: OpBuilder) -> int:
    """Put plain operators in the place of training-mode nodes; return how many there were."""
    graph = op.graph
    training = [n for n in nodes(graph, "BatchNormalization") if _number(n, "training_mode", 0)]
    for node in training:
        inside = op.before(node)
        for old, new in zip(node.outputs, _composed(inside, node), strict=False):
            new.type, new.shape = old.type, old.shape
            replace_value(old, new, list(old.uses()))
        graph.remove(node, safe=True)
    return len(training)


def _composed(op: OpBuilder, node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the result and both new statistics."""
    x, scale, bias, old_mean, old_var = node.inputs
    assert x is not None
    rank = op.rank(x)
    axes = op.const([i for i in range(rank) if i != 1])
    column = op.const([-1, *[1] * (rank - 2)])
    flat = op.const([-1])
    kept = _number(node, "momentum", 0.9)
    mean = op.ReduceMean(x, axes, keepdims=1)
    centered = op.Sub(x, mean)
    var = op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)
    spread = op.Sqrt(op.Add(var, _number(node, "epsilon", 1e-5)))
    scaled = op.Mul(op.Div(centered, spread), op.Reshape(scale, column))
    y = op.Add(scaled, op.Reshape(bias, column))
    new = [
        op.Add(op.Mul(old, kept), op.Mul(op.Reshape(batch, flat), 1.0 - kept))
        for old, batch in ((old_mean, mean), (old_var, var))
    ]
    return y, new[0], new[1]


def _number(node: ir.Node, name: str, default: float) -> float:
    attribute = node.attributes.get(name)
    return default if attribute is None else float(attribute.value)
