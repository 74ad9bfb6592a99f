"""Products of matrices, and determinants."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.registry import Gradients, vjp
from onnxtrain.graph.builder import OpBuilder


@vjp("MatMul")
def matmul(op: OpBuilder, dy: ir.Value, a: ir.Value, b: ir.Value) -> Gradients:
    """``da = dy @ b^T``, ``db = a^T @ dy``, summed over the broadcast batch axes."""
    if op.rank(a) == 1 and op.rank(b) == 1:
        return op.Mul(dy, b), op.Mul(dy, a)
    if op.rank(a) == 1:  # [K] @ [..., K, N] -> [..., N]
        column = op.MatMul(b, op.Unsqueeze(dy, [-1]))
        outer = op.Mul(op.Unsqueeze(a, [-1]), op.Unsqueeze(dy, [-2]))
        return _sum_to_vector(op, op.Squeeze(column, [-1]), a), outer
    if op.rank(b) == 1:  # [..., M, K] @ [K] -> [..., M]
        rows, flat = _as_matrix(op, a, op.size(b, 0)), op.Reshape(dy, [-1])
        return op.Mul(op.Unsqueeze(dy, [-1]), b), op.MatMul(flat, rows)
    if op.rank(b) == 2:
        # A weight behind leading axes: one product over all rows, not one per batch and a sum.
        rows, columns = (_as_matrix(op, v, op.size(b, i)) for i, v in enumerate((a, dy)))
        da = op.Gemm(dy, b, transB=1) if op.rank(a) == 2 else op.MatMul(dy, op.mT(b))
        return da, op.Gemm(rows, columns, transA=1)
    da = op.sum_to(op.MatMul(dy, op.mT(b)), a)
    return da, op.sum_to(op.MatMul(op.mT(a), dy), b)


def _as_matrix(op: OpBuilder, x: ir.Value, width: int | ir.Value) -> ir.Value:
    """Return ``x`` with all axes but the last joined."""
    return x if op.rank(x) == 2 else op.reshape(x, [-1, width])


def _sum_to_vector(op: OpBuilder, x: ir.Value, vector: ir.Value) -> ir.Value:
    lead = op.rank(x) - 1
    return op.ReduceSum(x, list(range(lead)), keepdims=0) if lead else x


@vjp("Gemm")
def gemm(
    op: OpBuilder,
    dy: ir.Value,
    a: ir.Value,
    b: ir.Value,
    c: ir.Value | None = None,
    *,
    alpha: float,
    beta: float,
    transA: int,
    transB: int,
) -> Gradients:
    """``dA = alpha dy B^T``, ``dB = alpha A^T dy``, transposed as A and B are; ``dC = beta dy``."""
    if transA:
        da = op.Gemm(b, dy, alpha=alpha, transA=transB, transB=1)
    else:
        da = op.Gemm(dy, b, alpha=alpha, transB=1 - transB)
    if transB:
        db = op.Gemm(dy, a, alpha=alpha, transA=1, transB=transA)
    else:
        db = op.Gemm(a, dy, alpha=alpha, transA=1 - transA)
    if c is None:
        return da, db
    dc = op.sum_to(dy, c)
    return da, db, dc if beta == 1.0 else op.Mul(dc, beta)


@vjp("Det")
def det(op: OpBuilder, dy: ir.Value, x: ir.Value) -> Gradients:
    """``dX = dy * cof(X)``, where ``cof(X)[i, j]`` is the determinant of X with row i set to e_j.

    Right for singular matrices too, at the price of n^2 determinants per matrix: the standard has
    neither an inverse nor a solver.
    """
    assert x.dtype is not None
    n = op.size(x, -1)
    eye = op.eye(n, x.dtype)
    replaced = op.Unsqueeze(op.Cast(eye, to=ir.DataType.BOOL), [1, 3])  # [i, 1, k, 1]
    rows = op.Unsqueeze(eye, [0, 2])  # [1, j, 1, l]
    variants = op.Where(replaced, rows, op.Unsqueeze(x, [-4, -3]))  # [..., i, j, k, l]
    return op.Mul(op.Unsqueeze(dy, [-2, -1]), op.Det(variants))
