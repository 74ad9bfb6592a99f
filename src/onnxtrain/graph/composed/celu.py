"""Celu by Elu."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder


def celu(op: OpBuilder, x: ir.Value, *, alpha: float) -> ir.Value:
    """Return ``alpha elu(x / alpha)``."""
    if alpha == 1.0:
        return op.Elu(x)
    return op.Mul(op.Elu(op.Div(x, alpha)), alpha)
