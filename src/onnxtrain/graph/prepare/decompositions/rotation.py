"""Rotation of pairs of features, in the form with the fewest nodes, forward and backward."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder

_END = np.iinfo(np.int64).max


def rotate(
    op: OpBuilder, x: ir.Value, cos: ir.Value, sin: ir.Value, interleaved: int, turned: int | None
) -> ir.Value:
    """Rotate pairs ``(a, b)`` of the last axis to ``(a cos - b sin, b cos + a sin)``.

    That is ``x * (cos, cos) + (b, a) * (-sin, sin)``: the tables are joined once for all layers.

    Args:
        op: the builder.
        x: of rank 4.
        cos: half as wide as what is turned; it broadcasts with ``x`` in other axes.
        sin: like ``cos``.
        interleaved: whether pairs are neighbours; else ``b`` lies half the width behind ``a``.
        turned: how many features are turned; ``None`` for all, the rest stays as it is.
    """
    whole, rest = x, None
    if turned is not None:
        whole, rest = op.Slice(x, [0], [turned], [3]), op.Slice(x, [turned], [_END], [3])
    axis = 3
    if interleaved:
        whole = op.Reshape(whole, [0, 0, 0, -1, 2])
        cos, sin, axis = op.Unsqueeze(cos, [4]), op.Unsqueeze(sin, [4]), 4
    a, b = op.Split(whole, axis=axis, num_outputs=2, _outputs=2)
    both = cos if interleaved else op.Concat(cos, cos, axis=axis)
    signed = op.Concat(op.Neg(sin), sin, axis=axis)
    swapped = op.Concat(b, a, axis=axis)
    swapped.shape = whole.shape
    y = op.Add(op.Mul(whole, both), op.Mul(swapped, signed))
    y.shape = whole.shape
    if interleaved:
        y = op.Reshape(y, [0, 0, 0, -1])
    if rest is not None:
        y = op.Concat(y, rest, axis=3)
    y.shape = x.shape
    return y
