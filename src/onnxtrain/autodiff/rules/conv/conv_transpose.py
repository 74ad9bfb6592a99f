"""Transposed convolution."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxtrain.autodiff.registry import Gradients, vjp
from onnxtrain.autodiff.rules.conv.weight_grad import weight_gradient
from onnxtrain.errors import UndifferentiableError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.windows.geometry import Windows, pad_at_run_time, windows


@vjp("ConvTranspose")
def conv_transpose(
    op: OpBuilder,
    dy: ir.Value,
    x: ir.Value,
    w: ir.Value,
    b: ir.Value | None = None,
    *,
    node: ir.Node,
    auto_pad: str,
    dilations: list[int] | None,
    group: int,
    kernel_shape: list[int] | None,
    output_padding: list[int] | None,
    output_shape: list[int] | None,
    pads: list[int] | None,
    strides: list[int] | None,
) -> Gradients:
    """``dX`` is the convolution of ``dy`` with W; ``dW`` correlates ``dy`` with X.

    It is the input gradient of a convolution whose input has the shape of y.
    """
    win = windows(kernel_shape or op.dims(w)[2:], strides, dilations, None)
    extra = output_padding or [0] * win.rank
    db = None if b is None else op.ReduceSum(dy, [0, *win.axes], keepdims=0)
    upper = auto_pad == "SAME_UPPER"
    if output_shape:
        win, dy = _fit_output(op, dy, x, win, extra, output_shape, upper, node)
    elif auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        # y has stride times the size of x.
        extents = [_extent(win, i, node) for i in range(win.rank)]
        totals = [e + o - s for e, o, s in zip(extents, extra, win.strides, strict=True)]
        win = _padded(win, [max(t, 0) for t in totals], upper)
    elif auto_pad == "NOTSET":
        win = windows(win.kernel, strides, dilations, pads)
    dx = op.Conv(dy, w, dilations=win.dilations, group=group, pads=win.pads, strides=win.strides)
    if any(o >= s for o, s in zip(extra, win.strides, strict=True)):
        ends = op.vector([op.size(x, a) for a in win.axes])
        dx = op.Slice(dx, [0] * win.rank, ends, win.axes)
    return dx, weight_gradient(op, dy, x, w, win, group), db


def _fit_output(
    op: OpBuilder,
    dy: ir.Value,
    x: ir.Value,
    win: Windows,
    extra: list[int],
    output_shape: list[int],
    upper: bool,
    node: ir.Node,
) -> tuple[Windows, ir.Value]:
    """Return the padding that cuts the output to ``output_shape``, or ``dy`` padded at run time."""
    wanted = output_shape[-win.rank :]
    rest = [extra[i] + _extent(win, i, node) - win.strides[i] - wanted[i] for i in range(win.rank)]
    sizes = D.numbers(op.dims(x)[2:])
    if sizes is not None:
        totals = [max(d * s + r, 0) for d, s, r in zip(sizes, win.strides, rest, strict=True)]
        return _padded(win, totals, upper), dy
    total = op.Add(op.Mul(op.Shape(x, start=2), list(win.strides)), rest)
    total = op.Max(total, op.const([0] * win.rank))
    half = op.Div(total, [2] * win.rank)
    larger = op.Sub(total, half)
    before, after = (half, larger) if upper else (larger, half)
    return win, pad_at_run_time(op, dy, before, after)


def _padded(win: Windows, totals: list[int], upper: bool) -> Windows:
    small = tuple(t // 2 for t in totals)
    large = tuple(t - t // 2 for t in totals)
    before, after = (small, large) if upper else (large, small)
    return dataclasses.replace(win, before=before, after=after)


def _extent(win: Windows, i: int, node: ir.Node) -> int:
    extent = win.extent(i)
    if extent is None:
        raise UndifferentiableError(
            f"padding of node {node.name!r} needs a kernel of known size: {S.describe(node)}\n"
            "hint: give the node its kernel_shape, or explicit pads"
        )
    return extent
