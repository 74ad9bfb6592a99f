"""Convolutions of small images as one product over the whole batch.

A convolution kernel multiplies image by image, and reads the whole weight for each. Where images
have a few positions only, that is most of its time. Here a row of ``columns`` holds what a window
reads; all windows of the batch make one matrix, and the weight is read once, as it lies.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.rules.conv.conv_shape import ConvShape, facts_of, one_to_one
from onnxtrain.autodiff.rules.conv.windows import Windows, windows
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import nodes
from onnxtrain.graph.shapes import dims as D

FEW = 8
"""Up to so many output positions the forward convolution is spelled as a product, too."""
FEW_ROWS = 512
"""So, too, with twice the positions, if there are so few windows in the whole batch."""


def fits(facts: ConvShape) -> bool:
    """Return whether there can be columns: of one group, over images of known size."""
    return facts.few_taps and facts.one_group and facts.image is not None


def columns(op: OpBuilder, x: ir.Value, win: Windows, *, by_tap: bool) -> ir.Value:
    """Return [N * positions, channels * taps]; taps vary slowest if ``by_tap``, else fastest.

    The first order is made with one copy less, the second one is the order of a weight.
    """
    channels, taps = op.dims(x)[1], win.count
    assert isinstance(channels, int)
    assert taps is not None
    last = op.Transpose(x, perm=[0, *win.axes, 1])
    if one_to_one(win):
        return op.Reshape(last, [-1, channels])
    reads = _gathered(op, last, win)
    if not by_tap and taps > 1:
        reads = op.Transpose(reads, perm=[0, 1, 3, 2])
    return op.Reshape(reads, [-1, channels * taps])


def _gathered(op: OpBuilder, last: ir.Value, win: Windows) -> ir.Value:
    """Return [N, positions, taps, channels]: at each position, what its window reads.

    Outside of the image it reads a position of zeros, put behind all others.
    """
    image = D.numbers(op.dims(last)[1:-1])
    assert image is not None
    place: np.ndarray = np.zeros((1, 1), np.int64)
    inside: np.ndarray = np.ones((1, 1), bool)
    for i, size in enumerate(image):
        extent = win.extent(i)
        assert extent is not None
        count = (size + win.before[i] + win.after[i] - extent) // win.strides[i] + 1
        starts = np.arange(count) * win.strides[i] - win.before[i]
        at = starts[:, None] + np.arange(0, extent, win.dilations[i])
        shape = [len(place) * len(at), -1]
        within = (at >= 0) & (at < size)
        place = (place[:, None, :, None] * size + at[None, :, None, :]).reshape(shape)
        inside = (inside[:, None, :, None] & within[None, :, None, :]).reshape(shape)
    area = math.prod(image)
    flat = op.Reshape(last, [0, area, op.dims(last)[-1]])
    if (
        not inside.all()
    ):  # of all axes: onnxruntime errs when it moves a Transpose past a partial one
        flat = op.Pad(flat, [0, 0, 0, 0, 1, 0])
    where = np.where(inside, place, area)
    return op.Gather(flat, op.const(where, ir.DataType.INT64), axis=1)


def weight_by_columns(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """``dW = dy^T @ columns``; a forward convolution that is a product shares the columns."""
    return op.reshape_like(op.MatMul(_rows(op, dy), columns(op, x, win, by_tap=False)), w)


def weight_by_tap_columns(
    op: OpBuilder, x: ir.Value, dy: ir.Value, w: ir.Value, win: Windows, group: int
) -> ir.Value:
    """``dW = dy^T @ columns`` with the taps in front, put in order afterwards."""
    dw = op.MatMul(_rows(op, dy), columns(op, x, win, by_tap=True))
    if win.count == 1:
        return op.reshape_like(dw, w)
    # A Reshape at the end would be a copy, as the result is an output of the graph.
    outs, channels, *kernel = op.dims(w)
    return op.Transpose(op.Reshape(dw, [outs, *kernel, channels]), perm=_channels_second(win.rank))


def input_by_columns(
    op: OpBuilder, dy: ir.Value, w: ir.Value, x: ir.Value, win: Windows, group: int
) -> ir.Value:
    """``dy @ W`` is the gradient of the columns; Col2Im adds up what several windows read."""
    outs, channels = op.dims(w)[:2]
    positions, image = op.dims(dy)[2:], op.dims(x)[2:]
    rows = op.Reshape(op.Transpose(dy, perm=[0, *win.axes, 1]), [-1, outs])
    d_columns = op.MatMul(rows, op.Reshape(w, [outs, -1]))
    n = win.rank
    if one_to_one(win):
        d_columns = op.Reshape(d_columns, [-1, *positions, channels])
        return op.Transpose(d_columns, perm=_channels_second(n))
    assert win.static_kernel is not None
    count = D.numbers(positions)
    assert count is not None
    d_columns = op.Reshape(d_columns, [-1, math.prod(count), op.dims(d_columns)[1]])
    return op.Col2Im(
        op.Transpose(d_columns, perm=[0, 2, 1]),
        op.const(list(image)),
        op.const(list(win.static_kernel)),
        dilations=win.dilations,
        pads=win.pads,
        strides=win.strides,
    )


def conv_as_matmul(op: OpBuilder) -> int:
    """Write forward convolutions of small images by a parameter as products; return how many."""
    if op.target != "cpu":
        return 0
    changed = 0
    for node in nodes(op.graph, "Conv"):
        x, w, b = (*node.inputs, None)[:3]
        y = node.outputs[0]
        if x is None or w is None or not w.is_graph_input() or y.is_graph_output():
            continue
        options = S.attributes_of(node, op.opset)
        win = _windows_of(options, w)
        if win is None or not by_product(facts_of(op, x, y, w, win, options["group"])):
            continue
        inside = OpBuilder(op.graph, op.prefix, target=op.target, before=node, parent=op)
        y.replace_all_uses_with(_product_of(inside, x, w, b, y, win))
        op.graph.remove(node, safe=True)
        changed += 1
    return changed


def by_product(facts: ConvShape) -> bool:
    """Return whether the forward convolution had better be a product."""
    if not fits(facts) or not facts.dense or not facts.nine_taps:
        return False
    few_rows = facts.rows is not None and facts.rows <= FEW_ROWS and facts.taps != 1
    return facts.positions_up_to(2 * FEW if few_rows else FEW)


def _product_of(
    op: OpBuilder, x: ir.Value, w: ir.Value, b: ir.Value | None, y: ir.Value, win: Windows
) -> ir.Value:
    """Return ``columns @ W^T + b`` in the shape of ``y``."""
    outs, positions, n = op.dims(w)[0], op.dims(y)[2:], win.rank
    rows = columns(op, x, win, by_tap=False)
    product = op.Gemm(rows, op.Reshape(w, [outs, -1]), b, transB=1)
    product = op.Reshape(product, [-1, *positions, outs])
    product = op.Transpose(product, perm=_channels_second(n))
    product.type, product.shape = y.type, y.shape
    return product


def _windows_of(options: dict[str, Any], w: ir.Value) -> Windows | None:
    """Return the windows of a convolution with explicit padding."""
    if w.shape is None or options["auto_pad"] not in ("NOTSET", "VALID"):
        return None
    pads = None if options["auto_pad"] == "VALID" else options["pads"]
    kernel = [d if isinstance(d, int) else None for d in w.shape][2:]
    return windows(kernel, strides=options["strides"], dilations=options["dilations"], pads=pads)


def _channels_second(rank: int) -> list[int]:
    """Return the order that moves channels from the end to the second place."""
    return [0, 1 + rank, *range(1, 1 + rank)]


def _rows(op: OpBuilder, dy: ir.Value) -> ir.Value:
    """[N, C, ...] -> [C, N * positions]."""
    swapped = op.Transpose(dy, perm=[1, 0, *range(2, op.rank(dy))])
    return op.Reshape(swapped, [op.dims(dy)[1], -1])
