"""Where the maxima of a pooling are, found without MaxPool's second output.

onnxruntime has a fast kernel for pooling on CPUs, but not if Indices are asked for. Where windows
do not overlap, the pooled picture is enlarged again and compared with the input. Positions that
are equal get a number that falls in the order of the axes; a second pooling, of these numbers,
finds the first of them.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_op
from onnxtrain.graph.shapes import dims as D

_EXACT = 1 << 24
"""Whole numbers up to here are float32."""


def maxpool_indices(model: ir.Model, op: OpBuilder) -> int:
    """Compute Indices by other nodes where that is faster; return how many there were."""
    nodes, replaced = list(op.graph), 0
    for node, after in zip(nodes, [*nodes[1:], None], strict=True):
        if not _has_indices(node):
            continue
        kernel, picture = _whole_windows(op, node)
        if kernel is None or picture is None:
            continue
        here = op.before(after)
        indices = _first_maxima(here, node, kernel, picture)
        old = node.outputs[1]
        indices.type, indices.shape = old.type, old.shape
        old.replace_all_uses_with(indices)
        replaced += 1
    return replaced


def _has_indices(node: ir.Node) -> bool:
    if not is_op(node, "MaxPool") or len(node.outputs) < 2:
        return False
    return bool(node.outputs[1].uses()) and not node.outputs[1].is_graph_output()


def _whole_windows(
    op: OpBuilder, node: ir.Node
) -> tuple[tuple[int, int], tuple[int, int]] | tuple[None, None]:
    """Return kernel and picture, if windows of float32 numbers lie side by side and fill it."""
    x = node.inputs[0]
    no = None, None
    if x is None or x.dtype != ir.DataType.FLOAT or op.rank(x) != 4:
        return no
    size = D.numbers(op.dims(x)[1:])
    options = S.attributes_of(node, op.opset)
    kernel = options["kernel_shape"]
    if size is None or options["strides"] != kernel:
        return no
    if any(options["pads"] or ()) or any(d != 1 for d in options["dilations"] or ()):
        return no
    if options["auto_pad"] != "NOTSET" or options["storage_order"]:
        return no
    (height, width), (rows, columns) = size[1:], kernel
    if height % rows or width % columns or height * width > _EXACT:
        return no
    return (rows, columns), (height, width)


def _first_maxima(
    op: OpBuilder, node: ir.Node, kernel: tuple[int, int], picture: tuple[int, int]
) -> ir.Value:
    """Return the flat position of the first maximum of each window."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    area, (rows, columns) = picture[0] * picture[1], kernel
    enlarged = op.Resize(
        y,
        None,
        op.const([1.0, 1.0, *map(float, kernel)], ir.DataType.FLOAT),
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )
    enlarged.shape = x.shape
    # Counted from the end of the picture, so that the first position has the largest number.
    number = area - np.arange(area).reshape(picture)
    equal = op.Cast(op.Equal(x, enlarged), to=ir.DataType.FLOAT)
    numbers = op.Mul(equal, op.const(number, ir.DataType.FLOAT))
    best = op.MaxPool(numbers, kernel_shape=list(kernel), strides=list(kernel))
    # The fast kernel makes the least finite number of a window of minus infinities. Their first
    # one is it, as always among equals.
    start = op.const(number[::rows, ::columns], ir.DataType.FLOAT)
    best = op.Where(op.Equal(best, 0.0), start, best)
    channels = op.dims(x)[1]
    assert isinstance(channels, int)
    ends = (np.arange(channels) + 1).reshape(channels, 1, 1) * area
    images = op.Reshape(op.iota(op.size(x, 0)), [-1, 1, 1, 1])
    ends = op.Add(op.Mul(images, channels * area), op.const(ends, ir.DataType.INT64))
    return op.Sub(ends, op.Cast(best, to=ir.DataType.INT64))
