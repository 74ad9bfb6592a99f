"""Convolution."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.registry import Gradients, vjp
from onnxtrain.autodiff.rules.conv_weight import weight_gradient
from onnxtrain.autodiff.rules.windows import (
    Windows,
    crop_like,
    pad_at_run_time,
    same_pads,
    windows,
)
from onnxtrain.graph.builder import OpBuilder


@vjp("Conv")
def conv(
    op: OpBuilder,
    dy: ir.Value,
    x: ir.Value,
    w: ir.Value,
    b: ir.Value | None = None,
    *,
    y: ir.Value,
    auto_pad: str,
    dilations: list[int] | None,
    group: int,
    kernel_shape: list[int] | None,
    pads: list[int] | None,
    strides: list[int] | None,
) -> Gradients:
    """``dX`` is the transposed convolution of ``dy`` with W; ``dW`` correlates X with ``dy``."""
    explicit = auto_pad == "NOTSET"
    win = windows(kernel_shape or op.dims(w)[2:], strides, dilations, pads if explicit else None)
    db = None if b is None else op.ReduceSum(dy, [0, *win.axes], keepdims=0)
    if explicit or auto_pad == "VALID":
        dx = input_gradient(op, dy, w, x, win, group)
        return dx, weight_gradient(op, x, dy, w, win, group), db
    before, after = same_pads(op, x, y, win, upper=auto_pad == "SAME_UPPER")
    padded = pad_at_run_time(op, x, before, after)
    dx = crop_like(op, input_gradient(op, dy, w, padded, win, group), before, x)
    return dx, weight_gradient(op, padded, dy, w, win, group), db


def input_gradient(
    op: OpBuilder, dy: ir.Value, w: ir.Value, x: ir.Value, win: Windows, group: int = 1
) -> ir.Value:
    """Give the gradient of a convolution's input ``x``, by a transposed convolution.

    Windows that do not divide the input leave out up to stride - 1 of its last positions: these are
    put back as output padding, or cut to size where the sizes are not known before the run.
    """
    extra, cut = [], []
    for i, size in enumerate(op.dims(x)[2:]):
        stride, extent = win.strides[i], win.extent(i)
        if stride == 1:
            extra.append(0)
        elif isinstance(size, int) and extent is not None:
            extra.append((size + win.before[i] + win.after[i] - extent) % stride)
        else:
            extra.append(stride - 1)
            cut.append(2 + i)
    dx = op.ConvTranspose(
        dy,
        w,
        dilations=win.dilations,
        group=group,
        output_padding=extra if any(extra) else None,
        pads=win.pads,
        strides=win.strides,
    )
    if cut:
        dx = op.Slice(dx, [0] * len(cut), op.vector([op.size(x, a) for a in cut]), cut)
    return dx
