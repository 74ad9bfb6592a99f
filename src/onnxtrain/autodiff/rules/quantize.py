"""Quantized tensors: integers are frozen, scales can train.

Rounding has no useful gradient, so QuantizeLinear is rejected by default.
``build(straight_through=True)`` marks quantizers, and the rules at the end of this file
differentiate them as if they did not round: behind ``q = x / s + z`` the gradient is ``dx = dq /
s``. Outside the integer range it is zero, because the result is clamped there. A custom rule gets
and returns gradients in integer units::

    @onnxtrain.register_vjp("QuantizeLinear")
    def straight_through(op, dy, x, scale, zero_point=None):
        return op.Div(dy, scale)

MatMulNBits: weights stay packed, forward and backward. The input gradient dequantizes them where it
uses them. onnxruntime runs operators on constants early and keeps their results, so a row index
that depends on the incoming gradient keeps it from dequantizing all layers at the start.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.rule_registry import (
    KEEP_UNEXPANDED,
    STRAIGHT_THROUGH_RULES,
    Choice,
    Choices,
    Rule,
    Variant,
    Variants,
    no_gradient,
    select_variant,
    vjp,
)
from onnxtrain.expand.packed_matmul import MIN_BLOCK_SIZE, PackedMatMul, unpack_zero_points
from onnxtrain.graph import builder as Z
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, runtime_zero

# DynamicQuantizeLinear has a function body, which computes a scale and uses QuantizeLinear.
no_gradient("QuantizeLinear", why="it rounds to integers", refuse=True)
no_gradient("QLinearConv", "QLinearMatMul", why="it rounds to integers", refuse=True)
no_gradient("ConvInteger", "MatMulInteger", why="works on integers", refuse=True)


@vjp("DequantizeLinear")
def dequantize_linear(op, dy, x, x_scale, x_zero_point=None, *, axis, block_size, wanted):
    """``y = (x - zero_point) * scale``, hence ``dscale = sum(dy * (x - zero_point))``.

    ``x`` gets a gradient only in front of a straight-through rule: ``dx = dy * scale``.
    """
    form = scale_layout(op, x, x_scale, axis, block_size)
    steps = op.DequantizeLinear(x, op.ones_like(x_scale), x_zero_point, **form)
    weighted = op.Mul(dy, op.cast(steps, dy.dtype))
    dscale = sum_to_scale(op, weighted, x_scale, axis, block_size, form)
    dx = None
    if wanted[0]:
        dx = op.Mul(dy, op.cast(broadcast_scale(op, x_scale, x, x.dtype, form), dy.dtype))
    return dx, op.cast(dscale, x_scale.dtype)


def scale_layout(op, x, scale, axis: int, block_size: int) -> dict[str, int]:
    """Return the attributes that match the shape of a scale."""
    rank = op.rank(scale)
    axis = axis % op.rank(x) if op.rank(x) else 0
    form = {"axis": axis} if rank == 1 else {"axis": axis, "block_size": block_size}
    return {} if rank == 0 or op.dims(scale) == (1,) else form


def broadcast_scale(op, scale, like, dtype: ir.DataType, form: dict[str, int]):
    """Return a scale for every element of ``like``; ``dtype`` is that of the integers."""
    dtype = _byte_type(dtype)
    one = ir.tensor(np.ones(1, np.float32)).numpy().astype(dtype.numpy())
    ones = op.ConstantOfShape(op.shape_of(like), value=ir.Tensor(one, dtype=dtype))
    return op.DequantizeLinear(ones, scale, **form)


def _byte_type(dtype: ir.DataType) -> ir.DataType:
    """Return the 8-bit type of a 4-bit type, which ConstantOfShape has no kernel for."""
    if dtype.bitwidth >= 8 or not dtype.is_integer():
        return dtype
    return ir.DataType.INT8 if dtype.is_signed() else ir.DataType.UINT8


def sum_to_scale(op, weighted, scale, axis: int, block_size: int, form: dict[str, int]):
    """Return the sum over the elements of each scale."""
    if not form:
        return op.reshape_like(op.ReduceSum(weighted, keepdims=0), scale)
    axis = axis % op.rank(weighted)
    if op.rank(scale) == 1 and not block_size:
        others = [a for a in range(op.rank(weighted)) if a != axis]
        total = op.ReduceSum(weighted, others, keepdims=0) if others else weighted
        return op.sum_to(total, scale)  # a scale of dynamic size may have one element
    return _sum_blocks(op, weighted, scale, axis, block_size)


def _sum_blocks(op, x, scale, axis: int, block: int):
    """Sum along ``axis`` over blocks; the last one may be shorter."""
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


_BITS = (2, 4, 8)  # bit widths that kernels support
_BIAS = 5  # input index of the bias of MatMulNBits


def _keeps_matmul(node: ir.Node) -> bool:
    """Return whether weights and zero points are constants in the supported format."""
    attributes = S.attributes_of(node, 1)
    inputs = [*node.inputs, None, None, None, None]
    points, groups = inputs[3], inputs[4]
    return (
        S.constant_of(inputs[1]) is not None
        and groups is None
        and (points is None or (S.constant_of(points) is not None and _bytes(points)))
        and attributes.get("bits", 4) in _BITS
        and attributes.get("block_size", 0) >= MIN_BLOCK_SIZE
        and attributes["block_size"].bit_count() == 1
    )


def _bytes(x: ir.Value) -> bool:
    return x.dtype == ir.DataType.UINT8


def _keeps_table(node: ir.Node) -> bool:
    data = node.inputs[0]
    attributes = S.attributes_of(node, 1)
    return (
        data is not None
        and _bytes(data)
        and attributes.get("gather_axis", 0) == 0
        and len(S.dims_of(data) or ()) == 2
    )


KEEP_UNEXPANDED["com.microsoft::MatMulNBits"] = _keeps_matmul
KEEP_UNEXPANDED["com.microsoft::GatherBlockQuantized"] = _keeps_table


@vjp(
    "com.microsoft::MatMulNBits",
    constant_inputs={1: "the weights are integers", 3: "the zero points are integers"},
)
def matmul_n_bits(
    op, dy, a, b, scales, points=None, groups=None, bias=None, *, K, N, block_size, bits=4, wanted
):
    """``y = a W^T + bias``, hence ``da = dy W`` and ``dscale = sum of a block(dy^T a (q - z))``."""
    form = _BlockLayout(K, N, block_size, bits)
    da = None
    if wanted[0]:
        parts = PackedMatMul(N, K, block_size, bits, scales.dtype)
        product = select_variant(op, parts, INPUT_GRAD_VARIANTS, INPUT_GRAD_CHOICES)
        da = product(op, dy, b, scales, points, parts)
    dscales = None
    if wanted[2]:
        ones = op.ones_like(scales)
        steps = _unpacked(op, b, ones, points, form, dy, whole=True)
        rows = op.Reshape(a, [-1, K]) if op.rank(a) != 2 else a
        dw = op.MatMul(op.mT(op.Reshape(dy, [-1, N]) if op.rank(dy) != 2 else dy), rows)
        missing = form.blocks * block_size - K
        if missing:
            dw = op.Pad(dw, [0, 0, 0, missing])
        each = op.Reshape(op.Mul(dw, steps), [N, form.blocks, block_size])
        dscales = op.reshape_like(op.ReduceSum(each, [2], keepdims=0), scales)
    dbias = None
    if len(wanted) > _BIAS and wanted[_BIAS]:
        dbias = op.sum_to(dy, bias)
    return da, None, dscales, None, None, dbias


def _by_rows(op, dy, b, scales, points, form: PackedMatMul):
    whole = _BlockLayout(form.width, form.rows, form.block, form.bits)
    return op.MatMul(dy, _unpacked(op, b, scales, points, whole, dy))


def _by_parts(op, dy, b, scales, points, form: PackedMatMul):
    weights = form.weights(op, b, scales, points, wait=dy)
    return form.ungroup_columns(op, form.matmul_transposed_weight(op, dy, weights))


INPUT_GRAD_VARIANTS: Variants[PackedMatMul] = {
    "rows": Variant(_by_rows),
    "parts": Variant(_by_parts, PackedMatMul.fits),
}
INPUT_GRAD_CHOICES: Choices[PackedMatMul] = [
    Choice("parts", prefers="unpack-nbits-weights"),
    Choice("rows"),
]


class _BlockLayout:
    def __init__(self, k: int, n: int, block: int, bits: int) -> None:
        self.k, self.n, self.block, self.bits = k, n, block, bits
        self.blocks = -(-k // block)


def _unpacked(
    op: OpBuilder,
    b: ir.Value,
    scales: ir.Value,
    points: ir.Value | None,
    form: _BlockLayout,
    dy: ir.Value,
    *,
    whole: bool = False,
) -> ir.Value:
    """Return the dequantized weights, [N, K]; ``whole`` includes the padding of the last block."""
    n, blocks = form.n, form.blocks
    # The operator checks the sizes of scales and zero points.
    sizes = [n, blocks, 1]
    view = op.Reshape(scales, sizes if points is not None else _unfolded(op, sizes))
    inputs = [b, _rows_after(op, n, dy), view]
    if points is not None:
        inputs.append(op.const(unpack_zero_points(points, n, blocks, form.bits)[..., None]))
    wide = op.emit_contrib(
        "GatherBlockQuantized",
        inputs,
        scales.dtype,
        [n, blocks, form.block],
        bits=form.bits,
        block_size=form.block,
        gather_axis=0,
        quantize_axis=2,
    )
    weight = op.Reshape(wide, [n, blocks * form.block])
    if not whole and blocks * form.block != form.k:
        weight = op.Slice(weight, [0], [form.k], [1])
    return weight


def _unfolded(op: OpBuilder, sizes: list[int]) -> list[int] | ir.Value:
    """Return the shape of a view of a constant that the runtime cannot fold and store twice.

    The shape adds a zero that depends on the size of an input, so the view is not constant.
    """
    asked = (x for x in op.graph.inputs if op.dims(x) and op.static(x) is None)
    x = next((x for x in asked if isinstance(op.dims(x)[0], str)), None)
    return sizes if x is None else op.Add(op.const(sizes), runtime_zero(op, x))


def _rows_after(op: OpBuilder, n: int, dy: ir.Value) -> ir.Value:
    """Return all row indices, plus a zero that depends on ``dy``."""
    return op.Add(op.iota(n), runtime_zero(op, dy))


@vjp(
    "com.microsoft::GatherBlockQuantized",
    constant_inputs={0: "the table is integers", 3: "the zero points are integers"},
)
def gather_block_quantized(
    op, dy, data, indices, scales, points=None, *, bits=4, block_size=128, quantize_axis=1, wanted
):
    """``y = (q - z) * scale`` of some rows, hence ``dscale = sum of a block(dy (q - z))``."""
    if not wanted[2]:
        return None, None, None
    inputs = [data, indices, op.ones_like(scales), *([] if points is None else [points])]
    dims = op.dims(dy)
    steps = op.emit_contrib(
        "GatherBlockQuantized",
        inputs,
        scales.dtype,
        dims,
        bits=bits,
        block_size=block_size,
        gather_axis=0,
        quantize_axis=quantize_axis,
    )
    each = op.Reshape(op.Mul(dy, steps), [*[0] * (len(dims) - 1), -1, block_size])
    sums = op.ReduceSum(each, [-1], keepdims=0)
    rows = op.Unsqueeze(op.cast(indices, ir.DataType.INT64), [-1])
    return None, None, op.ScatterND(op.zeros_like(scales), rows, sums, reduction="add")


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
    form = scale_layout(op, x, scale, axis, block_size)
    wide = op.cast(broadcast_scale(op, scale, x, kind, form), x.dtype)
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
    dtype = _byte_type(zero_point.dtype)
    zero_point = op.cast(zero_point, dtype)
    zero = ir.Tensor(ir.tensor([0]).numpy().astype(dtype.numpy()), dtype=dtype)
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


STRAIGHT_THROUGH_RULES["QuantizeLinear"] = Rule(
    "QuantizeLinear", quantize_linear, constant_inputs={2: "the zero point is an integer"}
)
STRAIGHT_THROUGH_RULES["DynamicQuantizeLinear"] = Rule(
    "DynamicQuantizeLinear", dynamic_quantize_linear, multi=True
)
