"""The gradient of a group normalisation whose images are normalised each on its own."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.composed.normalised_groups import (
    Line,
    normalised_groups,
    on_line,
    sizes_of,
)

_FLOAT = ir.DataType.FLOAT


def gradients_by_rows(
    op: OpBuilder, dy: ir.Value, x: ir.Value, scale: ir.Value, groups: int, epsilon: float
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the gradients of ``x``, scale and shift.

    With ``xh = y * gain + level`` of ``normalised_groups``, ``n`` elements in a group, and sums
    over the positions of an image ``s1 = sum(dy)`` and ``s2 = sum(dy * xh) = gain * sum(dy * y) +
    level * s1``: ``dx = k * dy - (mean(k * dy) + xh * mean(k * dy * xh))`` with ``k = scale * r``,
    where the means are sums of ``k * s1 / n`` and ``k * s2 / n`` over a group. So ``dy`` has a
    factor and ``y`` a line per row, numbers that are rounded once, at the end.
    """
    channels, positions = sizes_of(op, x)
    width = channels // groups
    parts = normalised_groups(op, x, groups, epsilon)
    dy = op.Reshape(dy, [0, channels, positions])
    s1, s2 = (
        op.Reshape(_image_sums(op, v, positions), [0, groups, width])
        for v in (dy, op.Mul(dy, parts.y))
    )
    if parts.gain is not None:
        s2 = op.Add(op.Mul(s2, parts.gain), op.Mul(parts.level, s1))
    dscale, dbias = (op.Reshape(op.ReduceSum(v, [0], keepdims=0), [-1]) for v in (s2, s1))
    scale = op.Reshape(op.cast(scale, _FLOAT), [groups, width])
    factor = op.cast(op.Mul(parts.r, scale), dy.dtype)
    # Means of what is multiplied by the rounded factor: what is subtracted makes up for it.
    weight = op.Mul(op.cast(factor, _FLOAT), 1.0 / positions)
    shift, tilt = (op.ReduceMean(op.Mul(v, weight), [2], keepdims=1) for v in (s1, s2))
    if parts.gain is None:
        ones = op.const(np.ones((1, 1, width)), _FLOAT)
        numbers = op.Mul(tilt, ones), op.Mul(shift, ones)
    else:
        numbers = op.Mul(parts.gain, tilt), op.Add(shift, op.Mul(parts.level, tilt))
    line = on_line(op, parts.y, Line(*(op.Reshape(v, [0, channels, 1]) for v in numbers)))
    scaled = op.Mul(op.Reshape(dy, [-1, positions]), op.Reshape(factor, [-1, 1]))
    dx = op.Sub(scaled, op.Reshape(line, [-1, positions]))
    return op.reshape_like(dx, x), dscale, dbias


def _image_sums(op: OpBuilder, x: ir.Value, positions: int) -> ir.Value:
    """Return float32 sums over positions, ``[batch, channels, 1]``, as a product with ones."""
    ones = op.const(np.ones((positions, 1)), x.dtype)
    return op.cast(op.MatMul(x, ones), _FLOAT)
