"""Local response normalisation across channels."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.registry import vjp
from onnxtrain.autodiff.rules.norm import working_dtype
from onnxtrain.graph.builder import OpBuilder


@vjp("LRN")
def lrn(op, dy, x, *, alpha, beta, bias, size):
    """``dx = dy * d^-beta - 2 * alpha * beta * x * mean'(dy * x * d^(-beta - 1))``.

    There ``d = bias + alpha * mean(x^2)``, a mean over a window of channels with zeros outside; the
    window of ``mean'`` is the mirror image of it, which matters for an even size.
    """
    dtype = working_dtype(x)
    xw, dyw = op.cast(x, dtype), op.cast(dy, dtype)
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    # AveragePool divides by the window's size, as the definition does.
    d = op.Add(op.Mul(_window_mean(op, op.Mul(xw, xw), before, after), alpha), bias)
    power = op.Pow(d, -beta)
    inner = op.Div(op.Mul(op.Mul(dyw, xw), power), d)
    spread = _window_mean(op, inner, after, before)
    dx = op.Sub(op.Mul(dyw, power), op.Mul(op.Mul(xw, spread), 2.0 * alpha * beta))
    return op.cast(dx, x.dtype)


def _window_mean(op: OpBuilder, x: ir.Value, before: int, after: int) -> ir.Value:
    """Return the mean over channels ``c - before .. c + after``, with zeros outside."""
    planes = op.Reshape(x, op.vector([0, 1, op.size(x, 1), -1]))  # 0 keeps the batch
    pooled = op.AveragePool(
        planes,
        kernel_shape=[before + after + 1, 1],
        pads=[before, 0, after, 0],
        count_include_pad=1,
    )
    return op.reshape_like(pooled, x)
