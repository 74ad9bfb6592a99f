"""GroupNormalization by kernels that are there: images normalised each on its own, and a line."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.composed.normalised_groups import (
    can_be_normalised,
    normalised_groups,
    on_line,
    scaled,
)


def group_normalization(
    op: OpBuilder,
    x: ir.Value,
    scale: ir.Value,
    bias: ir.Value,
    *,
    num_groups: int,
    epsilon: float,
) -> ir.Value | None:
    """``scale * (x - mean) / deviation + bias`` over the channels and positions of a group."""
    if not can_be_normalised(x, num_groups):
        return None
    parts = normalised_groups(op, x, num_groups, epsilon)
    return op.reshape_like(on_line(op, parts.y, scaled(op, parts, scale, bias)), x)


__all__ = ["group_normalization"]
