"""Training-mode BatchNormalization in plain operators, for runtimes that have no kernel for it."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.modes.batch_statistics import (
    Channels,
    follows_layer,
    mean_and_variance,
    normalised,
    worth_a_kernel,
)
from onnxtrain.graph.nodes import is_op, nodes


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
    assert scale is not None
    assert bias is not None
    kept, epsilon = _number(node, "momentum", 0.9), _number(node, "epsilon", 1e-5)
    mean, var = mean_and_variance(op, x)
    flat_mean, flat_var = op.Reshape(mean, [-1]), op.Reshape(var, [-1])
    in_one = op.target.prefers("affine-in-one-pass")
    if x.dtype == ir.DataType.BFLOAT16:
        y = _narrow_affine(op, x, (scale, bias, flat_mean, flat_var), epsilon)
    elif in_one and (worth_a_kernel(op, x) or follows_layer(x)):
        y = normalised(op, x, Channels(scale, bias, flat_mean, flat_var), epsilon)
    else:
        column = op.const([-1, *[1] * (op.rank(x) - 2)])
        spread = op.Sqrt(op.Add(var, epsilon))
        scaled = op.Mul(op.Div(op.Sub(x, mean), spread), op.Reshape(scale, column))
        y = op.Add(scaled, op.Reshape(bias, column))
    new = [
        _averaged(op, old, batch, kept)
        for old, batch in ((old_mean, flat_mean), (old_var, flat_var))
    ]
    return y, new[0], new[1]


def _narrow_affine(
    op: OpBuilder, x: ir.Value, numbers: tuple[ir.Value | None, ...], epsilon: float
) -> ir.Value:
    """Return ``x * gain + shift`` in bfloat16; the shift makes up for the rounded gain."""
    scale, bias, mean, var = (op.cast(v, ir.DataType.FLOAT) for v in numbers if v is not None)
    r = op.Reciprocal(op.Sqrt(op.Add(var, epsilon)))
    gain = op.cast(op.Mul(scale, r), x.dtype)
    shift = op.cast(op.Sub(bias, op.Mul(mean, op.cast(gain, mean.dtype))), x.dtype)
    last = list(range(1, op.rank(x) - 1))
    if last:
        gain, shift = op.Unsqueeze(gain, last), op.Unsqueeze(shift, last)
    return op.Add(op.Mul(x, gain), shift)


def _averaged(op: OpBuilder, old: ir.Value | None, batch: ir.Value, kept: float) -> ir.Value:
    """Return the new statistic; an old one that is zero has no part in it."""
    part = op.Mul(batch, 1.0 - kept)
    return part if _is_zero(old) else op.Add(op.Mul(old, kept), part)


def _is_zero(x: ir.Value | None) -> bool:
    """Return whether a value is something times zero, as nodes are given that must not average."""
    product = None if x is None else x.producer()
    if product is None or not is_op(product, "Mul"):
        return False
    factor = S.constant_of(product.inputs[1])
    return factor is not None and not factor.any()


def _number(node: ir.Node, name: str, default: float) -> float:
    attribute = node.attributes.get(name)
    return default if attribute is None else float(attribute.value)
