"""Gradient clipping and averaging of weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph.builder import OpBuilder


@dataclasses.dataclass(frozen=True)
class Clip:
    """Gradient clipping: by the joint norm of all gradients, or by value."""

    norm: float | None = None
    value: float | None = None

    @classmethod
    def of(cls, given: float | Clip | None) -> Clip:
        """Return the limits that a number, which is that of the norm, stands for.

        Raises:
            PrepareError: if a limit is not positive.
        """
        limits = given if isinstance(given, Clip) else cls(None if given is None else float(given))
        for limit in (limits.norm, limits.value):
            if limit is not None and not limit > 0:
                raise PrepareError(f"clip must be positive: {limit}")
        return limits


def global_norm(op: OpBuilder, gradients: Mapping[str, ir.Value]) -> ir.Value:
    """Return the norm of all gradients taken as one vector, a float32 scalar."""
    squares = [
        op.cast(op.ReduceSum(op.Mul(g, g), keepdims=0), ir.DataType.FLOAT)
        for g in gradients.values()
    ]
    total = squares[0]
    for square in squares[1:]:
        total = op.Add(total, square)
    return op.Sqrt(total)


def clip_by_global_norm(
    op: OpBuilder, gradients: Mapping[str, ir.Value], max_norm: float, norm: ir.Value | None = None
) -> dict[str, ir.Value]:
    """Scale all gradients so that their joint norm is at most ``max_norm``, as torch does."""
    norm = global_norm(op, gradients) if norm is None else norm
    factor = op.Div(max_norm, op.Add(norm, 1e-6))
    factor = op.Where(op.Less(factor, 1.0), factor, 1.0)
    return {name: op.Mul(g, op.cast(factor, g.dtype)) for name, g in gradients.items()}


def clip_by_value(
    op: OpBuilder, gradients: Mapping[str, ir.Value], limit: float
) -> dict[str, ir.Value]:
    """Cut every element of every gradient off at ``-limit`` and ``limit``."""
    return {name: op.Clip(g, -limit, limit) for name, g in gradients.items()}


def moving_average(
    op: OpBuilder,
    averages: Mapping[str, ir.Value],
    parameters: Mapping[str, ir.Value],
    decay: float,
) -> dict[str, ir.Value]:
    """Return ``decay * average + (1 - decay) * parameter`` for each parameter."""
    return {
        name: op.Add(op.Mul(averages[name], decay), op.Mul(p, 1.0 - decay))
        for name, p in parameters.items()
    }
