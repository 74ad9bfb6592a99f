"""Elementwise arithmetic."""

from __future__ import annotations

from onnxtrain.autodiff.registry import elementwise

elementwise("Add", lambda op, dy, a, b: (dy, dy))
elementwise("Sub", lambda op, dy, a, b: (dy, op.Neg(dy)))
elementwise("Mul", lambda op, dy, a, b: (op.Mul(dy, b), op.Mul(dy, a)))
elementwise("Neg", lambda op, dy, x: op.Neg(dy))
elementwise("Exp", lambda op, dy, x, *, y: op.Mul(dy, y))
elementwise("Tanh", lambda op, dy, x, *, y: op.Mul(dy, op.Sub(1.0, op.Mul(y, y))))
elementwise("Identity", lambda op, dy, x: dy)
