"""Boxes cut out of images and brought to one size."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.prepare.decompose import decomposition
from onnxtrain.graph.prepare.decompositions.contrib.heads import refuse


@decomposition("com.microsoft::CropAndResize")
def crop_and_resize(
    op, x, rois, batch_indices, crop_size, *, mode="bilinear", extrapolation_value=0.0, node
):
    """Pixels between the corners of boxes ``(y1, x1, y2, x2)``, which are shares of the image.

    Corners fall on pixels; where a box leaves the image its pixels are ``extrapolation_value``.
    """
    sizes = op.constant(crop_size)
    if sizes is None:
        refuse(node, "the size of the crops has to be constant")
    kind = mode.decode() if isinstance(mode, bytes) else mode
    height, width = (int(n) for n in sizes)
    tops, lefts, bottoms, rights = op.Split(rois, axis=1, num_outputs=4, _outputs=4)  # [R, 1]
    rows, above = _places(op, tops, bottoms, op.count(x, [2]), height, kind)  # [R, height]
    columns, beside = _places(op, lefts, rights, op.count(x, [3]), width, kind)
    shape = op.vector([1, height, width, 1])
    grid = op.Concat(
        op.Expand(op.Unsqueeze(columns, [1, 3]), shape),
        op.Expand(op.Unsqueeze(rows, [2, 3]), shape),
        axis=3,
    )
    images = op.Gather(x, batch_indices, axis=0)
    # Not aligned by corners: an image of one row would divide by zero.
    way = "nearest" if kind == "nearest" else "linear"
    y = op.GridSample(images, grid, mode=way, padding_mode="border", align_corners=0)
    inside = op.And(op.Unsqueeze(above, [1, 3]), op.Unsqueeze(beside, [1, 2]))
    return op.Where(inside, y, op.const(extrapolation_value, x.dtype))


def _places(
    op: OpBuilder, start: ir.Value, end: ir.Value, size: ir.Value, count: int, kind: str
) -> tuple[ir.Value, ir.Value]:
    """Return where pixels are read, from -1 to 1, and whether the image has them; [R, count]."""
    last = op.Sub(size, 1.0)
    if count > 1:
        # In the order of the kernel: rounding decides whether the last pixel is inside.
        step = op.Div(op.Mul(op.Sub(end, start), last), float(count - 1))
        steps = op.const([float(i) for i in range(count)], start.dtype)
        at = op.Add(op.Mul(start, last), op.Mul(steps, step))
    else:
        at = op.Mul(op.Mul(op.Add(start, end), 0.5), last)
    inside = op.And(op.GreaterOrEqual(at, 0.0), op.LessOrEqual(at, last))
    if kind == "nearest":
        at = op.Floor(op.Add(at, 0.5))  # halves go up, as in the kernel
    return op.Sub(op.Div(op.Add(op.Mul(at, 2.0), 1.0), size), 1.0), inside
