"""MaxRoiPool: maxima over the bins of regions of interest, in whole pixels."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.registry import Gradients, undefined, vjp
from onnxtrain.autodiff.rules.norm import working_dtype
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.shape_ops import Size


@vjp("MaxRoiPool")
def max_roi_pool(op, dy, x, rois, *, pooled_shape, spatial_scale) -> Gradients:
    """Send ``dy`` to the largest pixel of its bin, to the first in reading order if several are.

    An empty bin gives zero and gets no gradient.
    """
    rows, columns = pooled_shape
    images = op.Cast(_column(op, rois, 0), to=ir.DataType.INT64)  # [R]
    row_bins = _bins(op, rois, 1, rows, op.size(x, 2), spatial_scale)  # [R, rows, H]
    column_bins = _bins(op, rois, 0, columns, op.size(x, 3), spatial_scale)
    index = _first_maximum(op, x, images, row_bins, column_bins)  # [R, C, rows, columns]

    filled = [
        op.ReduceMax(op.Cast(bins, to=x.dtype), [2], keepdims=0) for bins in (row_bins, column_bins)
    ]
    filled = op.Mul(op.Unsqueeze(filled[0], [1, 3]), op.Unsqueeze(filled[1], [1, 2]))
    channels, area = _number(op, op.size(x, 1)), _area(op, x)
    plane = op.Add(op.Unsqueeze(op.Mul(images, channels), [1]), op.Range(0, channels, 1))  # [R, C]
    index = op.Add(index, op.Unsqueeze(op.Mul(plane, area), [2, 3]))
    dtype = working_dtype(x)  # sums of half precision are not to be had everywhere, nor good
    flat = op.Reshape(op.zeros_like(op.cast(x, dtype)), [-1])
    updates = op.cast(op.Reshape(op.Mul(dy, filled), [-1]), dtype)
    added = op.ScatterElements(flat, op.Reshape(index, [-1]), updates, axis=0, reduction="add")
    return op.cast(op.reshape_like(added, x), x.dtype), undefined(
        "MaxRoiPool rounds its regions to whole pixels"
    )


def _first_maximum(
    op: OpBuilder, x: ir.Value, images: ir.Value, row_bins: ir.Value, column_bins: ir.Value
) -> ir.Value:
    """Return the place of each bin's maximum in its plane; region by region, to save memory."""
    outside = op.const(-np.inf, x.dtype)
    width = _number(op, op.size(x, 3))
    scanned = (images, row_bins, column_bins)
    body = op.body()
    image, in_rows, in_columns = (_element(body, v) for v in scanned)
    picture = body.Unsqueeze(body.Gather(x, image, axis=0), [2])  # [C, H, 1, W]
    strips = body.Where(body.Unsqueeze(in_columns, [0, 1]), picture, outside)  # [C, H, columns, W]
    best = body.ReduceMax(strips, [3], keepdims=0)
    column = body.ArgMax(strips, axis=3, keepdims=0)  # [C, H, columns]
    stacks = body.Where(body.Unsqueeze(in_rows, [0, 3]), body.Unsqueeze(best, [1]), outside)
    row = body.ArgMax(stacks, axis=2, keepdims=0)  # [C, rows, columns]
    column = body.GatherElements(column, row, axis=1)
    body.graph.outputs.append(body.Add(body.Mul(row, width), column))
    return op.Scan(*scanned, body=body.graph, num_scan_inputs=len(scanned))


def _element(body: OpBuilder, v: ir.Value) -> ir.Value:
    """Add an input to a Scan's body: ``v`` without its first axis."""
    assert v.dtype is not None
    return body.input(f"{body.prefix}region", v.dtype, body.dims(v)[1:])


def _bins(
    op: OpBuilder, rois: ir.Value, axis: int, bins: int, size: Size, scale: float
) -> ir.Value:
    """Return which pixels along an axis belong to which bin of which region: [R, bins, size]."""
    dtype = rois.dtype
    low, high = (_rounded(op, op.Mul(_column(op, rois, axis + i), scale)) for i in (1, 3))
    extent = op.Clip(op.Add(op.Sub(high, low), 1.0), 1.0)
    step = op.Unsqueeze(op.Div(extent, float(bins)), [1])  # [R, 1]
    low = op.Unsqueeze(low, [1])
    start = op.Add(op.Floor(op.Mul(step, op.const(np.arange(bins), dtype))), low)
    end = op.Add(op.Ceil(op.Mul(step, op.const(np.arange(1, bins + 1), dtype))), low)
    pixels = op.Cast(op.Range(0, _number(op, size), 1), to=dtype)
    after = op.GreaterOrEqual(pixels, op.Unsqueeze(start, [2]))
    return op.And(after, op.Less(pixels, op.Unsqueeze(end, [2])))


def _column(op: OpBuilder, rois: ir.Value, i: int) -> ir.Value:
    return op.Gather(rois, i, axis=1)


def _rounded(op: OpBuilder, v: ir.Value) -> ir.Value:
    """Round halves away from zero; ONNX's Round takes the even neighbour."""
    up = op.Floor(op.Add(v, 0.5))
    return op.Where(op.Less(v, 0.0), op.Ceil(op.Sub(v, 0.5)), up)


def _number(op: OpBuilder, size: Size) -> ir.Value:
    if isinstance(size, int):
        return op.const(size, ir.DataType.INT64)
    return op.Reshape(size, op.const([], ir.DataType.INT64))


def _area(op: OpBuilder, x: ir.Value) -> ir.Value:
    height, width = op.size(x, 2), op.size(x, 3)
    if isinstance(height, int) and isinstance(width, int):
        return op.const(height * width, ir.DataType.INT64)
    return op.Mul(_number(op, height), _number(op, width))
