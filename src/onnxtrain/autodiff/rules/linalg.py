"""Products of matrices and tensors."""

from __future__ import annotations

from onnxtrain.autodiff.registry import vjp


@vjp("MatMul")
def matmul(op, dy, a, b):
    """``da = dy @ b^T``, ``db = a^T @ dy``, summed over the broadcast batch axes."""
    row, col = op.rank(a) == 1, op.rank(b) == 1  # numpy.matmul promotes vectors
    a2 = op.Unsqueeze(a, [0]) if row else a
    b2 = op.Unsqueeze(b, [1]) if col else b
    dy = op.Unsqueeze(dy, [-1]) if col else dy
    dy = op.Unsqueeze(dy, [-2]) if row else dy
    da = op.sum_to(op.MatMul(dy, op.mT(b2)), a2)
    db = op.sum_to(op.MatMul(op.mT(a2), dy), b2)
    return op.reshape_like(da, a), op.reshape_like(db, b)
