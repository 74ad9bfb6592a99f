"""Dropout."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.registry import Gradients, vjp
from onnxtrain.graph.builder import OpBuilder


@vjp("Dropout", constant_inputs={1: "the ratio decides at random, it does not scale"})
def dropout(op, dy, x, ratio=None, training_mode=None, *, node) -> Gradients:
    """``dx = dy * mask / (1 - ratio)`` with the forward node's own mask; ``dy`` out of training."""
    training, drop = op.constant(training_mode), op.constant(ratio)
    if training_mode is None or (training is not None and not training.any()):
        return dy
    if ratio is None:
        drop = 0.5
    if drop is not None and float(drop) == 0.0:
        return dy
    mask = op.extra_output(node, 1)  # all true out of training
    if drop is not None:
        scale = op.const(1.0 / (1.0 - float(drop)), x.dtype)
    else:
        scale = op.Reciprocal(op.Sub(op.const(1.0, x.dtype), op.cast(ratio, x.dtype)))
    if training is None:
        scale = op.Where(training_mode, scale, op.const(1.0, x.dtype))
    scale = _as_scalar(op, scale)
    return op.Where(mask, op.Mul(dy, scale), op.const(0.0, x.dtype))


def _as_scalar(op: OpBuilder, v: ir.Value) -> ir.Value:
    """Return a number without axes; some exporters write ratio and mode as vectors of one."""
    return v if op.rank(v) == 0 else op.Reshape(v, op.const([], ir.DataType.INT64))
