"""Dropout by the runtime's uniform random numbers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.lowering.registry import lower


@lower("Dropout")
def dropout(op, x, ratio=None, training=None, *, seed):
    """``x`` at inference; else ``x / (1 - ratio)`` where a random number is not below the ratio."""
    rate = np.asarray(0.5) if ratio is None else op.constant(ratio)
    on = np.asarray(False) if training is None else op.constant(training)
    if on is None or rate is None:
        return None
    kept, rate = op.const(True), float(rate.reshape(()))
    if not bool(on) or rate == 0:
        return op.Identity(x), op.expand_like(kept, x)
    if rate >= 1:
        return None
    attributes = {} if seed is None else {"seed": float(seed)}
    drawn = op.RandomUniformLike(x, dtype=ir.DataType.FLOAT, **attributes)
    mask = op.Not(op.Less(drawn, rate))
    return op.Where(mask, op.Mul(x, 1 / (1 - rate)), op.const(0, x.dtype)), mask
