"""Rearranging elements: shapes, axes, slices."""

from __future__ import annotations

from onnxtrain.autodiff.registry import vjp


@vjp("Reshape")
def reshape(op, dy, x, shape):
    """Back to the old shape."""
    return op.reshape_like(dy, x)


@vjp("Transpose")
def transpose(op, dy, x, *, perm):
    """The inverse permutation."""
    perm = perm if perm is not None else list(range(op.rank(x)))[::-1]
    return op.Transpose(dy, perm=[perm.index(i) for i in range(len(perm))])


@vjp("Squeeze", "Unsqueeze")
def squeeze(op, dy, x, axes=None):
    """Back to the old shape."""
    return op.reshape_like(dy, x)


@vjp("Expand")
def expand(op, dy, x, shape):
    """Sum over what was repeated."""
    return op.sum_to(dy, x)
