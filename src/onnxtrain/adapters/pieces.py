"""Shares of adapters in the output of a layer."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir


@dataclasses.dataclass(frozen=True)
class Piece:
    """An adapter's share in the output of one layer."""

    a: ir.Value
    b: ir.Value
    scaling: float
    rank: int
    start: int
    width: int
    column: int
    outputs: int
    """How many columns ``b`` has in all."""
    magnitude: ir.Value | None = None
    squared_length: ir.Value | None = None
    """Of the frozen weights of each output, with DoRA."""


__all__ = ["Piece"]
