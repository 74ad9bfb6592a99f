"""Determinants of small matrices."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder


def det(op: OpBuilder, x: ir.Value) -> ir.Value | None:
    """Return the determinants of one to three rows, written out."""
    n = op.dims(x)[-1]
    if n not in (1, 2, 3):
        return None
    r = op.rank(x)

    def at(i, j):
        row = op.Slice(x, [i], [i + 1], [r - 2])
        return op.Squeeze(op.Slice(row, [j], [j + 1], [r - 1]), [r - 2, r - 1])

    def minor(i, j, k, m):
        return op.Sub(op.Mul(at(i, k), at(j, m)), op.Mul(at(i, m), at(j, k)))

    if n == 1:
        return at(0, 0)
    if n == 2:
        return minor(0, 1, 0, 1)
    total = op.Mul(at(0, 0), minor(1, 2, 1, 2))
    total = op.Sub(total, op.Mul(at(0, 1), minor(1, 2, 0, 2)))
    return op.Add(total, op.Mul(at(0, 2), minor(1, 2, 0, 1)))
