"""Changes of dtype."""

from __future__ import annotations

from onnxtrain.autodiff.registry import vjp


@vjp("Cast")
def cast(op, dy, x):
    """Cast back.

    Only casts from float to float get here: through integers, booleans and 8-bit floats no
    gradient flows, as in torch.
    """
    return op.cast(dy, x.dtype)


@vjp("CastLike", constant_inputs={1: "it only tells the dtype"})
def cast_like(op, dy, x, target_type):
    """Cast back."""
    return op.cast(dy, x.dtype)
