"""Zeros that are only known when something else is: they make constants wait."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.builder.op_builder import OpBuilder


def late_zero(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return an int64 zero of shape [1] that depends on ``x``, whatever its values and sizes.

    A runtime runs what reads constants only as early as it can, and keeps the result. What takes
    this zero along is run when ``x`` is there. Where all sizes are numbers a runtime knows the
    shape beforehand, so that an element is asked; there is one then.
    """
    if op.static(x) is None or 0 in op.dims(x):
        return op.Min(op.Shape(x, start=0, end=1), op.const([0]))
    first = op.Slice(op.Reshape(x, [-1]), [0], [1])
    return op.Cast(op.Less(op.Abs(first), 0.0), to=ir.DataType.INT64)
