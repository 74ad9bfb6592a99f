"""Rows that are normalised, on GPUs: lines and products with a column instead of plain passes.

There each operator is a pass over memory. A line whose numbers differ by row, ``(x - a) * b``, is
one pass of the operator for given statistics, with rows as its channels. Means over rows that are
weighted are products with a column. What the gradient ``r * (g - mean(g) - xh * mean(g * xh))``
consists of is then two lines and a sum, and a sum takes whatever else is added to it.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes import dims as D

_MOST_ROWS = (1 << 16) - 1
"""What kernels are known to take as channels."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """What the gradient of normalised rows is made of."""

    x: ir.Value
    dy: ir.Value
    product: ir.Value
    """``dy * xh``."""
    xh: ir.Value
    r: ir.Value
    scale: ir.Value | None
    """``None`` stands for 1."""
    axes: list[int]

    @property
    def last_axis(self) -> bool:
        """Whether there is a scale along the last axis, the one that means go over."""
        if self.scale is None or len(self.axes) != 1:  # a constant would be packed in each step
            return False
        return self._fits_scale

    @property
    def _fits_scale(self) -> bool:
        dims = (S.dims_of(self.x) or ())[self.axes[0] :]
        return self.scale is None or S.dims_of(self.scale) == dims != (None,)

    @property
    def long(self) -> bool:
        """Whether kernels of normalisation pay, and a scale is one number for each column."""
        return are_long(self.x, self.axes) and self._fits_scale


def matrix_of(x: ir.Value, axes: list[int]) -> tuple[int, int] | None:
    """Return how many rows there are and how long they are, if that is known."""
    sizes = D.numbers(S.dims_of(x) or (None,))
    if not sizes:
        return None
    return math.prod(sizes[: axes[0]]), math.prod(sizes[axes[0] :])


def are_long(x: ir.Value, axes: list[int]) -> bool:
    """Return whether rows of float32 are long enough for kernels of normalisation."""
    rows, length = matrix_of(x, axes) or (0, 0)
    fits = x.dtype == ir.DataType.FLOAT and 0 < rows <= _MOST_ROWS
    return fits and length >= T.NORMALISED_POSITIONS


def row_line(op: OpBuilder, x: ir.Value, a: ir.Value, b: ir.Value, axes: list[int]) -> ir.Value:
    """Return ``(x - a) * b``, with one ``a`` and one ``b`` for each row."""
    rows, length = matrix_of(x, axes) or (0, 0)
    zero = op.full([rows], 0.0, ir.DataType.FLOAT)
    a, b = (op.Reshape(v, [rows]) for v in (a, b))
    flat = op.Reshape(x, [1, rows, length])
    line = op.BatchNormalization(flat, b, zero, a, zero, epsilon=1.0)  # zero + 1 is the variance
    return op.reshape_like(line, x)


def slope_by_lines(op: OpBuilder, v: Rows) -> ir.Value:
    """Return the gradient of ``x``; the second mean has a minus from the product that makes it."""
    rows, length = matrix_of(v.x, v.axes) or (0, 0)
    column = op.const(np.ones((length, 1)), v.dy.dtype)
    if v.scale is not None:
        column = op.Reshape(v.scale, [length, 1])

    def matrix(x: ir.Value) -> ir.Value:
        return op.Reshape(x, [rows, length])

    shift = op.Gemm(matrix(v.dy), column, alpha=1.0 / length)
    tilt = op.Gemm(matrix(v.product), column, alpha=-1.0 / length)
    g = v.dy if v.scale is None else op.Mul(v.dy, v.scale)
    slanted = op.Mul(matrix(v.xh), op.Mul(tilt, op.Reshape(v.r, [rows, 1])))
    return op.Add(row_line(op, g, shift, v.r, v.axes), op.reshape_like(slanted, v.x))


__all__ = ["Rows", "are_long", "matrix_of", "row_line", "slope_by_lines"]
