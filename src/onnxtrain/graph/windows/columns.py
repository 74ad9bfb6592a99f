"""Convolutions of small images as one product over the whole batch.

A convolution kernel multiplies image by image, and reads the whole weight for each. Where images
have a few positions only, that is most of its time. Here a row of ``columns`` holds what a window
reads; all windows of the batch make one matrix, and the weight is read once, as it lies.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.windows.conv_shape import ConvShape, one_to_one
from onnxtrain.graph.windows.geometry import Windows


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
    if not inside.all():
        flat = _with_zeros(op, flat)
    where = np.where(inside, place, area)
    return op.Gather(flat, op.const(where, ir.DataType.INT64), axis=1)


def _with_zeros(op: OpBuilder, flat: ir.Value) -> ir.Value:
    """Put a position of zeros behind all others of [N, positions, channels]."""
    sizes = D.numbers(op.dims(flat))
    if flat.dtype == ir.DataType.BFLOAT16 and op.target.lacks("Pad.bfloat16") and sizes:
        zero = op.const(np.zeros((sizes[0], 1, sizes[2])), flat.dtype)
        return op.Concat(flat, zero, axis=1)
    # Of all axes: onnxruntime errs when it moves a Transpose past a partial Pad.
    return op.Pad(flat, [0, 0, 0, 0, 1, 0])


def by_product(facts: ConvShape) -> bool:
    """Return whether the forward convolution had better be a product."""
    if not fits(facts) or not facts.dense or not facts.small_kernel:
        return False
    limit, rows = T.FORWARD_PRODUCT_POSITIONS, facts.rows
    if rows is not None and rows <= T.FORWARD_PRODUCT_ROWS and facts.taps != 1:
        limit *= 2
    return facts.positions_up_to(limit)


def channels_second(rank: int) -> list[int]:
    """Return the order that moves channels from the end to the second place."""
    return [0, 1 + rank, *range(1, 1 + rank)]
