"""RoiAlign and MaxRoiPool: averages or maxima over regions of interest.

RoiAlign divides a region into bins and a bin into sample points, sampled bilinearly. Samples are
separable: the average over a bin is ``Ay @ x @ Ax^T``, where the matrices hold the weights of all
its samples, so the gradient is made of matmuls, too. Coordinates are computed in the runtime's
order of operations. MaxRoiPool takes maxima over whole pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.rule_registry import Gradient, Gradients, undefined, vjp
from onnxtrain.autodiff.rules.norm import working_dtype
from onnxtrain.graph.builder import OpBuilder, Size


@dataclass(frozen=True)
class _Samples:
    """Sample points along one axis, [R, bins, G]."""

    place: ir.Value
    """Positions clamped to the image."""
    weight: ir.Value
    """1 for a valid sample, 0 if it is too far outside or beyond the region's sample count."""
    moving: ir.Value
    """1 where a sample moves with its region, 0 where it is clamped to the border."""
    lever: ir.Value
    """Distance of a sample from the start of the region, in bins."""
    wide: ir.Value
    """1 where the extent is that of the region, 0 where it was raised to one pixel, [R, 1]."""
    alive: ir.Value
    """Mask of the samples of a region."""
    count: ir.Value
    """Number of samples per bin of each region, [R, 1, 1], at least 1."""
    length: ir.Value
    """The image's size along the axis."""


@vjp("RoiAlign", constant_inputs={2: "indices of images"})
def roi_align(
    op,
    dy,
    x,
    rois,
    batch_indices,
    *,
    wanted,
    mode,
    coordinate_transformation_mode,
    output_height,
    output_width,
    sampling_ratio,
    spatial_scale,
) -> Gradients:
    """``dx[n] = sum over the regions of image n: Ay^T @ dy @ Ax``, or ``dy`` at the largest tap.

    ``drois`` sums the derivatives of the sample weights with respect to their positions. The number
    of samples counts as a constant.
    """
    dtype = working_dtype(x)
    xw, dyw, corners = (op.cast(v, dtype) for v in (x, dy, rois))
    corners = op.Mul(corners, spatial_scale)
    half_pixel = coordinate_transformation_mode == "half_pixel"
    if half_pixel:
        corners = op.Sub(corners, 0.5)

    def along(axis: int, bins: int) -> _Samples:
        low = op.Slice(corners, [axis], [axis + 1], [1])  # [R, 1]
        extent = op.Sub(op.Slice(corners, [axis + 2], [axis + 3], [1]), low)
        length = _scalar(op, op.size(x, 3 - axis), dtype)
        return _samples(op, low, extent, bins, sampling_ratio, length, at_least_one=not half_pixel)

    rows, columns = along(1, output_height), along(0, output_width)
    form = _average if mode == "avg" else _maximum
    dx, drows, dcolumns = form(op, dyw, xw, batch_indices, rows, columns, wanted[1])
    drois = None
    if drows is not None and dcolumns is not None:
        (left, right), (top, bottom) = (
            _ends(op, d, s) for d, s in ((dcolumns, columns), (drows, rows))
        )
        drois = op.Mul(op.Concat(left, top, right, bottom, axis=1), spatial_scale)
        drois = op.cast(drois, rois.dtype)
    return op.cast(dx, x.dtype), drois


def _samples(
    op: OpBuilder,
    low: ir.Value,
    extent: ir.Value,
    bins: int,
    ratio: int,
    length: ir.Value,
    *,
    at_least_one: bool,
) -> _Samples:
    """Return the samples of ``bins`` bins that start at ``low``; one per pixel without a ratio."""
    dtype = low.dtype
    own = extent
    if at_least_one:
        extent = op.Clip(own, 1.0)
    wide = op.Cast(op.Equal(own, extent), to=dtype)
    size = op.Div(extent, float(bins))  # [R, 1]
    if ratio > 0:
        steps = op.const(np.arange(ratio), dtype)
        alive = op.const(np.ones((1, 1, ratio)), dtype)
        count = op.const(np.full((1, 1, 1), ratio), dtype)
    else:
        wished = op.Unsqueeze(op.Ceil(size), [2])  # [R, 1, 1]
        count = op.Clip(wished, 1.0)
        # The extra 1 defines the maximum for zero regions.
        most = op.ReduceMax(op.Concat(op.Reshape(count, [-1]), op.const([1.0], dtype), axis=0))
        most = op.Reshape(op.Cast(most, to=ir.DataType.INT64), op.const([], ir.DataType.INT64))
        steps = op.Cast(op.Range(0, most, 1), to=dtype)
        alive = op.Cast(op.Less(steps, wished), to=dtype)
    numbers = op.const(np.arange(bins), dtype)
    bin_start = op.Add(low, op.Mul(size, numbers))  # [R, bins]
    offset = op.Div(op.Mul(op.Add(steps, 0.5), op.Unsqueeze(size, [2])), count)  # [R, 1, G]
    place = op.Add(op.Unsqueeze(bin_start, [2]), offset)
    reached = op.Clip(place, -1.0, length)  # a sample more than one pixel outside is zero
    near = op.Cast(op.Equal(place, reached), to=dtype)
    inside = op.Clip(place, 0.0, op.Sub(length, 1.0))
    moving = op.Cast(op.Equal(place, inside), to=dtype)
    lever = op.Add(op.Unsqueeze(numbers, [1]), op.Div(op.Add(steps, 0.5), count))
    return _Samples(inside, op.Mul(near, alive), moving, lever, wide, alive, count, length)


def _ends(op: OpBuilder, dplace: ir.Value, s: _Samples) -> tuple[ir.Value, ir.Value]:
    """Return the gradients of both ends of a region, [R, 1] each, from those of its samples."""
    dplace = op.Mul(dplace, s.moving)
    total = op.ReduceSum(dplace, [1, 2], keepdims=0)
    turned = op.ReduceSum(op.Mul(dplace, s.lever), [1, 2], keepdims=0)
    bins = op.dims(dplace)[1]
    assert isinstance(bins, int)
    high = op.Mul(op.Div(op.Unsqueeze(turned, [1]), float(bins)), s.wide)
    return op.Sub(op.Unsqueeze(total, [1]), high), high


def _average(
    op: OpBuilder,
    dy: ir.Value,
    x: ir.Value,
    images: ir.Value,
    rows: _Samples,
    columns: _Samples,
    moves: bool,
) -> tuple[ir.Value, Gradient, Gradient]:
    """Sum ``Ay^T @ dy @ Ax`` per image, as one matmul over all bins of all regions."""
    ay, ax = _weights(op, rows), _weights(op, columns)  # [R, bins, size]
    n, channels, height, width = (op.size(x, i) for i in range(4))
    wide = op.MatMul(dy, op.Unsqueeze(ax, [1]))  # [R, C, oh, W]
    wide = op.Transpose(wide, perm=[0, 2, 1, 3])
    wide = op.reshape(wide, [-1, _product(op, channels, width)])  # [R * oh, C * W]
    pick = op.Equal(op.Unsqueeze(_range(op, n), [1]), op.Unsqueeze(images, [0]))  # [N, R]
    pick = op.Unsqueeze(op.Cast(pick, to=x.dtype), [1, 3])
    tall = op.Mul(op.Transpose(ay, perm=[2, 0, 1]), pick)  # [N, H, R, oh]
    tall = op.Reshape(tall, op.vector([_product(op, n, height), -1]))
    dx = op.reshape(op.MatMul(tall, wide), [n, height, channels, width])
    dx = op.reshape_like(op.Transpose(dx, perm=[0, 2, 1, 3]), x)
    if not moves:
        return dx, None, None
    own = op.Gather(x, images, axis=0)  # [R, C, H, W]
    seen = op.MatMul(own, op.Unsqueeze(op.mT(ax), [1]))  # [R, C, H, ow]
    day = op.ReduceSum(op.MatMul(dy, op.mT(seen)), [1], keepdims=0)  # [R, oh, H]
    seen = op.MatMul(op.Unsqueeze(ay, [1]), own)  # [R, C, oh, W]
    dax = op.ReduceSum(op.MatMul(op.mT(dy), seen), [1], keepdims=0)  # [R, ow, W]
    return dx, _position_grads(op, day, rows), _position_grads(op, dax, columns)


def _distances(op: OpBuilder, s: _Samples) -> ir.Value:
    """Return how far each sample is from each pixel: [R, bins, G, size]."""
    dtype = s.length.dtype
    pixels = op.Range(op.const(0.0, dtype), s.length, op.const(1.0, dtype))
    return op.Sub(op.Unsqueeze(s.place, [3]), pixels)


def _weights(op: OpBuilder, s: _Samples) -> ir.Value:
    """Return the weight of each pixel in each bin's mean: [R, bins, size]."""
    hats = op.Relu(op.Sub(1.0, op.Abs(_distances(op, s))))  # [R, bins, G, size]
    kept = op.Mul(hats, op.Unsqueeze(s.weight, [3]))
    return op.Div(op.ReduceSum(kept, [2], keepdims=0), s.count)


def _position_grads(op: OpBuilder, da: ir.Value, s: _Samples) -> ir.Value:
    """Return the gradients of the sample positions, [R, bins, G], from those of the weights."""
    distance = _distances(op, s)
    near = op.Less(op.Abs(distance), 1.0)
    derivative = op.Where(near, op.Neg(op.sign(distance)), op.const(0.0, distance.dtype))
    total = op.ReduceSum(op.Mul(derivative, op.Unsqueeze(da, [2])), [3], keepdims=0)
    return op.Div(op.Mul(total, s.weight), s.count)


def _maximum(
    op: OpBuilder,
    dy: ir.Value,
    x: ir.Value,
    images: ir.Value,
    rows: _Samples,
    columns: _Samples,
    moves: bool,
) -> tuple[ir.Value, Gradient, Gradient]:
    """Scatter ``dy`` to the largest weighted tap, the first of equal ones.

    Runtimes and the reference take the maximum over the four weighted neighbors of every sample,
    not over the interpolated samples.
    """
    height, width = op.size(x, 2), op.size(x, 3)
    at_rows, w_rows, alive_rows = _taps(op, rows)  # [R, bins, 2 * G]
    at_columns, w_columns, alive_columns = _taps(op, columns)

    sizes = [op.size(v, 2) for v in (at_rows, at_columns)]
    # No -1: Reshape cannot infer it for zero regions.
    joined_shape = op.vector([0, 0, 0, _product(op, *sizes)])

    def crossed(f, a: ir.Value, b: ir.Value) -> ir.Value:
        joined = f(op.Unsqueeze(a, [2, 4]), op.Unsqueeze(b, [1, 3]))  # [R, oh, ow, Ty, Tx]
        return op.Reshape(joined, joined_shape)

    weight = op.Unsqueeze(crossed(op.Mul, w_rows, w_columns), [4])  # [R, oh, ow, T, 1]
    alive = op.Unsqueeze(crossed(op.Mul, alive_rows, alive_columns), [4])
    index = crossed(op.Add, op.Mul(at_rows, _scalar(op, width, ir.DataType.INT64)), at_columns)
    area = _scalar(op, _product(op, height, width), ir.DataType.INT64)
    index = op.Add(index, op.Unsqueeze(op.Mul(images, area), [1, 2, 3]))  # [R, oh, ow, T]

    pixels = op.Transpose(op.Reshape(x, [0, 0, -1]), perm=[0, 2, 1])  # [N, P, C]
    flat = op.reshape(pixels, [-1, op.size(x, 1)])
    taps = op.Gather(flat, index, axis=0)  # [R, oh, ow, T, C]
    values = op.Where(op.Greater(alive, 0.5), op.Mul(taps, weight), op.const(-np.inf, x.dtype))
    best = op.ArgMax(values, axis=3, keepdims=1)  # [R, oh, ow, 1, C]
    order = op.Unsqueeze(_range(op, op.size(index, 3)), [1])  # [T, 1]
    dyt = op.Unsqueeze(op.Transpose(dy, perm=[0, 2, 3, 1]), [3])
    chosen = op.Where(op.Equal(best, order), dyt, op.const(0.0, x.dtype))  # [R, oh, ow, T, C]
    updates = op.Mul(chosen, weight)
    added = op.ScatterND(op.zeros_like(flat), op.Unsqueeze(index, [4]), updates, reduction="add")
    dx = op.reshape_like(op.Transpose(op.reshape_like(added, pixels), perm=[0, 2, 1]), x)
    if not moves:
        return dx, None, None
    dweight = op.ReduceSum(op.Mul(chosen, taps), [4], keepdims=0)  # [R, oh, ow, T]
    dweight = op.Reshape(dweight, op.vector([0, 0, 0, *sizes]))
    drows = op.ReduceSum(op.Mul(dweight, op.Unsqueeze(w_columns, [1, 3])), [2, 4], keepdims=0)
    dcolumns = op.ReduceSum(op.Mul(dweight, op.Unsqueeze(w_rows, [2, 4])), [1, 3], keepdims=0)
    return dx, _tap_position_grads(op, drows, rows), _tap_position_grads(op, dcolumns, columns)


def _tap_position_grads(op: OpBuilder, dweight: ir.Value, s: _Samples) -> ir.Value:
    """Return the gradients of the sample positions: one weight grows as the other falls."""
    low, high = op.Split(dweight, axis=2, num_outputs=2, _outputs=2)
    return op.Mul(op.Sub(high, low), s.weight)


def _taps(op: OpBuilder, s: _Samples) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return index, weight and validity of both neighbors of every sample."""
    low = op.Floor(s.place)
    high = op.Clip(op.Add(low, 1.0), 0.0, op.Sub(s.length, 1.0))
    fraction = op.Sub(s.place, low)
    index = op.Concat(low, high, axis=2)
    weight = op.Concat(op.Sub(1.0, fraction), fraction, axis=2)
    kept, alive = (op.Concat(v, v, axis=2) for v in (s.weight, s.alive))
    return op.Cast(index, to=ir.DataType.INT64), op.Mul(weight, kept), alive


def _scalar(op: OpBuilder, size: Size, dtype: ir.DataType) -> ir.Value:
    if isinstance(size, int):
        return op.const(size, dtype)
    return op.cast(op.Reshape(size, op.const([], ir.DataType.INT64)), dtype)


def _range(op: OpBuilder, size: Size) -> ir.Value:
    if isinstance(size, int):
        return op.const(np.arange(size, dtype=np.int64))
    return op.Range(0, _scalar(op, size, ir.DataType.INT64), 1)


def _product(op: OpBuilder, a: Size, b: Size) -> Size:
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    return op.Mul(a if isinstance(a, ir.Value) else [a], b if isinstance(b, ir.Value) else [b])


@vjp("MaxRoiPool")
def max_roi_pool(op, dy, x, rois, *, pooled_shape, spatial_scale) -> Gradients:
    """Scatter ``dy`` to the largest pixel of its bin, the first in row-major order.

    An empty bin is zero and gets no gradient.
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
    dtype = working_dtype(x)  # half-precision sums are inaccurate and not available everywhere
    flat = op.Reshape(op.zeros_like(op.cast(x, dtype)), [-1])
    updates = op.cast(op.Reshape(op.Mul(dy, filled), [-1]), dtype)
    added = op.ScatterElements(flat, op.Reshape(index, [-1]), updates, axis=0, reduction="add")
    return op.cast(op.reshape_like(added, x), x.dtype), undefined(
        "MaxRoiPool rounds its regions to whole pixels"
    )


def _first_maximum(
    op: OpBuilder, x: ir.Value, images: ir.Value, row_bins: ir.Value, column_bins: ir.Value
) -> ir.Value:
    """Return the flat position of each bin's maximum; a Scan over regions saves memory."""
    outside = op.const(-np.inf, x.dtype)
    width = _number(op, op.size(x, 3))
    scanned = (images, row_bins, column_bins)
    body = op.body()
    image, in_rows, in_columns = (_element(body, v) for v in scanned)
    pixels_of_region = body.Unsqueeze(body.Gather(x, image, axis=0), [2])  # [C, H, 1, W]
    strips = body.Where(
        body.Unsqueeze(in_columns, [0, 1]), pixels_of_region, outside
    )  # [C, H, columns, W]
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
    """Return the mask of pixels along an axis by region and bin: [R, bins, size]."""
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
    """Round halves away from zero; ONNX's Round rounds them to even."""
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
