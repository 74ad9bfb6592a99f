"""GroupNormalization by kernels that are there: images normalised each on its own, and a line.

Groups of channels normalised, as rows of LayerNormalization, which has float32 statistics.

A group is one row, if there are enough of them for a kernel that takes a row at a time. If not,
each image of one channel is a row: ``y = (x - m) * q`` with ``q = 1 / sqrt(v + epsilon)``, where
the operator puts out ``m`` and ``q``. With means over the images of a group, ``M = mean(m)`` and
``1 / r^2 = mean(1 / q^2 + (m - M)^2)``, what the group is normalised to is
``(x - M) * r = y * (r / q) + (m - M) * r``: a line per image.

``y`` has mean 0 whatever ``x`` has, so that sums of products with it keep their digits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes import dims as D

FLOAT = ir.DataType.FLOAT
_TYPES = frozenset({FLOAT, ir.DataType.BFLOAT16})


class NormalizedGroups(NamedTuple):
    """A normalised batch ``y * gain + level``; numbers are float32, ``[batch, groups, channels]``.

    The channels are those of a group.
    """

    y: ir.Value
    """``[batch, channels, positions]``."""
    gain: ir.Value | None
    """``None`` stands for 1."""
    level: ir.Value | None
    """``None`` stands for 0."""
    r: ir.Value
    """``1 / deviation`` of each group, ``[batch, groups, 1]``."""


class RowAffine(NamedTuple):
    """``x * slope + level`` of rows ``[batch, rows, length]``: one number each per row.

    They are ``[batch, rows, 1]``, or ``[rows, 1]`` where all examples have the same.
    """

    slope: ir.Value
    level: ir.Value


def can_normalize_groups(x: ir.Value, groups: int) -> bool:
    """Return whether channels and positions are known, and the type has kernels."""
    sizes = D.static_sizes((S.dims_of(x) or (None,))[1:])
    if not sizes or len(sizes) < 2 or x.dtype not in _TYPES or groups < 1:
        return False
    return min(sizes) > 0 and sizes[0] % groups == 0


def sizes_of(op: OpBuilder, x: ir.Value) -> tuple[int, int]:
    """Return how many channels and positions there are."""
    sizes = D.static_sizes(op.dims(x)[1:])
    assert sizes is not None
    return sizes[0], math.prod(sizes[1:])


def normalize_groups(op: OpBuilder, x: ir.Value, groups: int, epsilon: float) -> NormalizedGroups:
    """Return a batch normalised over groups of channels, without scale and shift."""
    channels, positions = sizes_of(op, x)
    width = channels // groups
    if not _prefers_image_rows(op, x, groups):
        y, _, r = _rows(op, x, groups, width * positions, epsilon)
        return NormalizedGroups(op.Reshape(y, [0, channels, positions]), None, None, r)
    y, m, q = _rows(op, x, channels, positions, epsilon)
    m, q = (op.Reshape(v, [0, groups, width]) for v in (m, q))
    away = op.Sub(m, op.ReduceMean(m, [2], keepdims=1))
    spread = op.Add(op.Reciprocal(op.Mul(q, q)), op.Mul(away, away))
    r = op.Reciprocal(op.Sqrt(op.ReduceMean(spread, [2], keepdims=1)))
    return NormalizedGroups(y, op.Div(r, q), op.Mul(away, r), r)


def _prefers_image_rows(op: OpBuilder, x: ir.Value, groups: int) -> bool:
    """Return whether groups are too few for a row each, and images large enough for that."""
    batch = op.dims(x)[0]
    channels, positions = sizes_of(op, x)
    few = isinstance(batch, int) and batch * groups < T.GROUP_NORM_KERNEL_ROWS
    return few and channels > groups and positions >= T.NORM_KERNEL_POSITIONS


def _rows(
    op: OpBuilder, x: ir.Value, rows: int, length: int, epsilon: float
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return rows of each example normalised, their means and inverse deviations."""
    one = op.const(np.ones(length), x.dtype)
    table = op.Reshape(x, [0, rows, length])
    y, m, q = op.LayerNormalization(table, one, axis=2, epsilon=epsilon, _outputs=3)
    return y, m, q


def fold_scale_and_bias(
    op: OpBuilder, parts: NormalizedGroups, scale: ir.Value, bias: ir.Value
) -> RowAffine:
    """Return the line from ``parts.y`` to what scale and shift of the channels make of it."""
    scale, bias = (op.cast(v, FLOAT) for v in (scale, bias))
    if parts.gain is None:
        return RowAffine(op.Unsqueeze(scale, [1]), op.Unsqueeze(bias, [1]))
    groups, width = op.dims(parts.gain)[1:]
    scale, bias = (op.Reshape(v, [groups, width]) for v in (scale, bias))
    line = op.Mul(parts.gain, scale), op.Add(op.Mul(parts.level, scale), bias)
    return RowAffine(*(op.Reshape(v, [0, op.dims(parts.y)[1], 1]) for v in line))


def apply_row_affine(op: OpBuilder, y: ir.Value, line: RowAffine) -> ir.Value:
    """Return ``y * slope + level`` for ``[batch, rows, length]``.

    In float32 by the operator for given statistics, in one pass, if all sizes are numbers.
    """
    rows, length = op.dims(y)[1:]
    sizes = D.static_sizes(op.dims(y))
    large = isinstance(length, int) and length >= T.NORM_KERNEL_POSITIONS
    in_one = op.target.prefers("fused-affine") and y.dtype == FLOAT and large
    if in_one and sizes is not None:
        return op.Reshape(_apply_by_batch_norm(op, y, line, sizes), [-1, rows, length])
    slope, level = (op.cast(v, y.dtype) for v in line)
    if op.rank(slope) == 2:
        return op.Add(op.Mul(y, slope), level)
    table = op.Reshape(y, [-1, length])  # a column of numbers has a kernel of its own
    slope, level = (op.Reshape(v, [-1, 1]) for v in (slope, level))
    return op.Reshape(op.Add(op.Mul(table, slope), level), [-1, rows, length])


def _apply_by_batch_norm(op: OpBuilder, y: ir.Value, line: RowAffine, sizes: list[int]) -> ir.Value:
    """By BatchNormalization, whose kernel takes a channel at a time: so there are many of them."""
    length, count = sizes[-1], math.prod(sizes[:-1])
    most = length // T.NORM_KERNEL_POSITIONS
    pieces = [k for k in range(1, most + 1) if length % k == 0]
    pieces = next((k for k in pieces if count * k >= T.AFFINE_KERNEL_CHANNELS), pieces[-1])
    count *= pieces
    zero, one = (op.const(np.full(count, v), FLOAT) for v in (0.0, 1.0))
    whole = op.const([*sizes[:-1], pieces])
    spread = pieces > 1 or op.rank(line.slope) == 2
    slope, level = (op.Reshape(op.Expand(v, whole) if spread else v, [-1]) for v in line)
    table = op.Reshape(y, [1, count, length // pieces])
    return op.BatchNormalization(table, slope, level, zero, one, epsilon=0.0)


def group_normalization(
    op: OpBuilder,
    x: ir.Value,
    scale: ir.Value,
    bias: ir.Value,
    *,
    num_groups: int,
    epsilon: float,
) -> ir.Value | None:
    """``scale * (x - mean) / deviation + bias`` over the channels and positions of a group."""
    if not can_normalize_groups(x, num_groups):
        return None
    parts = normalize_groups(op, x, num_groups, epsilon)
    return op.reshape_like(
        apply_row_affine(op, parts.y, fold_scale_and_bias(op, parts, scale, bias)), x
    )
