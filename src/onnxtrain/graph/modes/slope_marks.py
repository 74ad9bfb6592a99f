"""Marks on values that are slopes of a function of one number, so that passes need not guess."""

from __future__ import annotations

import onnx_ir as ir

_SLOPE = "onnxtrain.slope"  # key in Value.meta: of which function

GELU_TANH = "slope of Gelu by tanh"
GELU_TWICE = "twice the slope of Gelu"


def mark_slope(y: ir.Value, kind: str) -> ir.Value:
    """Return a value, marked as a slope of a kind."""
    y.meta[_SLOPE] = kind
    return y


def slope_kind(y: ir.Value) -> str | None:
    """Return of which kind a value is a slope, if it is one."""
    return y.meta.get(_SLOPE)


__all__ = ["GELU_TANH", "GELU_TWICE", "mark_slope", "slope_kind"]
