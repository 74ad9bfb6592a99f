"""``Cast`` for runtimes that have none: a table of the numbers in the wanted type, gathered."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.lowering.bool_as_int import BOOL, WHOLE, as_integer
from onnxtrain.lowering.registry import lower

_BASE = 2048  # digits; three of them are more than 32 bits


@lower("Cast")
def cast_of_booleans(op, x, *, to, saturate, round_mode):
    """The integer that stands for the truth, or the number at that place of ``[0, 1]``."""
    dtype = ir.DataType(to)
    if x.dtype != BOOL or dtype == BOOL:
        return None
    number = as_integer(op, x)
    if number is None or dtype == ir.DataType.INT64:
        return number
    return op.Gather(op.const([0, 1], dtype), number, axis=0)


@lower("Cast")
def cast_of_integers(op, x, *, to, saturate, round_mode):
    """The sum of what each digit stands for; right for 32 bits, an error of Gather beyond."""
    dtype = ir.DataType(to)
    if x.dtype not in WHOLE or not (dtype.is_floating_point() or dtype in WHOLE):
        return None
    if dtype.itemsize < 4:
        return None  # a half has fewer digits than the table
    base, terms = op.const(_BASE, x.dtype), []
    for scale, most in ((1, _BASE), (_BASE, _BASE), (_BASE**2, _BASE // 4)):
        # A quotient is cut off towards zero, so digits have the sign of the number.
        rest = op.Div(x, base)
        digit = x if scale == _BASE**2 else op.Sub(x, op.Mul(rest, base))
        place = op.Add(digit, op.const(most, x.dtype))
        table = np.arange(-most, most, dtype=np.float64) * scale
        terms.append(op.Gather(op.const(table, dtype), place, axis=0))
        x = rest
    low, middle, high = terms
    # The two higher ones have 22 digits: one rounding in all, as in a Cast.
    return op.Add(op.Add(high, middle), low)
