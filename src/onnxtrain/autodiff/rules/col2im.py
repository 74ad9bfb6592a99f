"""Col2Im: columns of blocks added up to an image."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.registry import Gradients, vjp
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.shape_ops import Size
from onnxtrain.graph.windows.geometry import pad, windows


@vjp("Col2Im")
def col2im(
    op: OpBuilder,
    dy: ir.Value,
    x: ir.Value,
    image_shape: ir.Value,
    block_shape: ir.Value,
    *,
    dilations: list[int] | None,
    pads: list[int] | None,
    strides: list[int] | None,
) -> Gradients:
    """``dx`` is the image turned into columns: each block reads what it was added to.

    [N, C, *image] -> [N, C, *block, *positions] -> [N, C * block, positions]
    """
    n = op.rank(dy) - 2
    win = windows([None] * n, strides, dilations, pads)
    columns = pad(op, dy, win)
    blocks = _block_sizes(op, block_shape, n)
    for i in range(n):
        # Axis i of the image becomes the axes block i and position i.
        axis = 2 + 2 * i
        size = op.size(columns, axis)
        reads = _positions(op, size, blocks[i], win.strides[i], win.dilations[i])
        columns = op.Gather(columns, reads, axis=axis)
    order = [*range(2, 2 + 2 * n, 2), *range(3, 3 + 2 * n, 2)]
    if n > 1:
        columns = op.Transpose(columns, perm=[0, 1, *order])
    return op.reshape_like(columns, x)


def _block_sizes(op: OpBuilder, block_shape: ir.Value, n: int) -> list[Size]:
    known = op.constant(block_shape)
    if known is not None:
        return [int(k) for k in known]
    return [op.Slice(block_shape, [i], [i + 1]) for i in range(n)]


def _positions(op: OpBuilder, size: Size, block: Size, stride: int, dilation: int) -> ir.Value:
    """Return [block, positions]: where on an axis each element of each block lies."""
    if isinstance(size, int) and isinstance(block, int):
        count = (size - (block - 1) * dilation - 1) // stride + 1
        table = np.arange(block)[:, None] * dilation + np.arange(count) * stride
        return op.const(table.astype(np.int64))
    if isinstance(block, int):
        reach: Size = (block - 1) * dilation + 1
    else:
        reach = op.Add(op.Mul(op.Sub(block, 1), dilation), 1)
    room = op.Sub(op.const([size]) if isinstance(size, int) else size, reach)
    count = op.Add(op.Div(room, stride), 1)
    starts = op.Mul(op.iota(count), stride)
    return op.Add(op.Unsqueeze(op.Mul(op.iota(block), dilation), [1]), starts)
