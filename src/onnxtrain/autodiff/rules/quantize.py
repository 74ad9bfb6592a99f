"""Quantised tensors: integers are frozen, scales can be trained.

Rounding has no useful gradient, so quantisers are refused. To train through them, register a
straight-through rule, which gets and gives gradients in the unit of the integers::

    @onnxtrain.register_vjp("QuantizeLinear")
    def straight_through(op, dy, x, scale, zero_point=None):
        return op.Div(dy, scale)
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.registry import no_gradient, vjp
from onnxtrain.graph.builder import size_arithmetic as Z

# DynamicQuantizeLinear has a body, which computes a scale and then uses QuantizeLinear.
no_gradient("QuantizeLinear", why="it rounds to integers", refuse=True)
no_gradient("QLinearConv", "QLinearMatMul", why="it rounds to integers", refuse=True)
no_gradient("ConvInteger", "MatMulInteger", why="works on integers", refuse=True)


@vjp("DequantizeLinear")
def dequantize_linear(op, dy, x, x_scale, x_zero_point=None, *, axis, block_size, wanted):
    """``y = (x - zero_point) * scale``, hence ``dscale = sum(dy * (x - zero_point))``.

    The gradient of x exists only on the way to a straight-through rule: ``dx = dy * scale``.
    """
    rank = op.rank(x_scale)
    axis = axis % op.rank(x) if op.rank(x) else 0
    form = {"axis": axis} if rank == 1 else {"axis": axis, "block_size": block_size}
    form = {} if rank == 0 or op.dims(x_scale) == (1,) else form
    steps = op.DequantizeLinear(x, op.ones_like(x_scale), x_zero_point, **form)
    weighted = op.Mul(dy, op.cast(steps, dy.dtype))
    if not form:
        dscale = op.reshape_like(op.ReduceSum(weighted, keepdims=0), x_scale)
    elif rank == 1 and not block_size:
        others = [a for a in range(op.rank(x)) if a != axis]
        dscale = op.ReduceSum(weighted, others, keepdims=0) if others else weighted
        dscale = op.sum_to(dscale, x_scale)  # a scale of unknown size may have one element
    else:
        dscale = _sum_blocks(op, weighted, x_scale, axis, block_size)
    dx = None
    if wanted[0]:
        one = ir.tensor(np.ones(1, np.float32)).numpy().astype(x.dtype.numpy())
        ones = op.ConstantOfShape(op.shape_of(x), value=ir.Tensor(one, dtype=x.dtype))
        dx = op.Mul(dy, op.cast(op.DequantizeLinear(ones, x_scale, **form), dy.dtype))
    return dx, op.cast(dscale, x_scale.dtype)


def _sum_blocks(op, x, scale, axis: int, block: int):
    """Sum along ``axis`` over blocks, the last of which may be short."""
    rank = op.rank(x)
    size, count = op.size(x, axis), op.size(scale, axis)
    missing = Z.minus(op, Z.times(op, count, block), size)
    if missing != 0:
        pads: list[Z.Size] = [0] * 2 * rank
        pads[axis + rank] = missing
        x = op.Pad(x, op.vector(pads))
    sizes = [op.size(x, a) for a in range(rank)]
    blocks = op.reshape(x, [*sizes[:axis], count, block, *sizes[axis + 1 :]])
    return op.ReduceSum(blocks, [axis + 1], keepdims=0)
