"""Quantisers trained straight through: as if they did not round.

These rules hold for nodes that ``build(straight_through=True)`` marks. As everywhere, gradients of
integers are in their unit: behind ``q = x / s + z`` comes ``dx = dq / s``. Outside the range of the
integers nothing passes, for there the result does not move.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff.registry import STRAIGHT, Rule
from onnxtrain.autodiff.rules.quantize import form_of, spread, sum_to_scale

_RANGES = {
    ir.DataType.UINT4: (0, 15),
    ir.DataType.INT4: (-8, 7),
    ir.DataType.UINT8: (0, 255),
    ir.DataType.INT8: (-128, 127),
    ir.DataType.UINT16: (0, 65535),
    ir.DataType.INT16: (-32768, 32767),
}


def quantize_linear(op, dy, x, scale, zero_point=None, *, axis, block_size, node, wanted):
    """``dx = dy / s`` inside the range, and ``ds = -sum(dy x / s^2)`` there."""
    kind = node.outputs[0].dtype
    form = form_of(op, x, scale, axis, block_size)
    wide = op.cast(spread(op, scale, x, kind, form), x.dtype)
    passed = op.Div(dy, wide)
    limits = _RANGES.get(kind)
    if limits is not None:
        inside = _inside(op, x, wide, scale, zero_point, limits, form)
        passed = op.Mul(passed, op.Cast(inside, to=x.dtype))
    dscale = None
    if wanted[1]:
        weighted = op.Neg(op.Mul(passed, op.Div(x, wide)))
        dscale = op.cast(sum_to_scale(op, weighted, scale, axis, block_size, form), scale.dtype)
    return passed, dscale


def _inside(op, x, wide, scale, zero_point, limits, form):
    """Return where the rounded number needs no clipping."""
    low, high = limits
    rounded = op.Round(op.Div(x, wide))
    if zero_point is None:
        return op.And(
            op.GreaterOrEqual(rounded, op.const(low, x.dtype)),
            op.LessOrEqual(rounded, op.const(high, x.dtype)),
        )
    zero = ir.Tensor(
        ir.tensor([0]).numpy().astype(zero_point.dtype.numpy()), dtype=zero_point.dtype
    )
    nothing = op.ConstantOfShape(op.shape_of(x), value=zero)
    # (0 - z) * 1, for every element
    shift = op.cast(op.DequantizeLinear(nothing, op.ones_like(scale), zero_point, **form), x.dtype)
    return op.And(
        op.GreaterOrEqual(rounded, op.Add(shift, op.const(low, x.dtype))),
        op.LessOrEqual(rounded, op.Add(shift, op.const(high, x.dtype))),
    )


def dynamic_quantize_linear(op, dys, x, *, outputs):
    """``dx = dy / s``: the range is chosen so that all is inside; scale and zero point stand."""
    dy = dys[0]
    return None if dy is None else op.Div(dy, outputs[1])


STRAIGHT["QuantizeLinear"] = Rule(
    "QuantizeLinear", quantize_linear, constant_inputs={2: "the zero point is an integer"}
)
STRAIGHT["DynamicQuantizeLinear"] = Rule(
    "DynamicQuantizeLinear", dynamic_quantize_linear, multi=True
)
