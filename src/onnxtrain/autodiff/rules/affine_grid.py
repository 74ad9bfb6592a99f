"""AffineGrid: the places that an affine map sends a regular grid to."""

from __future__ import annotations

import numpy as np

from onnxtrain.autodiff.registry import Gradients, vjp


@vjp("AffineGrid")
def affine_grid(op, dy, theta, size, *, align_corners) -> Gradients:
    """``grid = [base, 1] @ theta^T``, so ``dtheta = dgrid^T @ [base, 1]``, summed over the places.

    The base grid is what the identity map gives; it is made by AffineGrid itself.
    """
    n = op.dims(theta)[1]
    spatial = n if isinstance(n, int) else op.rank(dy) - 2
    identity = op.const(np.eye(spatial, spatial + 1)[None], theta.dtype)
    one_image = op.Concat(op.const([1]), op.Slice(size, [1], [spatial + 2]), axis=0)
    base = op.AffineGrid(identity, one_image, align_corners=align_corners)
    base = op.Reshape(base, [-1, spatial])
    places = op.Reshape(dy, [0, -1, spatial])  # [N, P, spatial]
    flat = op.Transpose(places, perm=[0, 2, 1])
    turns = op.MatMul(flat, base)
    shifts = op.ReduceSum(flat, [2], keepdims=1)
    return op.Concat(turns, shifts, axis=2), None
