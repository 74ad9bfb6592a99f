"""Col2Im as a transposed convolution.

MaxPool as the largest of what its windows read.

Celu by Elu.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.windows import pad, tap_slices, window_geometry


def col2im(
    op: OpBuilder,
    x: ir.Value,
    image: ir.Value,
    block: ir.Value,
    *,
    dilations: Sequence[int] | None,
    pads: Sequence[int] | None,
    strides: Sequence[int] | None,
) -> ir.Value | None:
    """Return a transposed convolution whose kernels hold a single one each."""
    picture, window = op.constant(image), op.constant(block)
    if picture is None or window is None:
        return None
    n = len(window)
    k = int(np.prod(window))
    strides, dilations, pads = strides or [1] * n, dilations or [1] * n, pads or [0] * 2 * n
    channels = op.dims(x)[1]
    if not isinstance(channels, int):
        return None
    channels //= k
    out = [int(p) + pads[i] + pads[i + n] for i, p in enumerate(picture)]
    reach = [(int(w) - 1) * d + 1 for w, d in zip(window, dilations, strict=True)]
    steps = [(o - r) // s + 1 for o, r, s in zip(out, reach, strides, strict=True)]
    spare = [o - (t - 1) * s - r for o, t, s, r in zip(out, steps, strides, reach, strict=True)]
    batch = op.size(x, 0)
    first = batch if isinstance(batch, int) else -1
    columns = op.Reshape(x, [first, channels * k, *steps])
    w = np.zeros((channels, k, 1, k))
    w[:, np.arange(k), 0, np.arange(k)] = 1
    w = w.reshape(channels * k, 1, *(int(v) for v in window))
    cropped = list(pads[:n]) != list(pads[n:])
    cropped = cropped and op.target.lacks("ConvTranspose.asymmetric_pads")
    y = op.ConvTranspose(
        columns,
        op.const(w, x.dtype),
        dilations=dilations,
        group=channels,
        pads=[0] * 2 * n if cropped else pads,
        strides=strides,
        output_padding=spare,
    )
    if not cropped:
        return y
    ends = [o - e for o, e in zip(out, pads[n:], strict=True)]
    return op.Slice(y, list(pads[:n]), ends, list(range(2, n + 2)))


def max_pool(
    op: OpBuilder,
    x: ir.Value,
    *,
    node: ir.Node,
    dilations: list[int] | None,
    kernel_shape: list[int],
    pads: list[int] | None,
    strides: list[int] | None,
) -> ir.Value | None:
    """``y = Max(tap slices of x)``, padded with minus infinity."""
    if not can_decompose_max_pool(node, op.opset):
        return None
    win = window_geometry(kernel_shape, strides, dilations, pads)
    return op.Max(*tap_slices(op, pad(op, x, win, float("-inf")), win, like=node.outputs[0]))


def can_decompose_max_pool(node: ir.Node, opset: int) -> bool:
    """Return whether a MaxPool can be the largest of what its windows read, one slice per tap."""
    dtype = node.outputs[0].dtype
    options = S.attributes_of(node, opset)
    indices = node.outputs[1] if len(node.outputs) > 1 else None
    plain = options["auto_pad"] == "NOTSET" and not options["ceil_mode"]
    unread = indices is None or not (indices.uses() or indices.is_graph_output())
    return plain and unread and dtype in (ir.DataType.FLOAT, ir.DataType.BFLOAT16)


def celu(op: OpBuilder, x: ir.Value, *, alpha: float) -> ir.Value:
    """Return ``alpha elu(x / alpha)``."""
    if alpha == 1.0:
        return op.Elu(x)
    return op.Mul(op.Elu(op.Div(x, alpha)), alpha)
