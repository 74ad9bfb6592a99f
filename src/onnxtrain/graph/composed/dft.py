"""The discrete Fourier transform as a product."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder


def dft(
    op: OpBuilder,
    x: ir.Value,
    length: ir.Value | None = None,
    axis: ir.Value | None = None,
    *,
    inverse: int,
    onesided: int,
) -> ir.Value | None:
    """Return a product with the cosines and sines of the transform."""
    rank = op.rank(x)
    where = op.constant(axis) if axis is not None else np.asarray(-2)
    if where is None:
        return None
    at = int(where.reshape(())) % rank
    n, parts = op.dims(x)[at], op.dims(x)[-1]
    points = n if length is None else op.constant(length)
    if points is None or not isinstance(n, int) or parts not in (1, 2) or (inverse and onesided):
        return None
    points = int(np.asarray(points).reshape(()))
    if points < n:
        x, n = op.Slice(x, [0], [points], [at]), points
    kept = points // 2 + 1 if onesided else points
    angle = 2 * np.pi * np.outer(np.arange(n), np.arange(kept)) / points
    scale, turn = (1 / points, 1.0) if inverse else (1.0, -1.0)
    real, imaginary = np.cos(angle) * scale, turn * np.sin(angle) * scale
    # The axis last, then [.., n * parts] @ [n * parts, kept * 2].
    moved = op.move_axis(x, at, rank - 2)  # [..., n, parts]
    dims = op.dims(moved)
    table = np.zeros((n, parts, kept, 2))
    table[:, 0, :, 0], table[:, 0, :, 1] = real, imaginary
    if parts == 2:
        table[:, 1, :, 0], table[:, 1, :, 1] = -imaginary, real
    lead = [op.size(moved, i) for i in range(rank - 2)]
    flat = op.reshape(moved, [*lead, n * parts])
    y = op.MatMul(flat, op.const(table.reshape(n * parts, kept * 2), x.dtype))
    y = op.reshape(y, [*lead, kept, 2])
    S.set_dims(y, [*dims[:-2], kept, 2])
    return op.move_axis(y, rank - 2, at)
