"""The optimizers of ``ai.onnx.preview.training``: Adam, Adagrad and Momentum.

Each updates several tensors at once. Its inputs are the learning rate, the update count, and then
all tensors, all gradients and all tensors of each state, in this order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from onnxtrain.expand.expansions import TRAINING, expansion, raise_unsupported
from onnxtrain.graph.builder import OpBuilder


@expansion("ai.onnx.preview.training::Adam", when=TRAINING)
def adam(
    op,
    r,
    t,
    *tensors,
    alpha,
    beta,
    epsilon,
    norm_coefficient,
    norm_coefficient_post,
    node,
):
    """``v = alpha v + (1 - alpha) g``, ``h = beta h + (1 - beta) g^2``, ``x -= r v / (h^0.5 + e)``.

    The rate is corrected by ``sqrt(1 - beta^t) / (1 - alpha^t)`` where ``t > 0``.
    """
    updates = []
    for x, g, v, h in _groups(tensors, 4, node):
        rate, count = _rate(op, r, x.dtype), _count(op, t, x.dtype)
        g = _regularized(op, g, x, norm_coefficient)
        v = op.Add(op.Mul(v, alpha), op.Mul(g, 1 - alpha))
        h = op.Add(op.Mul(h, beta), op.Mul(op.Mul(g, g), 1 - beta))
        power = op.Max(count, 1.0)  # at 0 the correction is 0/0, which Where would not stop
        bias = op.Div(
            op.Sqrt(op.Sub(1.0, op.Pow(op.const(beta, x.dtype), power))),
            op.Sub(1.0, op.Pow(op.const(alpha, x.dtype), power)),
        )
        corrected = op.Where(op.Greater(count, 0.0), op.Mul(rate, bias), rate)
        x = op.Sub(x, op.Div(op.Mul(corrected, v), op.Add(op.Sqrt(h), epsilon)))
        if norm_coefficient_post:
            x = op.Mul(x, 1 - norm_coefficient_post)
        updates.append((x, v, h))
    return _outputs(updates)


@expansion("ai.onnx.preview.training::Adagrad", when=TRAINING)
def adagrad(op, r, t, *tensors, norm_coefficient, decay_factor, epsilon, node):
    """``h = h + g^2``, ``x -= r / (1 + t decay_factor) g / (sqrt(h) + epsilon)``."""
    updates = []
    for x, g, h in _groups(tensors, 3, node):
        rate = _rate(op, r, x.dtype)
        if decay_factor:
            rate = op.Div(rate, op.Add(op.Mul(_count(op, t, x.dtype), decay_factor), 1.0))
        g = _regularized(op, g, x, norm_coefficient)
        h = op.Add(h, op.Mul(g, g))
        x = op.Sub(x, op.Div(op.Mul(rate, g), op.Add(op.Sqrt(h), epsilon)))
        updates.append((x, h))
    return _outputs(updates)


@expansion("ai.onnx.preview.training::Momentum", when=TRAINING)
def momentum(op, r, t, *tensors, alpha, beta, mode, norm_coefficient, node):
    """``v = alpha v + beta g``, with ``beta = 1`` at ``t = 0``; ``x -= r v``.

    Mode ``nesterov`` subtracts ``r (g + alpha v)``.
    """
    if mode not in ("standard", "nesterov"):
        raise_unsupported(node, f"unknown mode {mode!r} (expected standard or nesterov)")
    updates = []
    for x, g, v in _groups(tensors, 3, node):
        rate = _rate(op, r, x.dtype)
        g = _regularized(op, g, x, norm_coefficient)
        gain = op.Where(op.Greater(_count(op, t, x.dtype), 0.0), op.const(beta, x.dtype), 1.0)
        v = op.Add(op.Mul(v, alpha), op.Mul(gain, g))
        step = op.Add(g, op.Mul(v, alpha)) if mode == "nesterov" else v
        updates.append((op.Sub(x, op.Mul(rate, step)), v))
    return _outputs(updates)


def _groups(
    tensors: Sequence[ir.Value], size: int, node: ir.Node
) -> Iterator[tuple[ir.Value, ...]]:
    """Yield each tensor with its gradient and state."""
    count, rest = divmod(len(tensors), size)
    if rest or not count or None in tensors:
        raise_unsupported(node, f"the inputs after R and T must be groups of {size} tensors")
    return zip(*(tensors[i * count : (i + 1) * count] for i in range(size)), strict=True)


def _outputs(updates: Sequence[tuple[ir.Value, ...]]) -> list[ir.Value]:
    return [value for group in zip(*updates, strict=True) for value in group]


def _regularized(op: OpBuilder, g: ir.Value, x: ir.Value, coefficient: float) -> ir.Value:
    return op.Add(op.Mul(x, coefficient), g) if coefficient else g


def _rate(op: OpBuilder, r: ir.Value, dtype: ir.DataType | None) -> ir.Value:
    """Return the learning rate as a scalar: with shape [1] it would add an axis to scalars."""
    return op.Reshape(op.cast(r, dtype), op.const([], ir.DataType.INT64))


def _count(op: OpBuilder, t: ir.Value, dtype: ir.DataType | None) -> ir.Value:
    return op.Reshape(op.cast(t, dtype), op.const([], ir.DataType.INT64))
