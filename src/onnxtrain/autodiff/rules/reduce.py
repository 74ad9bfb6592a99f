"""Reductions."""

from __future__ import annotations

from onnxtrain.autodiff.registry import vjp


@vjp("ReduceSum")
def reduce_sum(op, dy, x, axes=None, *, keepdims, noop_with_empty_axes):
    """Every summed element gets the gradient of its sum."""
    if axes is None and noop_with_empty_axes:
        return dy
    return op.expand_like(op.restore_axes(dy, x, axes, keepdims), x)
