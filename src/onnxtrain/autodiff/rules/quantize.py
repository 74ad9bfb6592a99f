"""Quantised tensors: integers are frozen, scales can be trained.

Rounding has no useful gradient, so quantisers are refused; ``build(straight_through=True)`` trains
through them as if they did not round (``straight_through.py``). A rule of your own gets and gives
gradients in the unit of the integers::

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
    form = form_of(op, x, x_scale, axis, block_size)
    steps = op.DequantizeLinear(x, op.ones_like(x_scale), x_zero_point, **form)
    weighted = op.Mul(dy, op.cast(steps, dy.dtype))
    dscale = sum_to_scale(op, weighted, x_scale, axis, block_size, form)
    dx = None
    if wanted[0]:
        dx = op.Mul(dy, op.cast(spread(op, x_scale, x, x.dtype, form), dy.dtype))
    return dx, op.cast(dscale, x_scale.dtype)


def form_of(op, x, scale, axis: int, block_size: int) -> dict[str, int]:
    """Return the attributes with which a scale has its present shape."""
    rank = op.rank(scale)
    axis = axis % op.rank(x) if op.rank(x) else 0
    form = {"axis": axis} if rank == 1 else {"axis": axis, "block_size": block_size}
    return {} if rank == 0 or op.dims(scale) == (1,) else form


def spread(op, scale, like, dtype: ir.DataType, form: dict[str, int]):
    """Return a scale for every element of ``like``; ``dtype`` is that of the integers."""
    one = ir.tensor(np.ones(1, np.float32)).numpy().astype(dtype.numpy())
    ones = op.ConstantOfShape(op.shape_of(like), value=ir.Tensor(one, dtype=dtype))
    return op.DequantizeLinear(ones, scale, **form)


def sum_to_scale(op, weighted, scale, axis: int, block_size: int, form: dict[str, int]):
    """Return the sum of what belongs to each scale."""
    if not form:
        return op.reshape_like(op.ReduceSum(weighted, keepdims=0), scale)
    axis = axis % op.rank(weighted)
    if op.rank(scale) == 1 and not block_size:
        others = [a for a in range(op.rank(weighted)) if a != axis]
        total = op.ReduceSum(weighted, others, keepdims=0) if others else weighted
        return op.sum_to(total, scale)  # a scale of unknown size may have one element
    return _sum_blocks(op, weighted, scale, axis, block_size)


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
