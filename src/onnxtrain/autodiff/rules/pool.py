"""Pooling by average and by norm."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.registry import Gradients, vjp
from onnxtrain.autodiff.rules.conv.window_sum import window_sum_transpose
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.windows.geometry import windows


@vjp("AveragePool")
def average_pool(
    op: OpBuilder,
    dy: ir.Value,
    x: ir.Value,
    *,
    y: ir.Value,
    auto_pad: str,
    ceil_mode: int,
    count_include_pad: int,
    dilations: list[int] | None,
    kernel_shape: list[int],
    pads: list[int] | None,
    strides: list[int] | None,
) -> Gradients:
    """``dx`` is, for each element, the sum of ``dy / count`` over the windows that it is in."""
    win = windows(kernel_shape, strides, dilations, pads if auto_pad == "NOTSET" else None)
    divide = "padded" if count_include_pad else "inside"
    return window_sum_transpose(op, dy, x, y, win, auto_pad, ceil_mode, divide)


@vjp("LpPool")
def lp_pool(
    op: OpBuilder,
    dy: ir.Value,
    x: ir.Value,
    *,
    y: ir.Value,
    auto_pad: str,
    ceil_mode: int,
    dilations: list[int] | None,
    kernel_shape: list[int],
    p: int,
    pads: list[int] | None,
    strides: list[int] | None,
) -> Gradients:
    """``dx = sign(x) |x|^(p-1) * sum of dy y^(1-p)`` over the windows; 0 where a norm is 0."""
    win = windows(kernel_shape, strides, dilations, pads if auto_pad == "NOTSET" else None)
    total = window_sum_transpose(op, _over_norm(op, dy, y, p), x, y, win, auto_pad, ceil_mode)
    return op.Mul(_signed_power(op, x, p - 1), total)


@vjp("GlobalLpPool")
def global_lp_pool(op: OpBuilder, dy: ir.Value, x: ir.Value, *, y: ir.Value, p: int) -> Gradients:
    """``dx = sign(x) |x|^(p-1) * dy y^(1-p)``; 0 where the norm is 0."""
    return op.Mul(_signed_power(op, x, p - 1), _over_norm(op, dy, y, p))


@vjp("GlobalAveragePool")
def global_average_pool(op: OpBuilder, dy: ir.Value, x: ir.Value) -> Gradients:
    """``dx = dy / count``, the same for all elements of a channel."""
    count = op.count(x, list(range(2, op.rank(x))))
    return op.expand_like(op.Div(dy, count), x)


def _over_norm(op: OpBuilder, dy: ir.Value, y: ir.Value, p: int) -> ir.Value:
    """Return ``dy y^(1-p)``, finite where y is 0: there x is 0, too, and so is their product."""
    if p == 1:
        return dy
    norm = op.Where(op.Equal(y, 0.0), 1.0, y)
    return op.Div(dy, norm if p == 2 else op.Pow(norm, float(p - 1)))


def _signed_power(op: OpBuilder, x: ir.Value, exponent: int) -> ir.Value:
    """Return ``sign(x) |x|^exponent``."""
    if exponent == 0:
        return op.sign(x)
    if exponent == 1:
        return x
    if exponent % 2:
        return op.Pow(x, float(exponent))
    return op.Mul(x, op.Pow(op.Abs(x), float(exponent - 1)))
