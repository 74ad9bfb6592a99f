"""Quantized weights and integer arithmetic.

First the operators of ``com.microsoft`` with weights of 2, 4 or 8 bits in blocks. The weights stay
packed in the standard's narrow types; what is multiplied is the result of a DequantizeLinear. Each
block is one row of that operator, since a scale per row dequantizes faster than a scale per block.

Then integer arithmetic as float arithmetic between quantizers, to train straight through it:
``QLinearX(q, s, z) = quantize(X(dequantize(q)))``. Integer kernels round at another point in some
cases, so results may differ by one step.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.expand.expansions import STRAIGHT_THROUGH, TRAINING, expansion, raise_unsupported
from onnxtrain.expand.norms import rms_norm
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_op
from onnxtrain.graph.shapes import FLOATS


@dataclasses.dataclass(frozen=True)
class PackedFormat:
    """Packing of n-bit integers into bytes, lowest bits first; ``block`` integers share a scale."""

    bits: int
    block: int | None
    """``None``: a whole row."""

    @property
    def middle(self) -> int:
        """The zero point where none is given."""
        return 1 << (self.bits - 1)

    def unpack(self, array: np.ndarray) -> np.ndarray:
        """Return the integers of the last axis, one per element."""
        if self.bits == 8:
            return array
        shifts = np.arange(0, 8, self.bits, dtype=np.uint8)
        numbers = (array[..., None] >> shifts) & np.uint8((1 << self.bits) - 1)
        return numbers.reshape(*array.shape[:-1], -1)

    @property
    def dtype(self) -> ir.DataType:
        """The ONNX type that holds the integers."""
        return ir.DataType.UINT8 if self.bits == 8 else ir.DataType.UINT4


def constant_bytes(op: OpBuilder, x: ir.Value | None) -> np.ndarray | None:
    """Return the array of a constant or of a Reshape of a constant."""
    maker = None if x is None else x.producer()
    if maker is None or not is_op(maker, "Reshape"):
        return op.constant(x)
    array, shape = op.constant(maker.inputs[0]), op.constant(maker.inputs[1])
    return None if array is None or shape is None else array.reshape(shape.tolist())


def dequantize_packed(
    op: OpBuilder,
    weights: ir.Value,
    scales: ir.Value,
    points: ir.Value | None,
    packed: PackedFormat,
    node: ir.Node,
    *,
    rows: int | None = None,
    width: int | None = None,
) -> ir.Value:
    """Return ``(numbers - zero point) * scale`` as [..., rows, width]; the numbers are constant.

    Args:
        op: the builder.
        weights: packed integers, [..., rows, bytes].
        scales: one per block, [..., rows] or [..., rows, blocks].
        points: zero points, packed along blocks like the weights, or floats.
        packed: the packing.
        node: the node, for error messages.
        rows: number of rows; by default from the shape of ``weights``.
        width: number of integers to keep of each row; all by default.
    """
    raw = constant_bytes(op, weights)
    if raw is None or packed.bits not in (2, 4, 8):
        raise_unsupported(node, "only constant weights of 2, 4 or 8 bits are supported")
    numbers = packed.unpack(raw if rows is None else raw.reshape(rows, -1))
    lead, size = list(numbers.shape[:-1]), numbers.shape[-1]
    block = packed.block or size
    blocks = -(-size // block)
    if blocks * block != size:
        raise_unsupported(node, "the width must be a multiple of the block size")
    count = int(np.prod(lead)) * blocks
    table = op.const(numbers.reshape(count, block).astype(packed.dtype.numpy()), packed.dtype)
    scale = op.Reshape(scales, [count])
    zeros, offset = _points(op, points, packed, lead, blocks, count, node)
    wide = op.DequantizeLinear(table, scale, zeros, axis=0)
    if offset is not None:
        wide = op.Sub(wide, op.Mul(op.Unsqueeze(scale, [1]), offset))
    y = op.Reshape(wide, [*lead, size])
    if width is not None and width != size:
        y = op.Slice(y, [0], [width], [len(lead)])
    return y


def _points(
    op: OpBuilder,
    points: ir.Value | None,
    packed: PackedFormat,
    lead: list[int],
    blocks: int,
    rows: int,
    node: ir.Node,
) -> tuple[ir.Value | None, ir.Value | None]:
    """Return zero points as integers, or as floats [rows, 1] to subtract after dequantization."""
    if points is None:
        middle = np.full(rows, packed.middle, np.uint8).astype(packed.dtype.numpy())
        return op.const(middle, packed.dtype), None
    if points.dtype != ir.DataType.UINT8:
        return None, op.Reshape(points, [rows, 1])
    raw = op.constant(points)
    if raw is None:
        raise_unsupported(node, "zero points must be constant")
    # Without blocks, the zero points of all rows are contiguous; else each row is padded to bytes.
    lines = int(np.prod(lead)) if packed.block else lead[0]
    each = rows // lines
    whole = packed.unpack(raw.reshape(lines, -1))[:, :each].reshape(-1)
    return op.const(whole.astype(packed.dtype.numpy()), packed.dtype), None


# The code tables of bitsandbytes: FP4 (sign and fraction) and NF4 (normal quantiles).
_FP4 = [0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25]
_NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
BNB4 = {0: [*_FP4, *(-v for v in _FP4)], 1: _NF4}
"""The value of each 4-bit code, by ``quant_type``."""


@expansion("com.microsoft::MatMulNBits", when=TRAINING)
def matmul_n_bits(
    op,
    a,
    b,
    scales,
    zero_points=None,
    g_idx=None,
    bias=None,
    *,
    K,
    N,
    accuracy_level=0,
    bits=4,
    block_size,
    node,
):
    """``A @ dequantize(B)^T``; the weights stay packed, in the ONNX layout."""
    packed = PackedFormat(bits, block_size)
    if g_idx is None:
        weight = dequantize_packed(op, b, scales, zero_points, packed, node, rows=N, width=K)
    else:
        weight = _dequantize_by_group_index(op, b, scales, zero_points, g_idx, packed, N, K, node)
    y = op.MatMul(a, op.Transpose(weight, perm=[1, 0]))
    return y if bias is None else op.Add(y, bias)


def _dequantize_by_group_index(
    op: OpBuilder,
    b: ir.Value,
    scales: ir.Value,
    points: Any,
    g_idx: ir.Value,
    packed: PackedFormat,
    n: int,
    k: int,
    node: ir.Node,
) -> ir.Value:
    """Return the weights where ``g_idx`` selects the scale of each column."""
    raw = op.constant(b)
    if raw is None:
        raise_unsupported(node, "only constant weights are supported")
    numbers = packed.unpack(raw.reshape(n, -1))[:, :k]
    table = op.const(numbers.astype(packed.dtype.numpy()), packed.dtype)
    blocks = -(-k // (packed.block or k))
    scale = op.Gather(op.Reshape(scales, [n, blocks]), g_idx, axis=1)
    wide = op.Cast(table, to=scales.dtype)
    if points is None:
        middle: Any = float(packed.middle)
    elif points.dtype != ir.DataType.UINT8:
        middle = op.Gather(op.Reshape(points, [n, blocks]), g_idx, axis=1)
    else:
        raise_unsupported(
            node,
            "groups of columns together with packed zero points, in whose place onnxruntime's "
            "kernel for CPUs takes the middle of the range\nhint: give the zero points as floats",
        )
    return op.Mul(op.Sub(wide, middle), scale)


@expansion("com.microsoft::MatMulNBitsMlp", when=TRAINING)
def matmul_n_bits_mlp(
    op,
    a,
    skip=None,
    norm=None,
    gate_b: Any = None,
    gate_scales: Any = None,
    gate_bias=None,
    up_b: Any = None,
    up_scales: Any = None,
    up_bias=None,
    *,
    K,
    N,
    activation,
    bits=4,
    block_size,
    accuracy_level=0,
    epsilon=1e-5,
    node,
):
    """``act(gate(x)) * up(x)`` of the normalized ``x``; the second output is ``a + skip``."""
    total = a if skip is None else op.Add(a, skip)
    x = total if norm is None else rms_norm(op, total, norm, epsilon)
    form = {"K": K, "N": N, "bits": bits, "block_size": block_size, "node": node}
    gate = matmul_n_bits(op, x, gate_b, gate_scales, bias=gate_bias, **form)
    up = matmul_n_bits(op, x, up_b, up_scales, bias=up_bias, **form)
    if activation not in ("silu", "swish"):
        raise_unsupported(node, f"unknown activation {activation!r}")
    return op.Mul(op.Mul(gate, op.Sigmoid(gate)), up), total


@expansion("com.microsoft::MatMulNBitsQkv", when=TRAINING)
def matmul_n_bits_qkv(
    op,
    a,
    skip=None,
    norm=None,
    q_b: Any = None,
    q_scales: Any = None,
    q_bias=None,
    k_b: Any = None,
    k_scales: Any = None,
    k_bias=None,
    v_b: Any = None,
    v_scales: Any = None,
    v_bias=None,
    *,
    K,
    Nq,
    Nkv,
    bits=4,
    block_size,
    accuracy_level=0,
    epsilon=1e-6,
    node,
):
    """Queries, keys and values of the normalized input; the fourth output is ``a + skip``."""
    total = a if skip is None else op.Add(a, skip)
    x = total if norm is None else rms_norm(op, total, norm, epsilon)
    form = {"K": K, "bits": bits, "block_size": block_size, "node": node}
    q = matmul_n_bits(op, x, q_b, q_scales, bias=q_bias, N=Nq, **form)
    k = matmul_n_bits(op, x, k_b, k_scales, bias=k_bias, N=Nkv, **form)
    v = matmul_n_bits(op, x, v_b, v_scales, bias=v_bias, N=Nkv, **form)
    return q, k, v, total


@expansion("com.microsoft::MatMulBnb4", when=TRAINING)
def matmul_bnb4(op, a, b, absmax, *, K, N, block_size, quant_type, transB=1, training_mode=0, node):
    """``A @ W^T`` with 4-bit weights of bitsandbytes: table values times the absmax of a block."""
    raw = op.constant(b)
    if raw is None:
        raise_unsupported(node, "only constant weights are supported")
    flat = raw.reshape(-1)
    numbers = np.stack([flat >> 4, flat & 15], axis=-1).reshape(-1)[: N * K]  # high bits first
    table = BNB4[int(bool(quant_type))]
    blocks = -(-N * K // block_size)
    padded = np.concatenate([numbers, np.zeros(blocks * block_size - N * K, numbers.dtype)])
    codes = op.const(padded.reshape(blocks, block_size).astype(np.uint8), ir.DataType.UINT8)
    values = op.Gather(op.const(table, absmax.dtype), op.Cast(codes, to=ir.DataType.INT32), axis=0)
    wide = op.Mul(values, op.Unsqueeze(op.Reshape(absmax, [-1]), [1]))
    line = op.Reshape(wide, [-1])
    weight = op.Reshape(op.Slice(line, [0], [N * K], [0]), [N, K])
    return op.MatMul(a, op.Transpose(weight, perm=[1, 0]) if transB else weight)


@expansion("com.microsoft::GatherBlockQuantized", when=TRAINING)
def gather_block_quantized(
    op,
    data,
    indices,
    scales,
    zero_points=None,
    *,
    bits=4,
    block_size=128,
    gather_axis=0,
    quantize_axis=1,
    node,
):
    """Gather rows of a quantized table, then dequantize them."""
    raw = constant_bytes(op, data)
    rank = op.rank(data)
    if raw is None or gather_axis % rank != 0 or quantize_axis % rank != rank - 1:
        raise_unsupported(
            node,
            "only constant tables, gathered on axis 0 and quantized on the last axis",
        )
    narrow = data.dtype in (ir.DataType.UINT4, ir.DataType.INT4)
    packed = PackedFormat(8 if narrow else bits, block_size)
    numbers = raw if narrow else packed.unpack(raw)
    middle = 0 if narrow else packed.middle
    points: Any = None
    if zero_points is not None:
        points = op.constant(zero_points)
        if points is None:
            raise_unsupported(node, "zero points must be constant")
        points = points if narrow else packed.unpack(points)
    return _rows(op, numbers, indices, scales, points, middle, block_size)


def _rows(
    op: OpBuilder,
    numbers: np.ndarray,
    indices: ir.Value,
    scales: ir.Value,
    points: Any,
    middle: int,
    block: int,
) -> ir.Value:
    kind = np.int8 if numbers.dtype.kind == "i" or numbers.min(initial=0) < 0 else np.uint8
    table = numbers.astype(kind)
    blocks = -(-table.shape[-1] // block)
    missing = blocks * block - table.shape[-1]
    table = np.pad(table, [(0, 0)] * (table.ndim - 1) + [(0, missing)])
    table = table.reshape(*table.shape[:-1], blocks, block)
    rows = op.Cast(op.Gather(op.const(table), indices, axis=0), to=scales.dtype)
    zero: Any = float(middle)
    if points is not None:
        whole = points[..., :blocks].astype(np.float32)
        picked = op.Gather(op.const(whole, scales.dtype), indices, axis=0)
        zero = op.Unsqueeze(picked, [-1])
    scale = op.Unsqueeze(op.Gather(scales, indices, axis=0), [-1])
    wide = op.Mul(op.Sub(rows, zero), scale)
    y = op.Reshape(wide, [*[0] * (op.rank(wide) - 2), -1])
    return y if not missing else op.Slice(y, [0], [-missing], [-1])


OptionalValue = ir.Value | None


@expansion("QLinearMatMul", when=STRAIGHT_THROUGH)
def qlinear_matmul(op, a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero):
    """Quantized MatMul of dequantized matrices; one scale per row of ``a`` and column of ``b``."""
    left = _dequantize(op, a, a_scale, a_zero, axis=op.rank(a) - 2)
    right = _dequantize(op, b, b_scale, b_zero, axis=op.rank(b) - 1)
    return op.QuantizeLinear(op.MatMul(left, right), y_scale, y_zero)


@expansion("QLinearConv", when=STRAIGHT_THROUGH)
def qlinear_conv(
    op,
    x,
    x_scale,
    x_zero,
    w,
    w_scale,
    w_zero,
    y_scale,
    y_zero,
    b=None,
    *,
    auto_pad=None,
    dilations=None,
    group=1,
    kernel_shape=None,
    pads=None,
    strides=None,
):
    """Quantized Conv of dequantized images; one scale per filter."""
    weight = _dequantize(op, w, w_scale, w_zero, axis=0)
    bias = None
    if b is not None:
        bias = op.Mul(op.Cast(b, to=x_scale.dtype), op.Mul(x_scale, w_scale))
    y = op.Conv(
        _dequantize(op, x, x_scale, x_zero),
        weight,
        bias,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    return op.QuantizeLinear(y, y_scale, y_zero)


@expansion("MatMulInteger", when=STRAIGHT_THROUGH)
def matmul_integer(op, a, b, a_zero=None, b_zero=None, *, node):
    """MatMul in float, if every consumer casts the result to float."""
    if not _only_read_as_float(node):
        return None
    return op.MatMul(
        _subtract_zero_point(op, a, a_zero),
        _subtract_zero_point(op, b, b_zero, axis=op.rank(b) - 1),
    )


@expansion("ConvInteger", when=STRAIGHT_THROUGH)
def conv_integer(
    op,
    x,
    w,
    x_zero=None,
    w_zero=None,
    *,
    auto_pad=None,
    dilations=None,
    group=1,
    kernel_shape=None,
    pads=None,
    strides=None,
    node,
):
    """Conv in float, if every consumer casts the result to float."""
    if not _only_read_as_float(node):
        return None
    return op.Conv(
        _subtract_zero_point(op, x, x_zero),
        _subtract_zero_point(op, w, w_zero, axis=0),
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )


@expansion("com.microsoft::QuantizeLinear", when=TRAINING)
def quantize_linear(op, x, scale, zero_point=None, *, axis=None):
    """The standard operator of the same name."""
    return op.QuantizeLinear(x, scale, zero_point, axis=axis)


@expansion("com.microsoft::DequantizeLinear", when=TRAINING)
def dequantize_linear(op, x, scale, zero_point=None, *, axis=None):
    """The standard operator of the same name."""
    return op.DequantizeLinear(x, scale, zero_point, axis=axis)


@expansion("com.microsoft::QLinearAdd", when=STRAIGHT_THROUGH)
def qlinear_add(op, a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero=None):
    """Quantized Add."""
    total = op.Add(_dequantize(op, a, a_scale, a_zero), _dequantize(op, b, b_scale, b_zero))
    return _quantize_like(op, total, y_scale, y_zero, a)


@expansion("com.microsoft::QLinearMul", when=STRAIGHT_THROUGH)
def qlinear_mul(op, a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero=None):
    """Quantized Mul."""
    product = op.Mul(_dequantize(op, a, a_scale, a_zero), _dequantize(op, b, b_scale, b_zero))
    return _quantize_like(op, product, y_scale, y_zero, a)


@expansion("com.microsoft::QLinearSigmoid", when=STRAIGHT_THROUGH)
def qlinear_sigmoid(op, x, x_scale, x_zero, y_scale, y_zero=None):
    """Quantized Sigmoid."""
    return _quantize_like(op, op.Sigmoid(_dequantize(op, x, x_scale, x_zero)), y_scale, y_zero, x)


@expansion("com.microsoft::QLinearLeakyRelu", when=STRAIGHT_THROUGH)
def qlinear_leaky_relu(op, x, x_scale, x_zero, y_scale, y_zero=None, *, alpha=0.01):
    """Quantized LeakyRelu."""
    y = op.LeakyRelu(_dequantize(op, x, x_scale, x_zero), alpha=alpha)
    return _quantize_like(op, y, y_scale, y_zero, x)


@expansion("com.microsoft::QLinearSoftmax", when=STRAIGHT_THROUGH)
def qlinear_softmax(op, x, x_scale, x_zero, y_scale, y_zero, *, axis=-1, opset=13):
    """Quantized Softmax along one axis; before opset 13 over all axes from it on."""
    wide = _dequantize(op, x, x_scale, x_zero)
    rank = op.rank(x)
    if opset >= 13 or axis % rank == rank - 1:
        return op.QuantizeLinear(op.Softmax(wide, axis=axis), y_scale, y_zero)
    rows = op.Reshape(wide, [*[0] * (axis % rank), -1])
    y = op.reshape_like(op.Softmax(rows, axis=-1), wide)
    return op.QuantizeLinear(y, y_scale, y_zero)


@expansion("com.microsoft::QLinearGlobalAveragePool", when=STRAIGHT_THROUGH)
def qlinear_global_average_pool(op, x, x_scale, x_zero, y_scale, y_zero, *, channels_last=0):
    """Quantized GlobalAveragePool."""
    first = 1 if channels_last else 2
    axes = list(range(first, op.rank(x) - (1 if channels_last else 0)))
    y = op.ReduceMean(_dequantize(op, x, x_scale, x_zero), axes, keepdims=1)
    return op.QuantizeLinear(y, y_scale, y_zero)


@expansion("com.microsoft::QLinearAveragePool", when=STRAIGHT_THROUGH)
def qlinear_average_pool(
    op,
    x,
    x_scale,
    x_zero,
    y_scale,
    y_zero=None,
    *,
    kernel_shape,
    auto_pad=None,
    ceil_mode=0,
    channels_last=0,
    count_include_pad=0,
    pads=None,
    strides=None,
):
    """Quantized AveragePool."""
    wide = _dequantize(op, x, x_scale, x_zero)
    y = op.AveragePool(
        op.move_axis(wide, -1, 1) if channels_last else wide,
        kernel_shape=kernel_shape,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        count_include_pad=count_include_pad,
        pads=pads,
        strides=strides,
    )
    return _quantize_like(op, op.move_axis(y, 1, -1) if channels_last else y, y_scale, y_zero, x)


@expansion("com.microsoft::QLinearConcat", when=STRAIGHT_THROUGH)
def qlinear_concat(op, y_scale, y_zero, *triples, axis):
    """Quantized Concat of tensors with different scales."""
    parts = [_dequantize(op, *triples[i : i + 3]) for i in range(0, len(triples), 3)]
    return op.QuantizeLinear(op.Concat(*parts, axis=axis), y_scale, y_zero)


@expansion("com.microsoft::QLinearWhere", when=STRAIGHT_THROUGH)
def qlinear_where(op, condition, x, x_scale, x_zero, y, y_scale, y_zero, z_scale, z_zero):
    """Quantized Where."""
    chosen = op.Where(
        condition, _dequantize(op, x, x_scale, x_zero), _dequantize(op, y, y_scale, y_zero)
    )
    return op.QuantizeLinear(chosen, z_scale, z_zero)


@expansion("com.microsoft::QLinearConv", when=STRAIGHT_THROUGH)
def contrib_qlinear_conv(
    op,
    x,
    x_scale,
    x_zero,
    w,
    w_scale,
    w_zero,
    y_scale,
    y_zero,
    b=None,
    *,
    channels_last=0,
    auto_pad=None,
    dilations=None,
    group=1,
    kernel_shape=None,
    pads=None,
    strides=None,
):
    """The standard operator of the same name, optionally channels-last."""
    y = qlinear_conv(
        op,
        op.move_axis(x, -1, 1) if channels_last else x,
        x_scale,
        x_zero,
        w,
        w_scale,
        w_zero,
        y_scale,
        y_zero,
        b,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    return op.move_axis(y, 1, -1) if channels_last else y


@expansion("com.microsoft::QGemm", when=STRAIGHT_THROUGH)
def qgemm(
    op,
    a,
    a_scale,
    a_zero,
    b,
    b_scale,
    b_zero,
    c: Any = None,
    y_scale=None,
    y_zero=None,
    *,
    alpha=1.0,
    transA=0,
    transB=0,
):
    """Quantized Gemm; without ``y_scale`` the result is float."""
    right = _dequantize(op, b, b_scale, b_zero, axis=0 if transB else 1)
    y = op.Gemm(
        _dequantize(op, a, a_scale, a_zero), right, alpha=alpha, transA=transA, transB=transB
    )
    if c is not None:  # int32, in units of a_scale * b_scale
        unit = op.Mul(op.Mul(a_scale, b_scale), op.const(alpha, a_scale.dtype))
        y = op.Add(y, op.Mul(op.Cast(c, to=a_scale.dtype), unit))
    return y if y_scale is None else op.QuantizeLinear(y, y_scale, y_zero)


@expansion("com.microsoft::MatMulIntegerToFloat", when=STRAIGHT_THROUGH)
def matmul_integer_to_float(op, a, b, a_scale, b_scale, a_zero=None, b_zero=None, bias=None):
    """MatMul of dequantized matrices."""
    right = _dequantize(op, b, b_scale, b_zero, axis=op.rank(b) - 1)
    y = op.MatMul(_dequantize(op, a, a_scale, a_zero), right)
    return y if bias is None else op.Add(y, bias)


@expansion("com.microsoft::DynamicQuantizeMatMul", when=STRAIGHT_THROUGH)
def dynamic_quantize_matmul(op, a, b, b_scale, b_zero=None, bias=None):
    """MatMul of a dynamically quantized matrix with a quantized one."""
    q, scale, zero = op.DynamicQuantizeLinear(a, _outputs=3)
    y = op.MatMul(
        _dequantize(op, q, scale, zero), _dequantize(op, b, b_scale, b_zero, axis=op.rank(b) - 1)
    )
    return y if bias is None else op.Add(y, bias)


def _dequantize(
    op: OpBuilder, x: ir.Value, scale: ir.Value, zero: OptionalValue = None, axis: int | None = None
) -> ir.Value:
    """Dequantize a tensor, with one scale or one per index of an axis."""
    single = op.rank(scale) == 0 or op.dims(scale) == (1,)
    return op.DequantizeLinear(x, scale, zero, axis=None if single else axis)


def _subtract_zero_point(
    op: OpBuilder, x: ir.Value, zero: OptionalValue, axis: int | None = None
) -> ir.Value:
    """Return ``x - zero`` in float."""
    if zero is None or op.rank(zero) == 0 or op.dims(zero) == (1,):
        scale = op.const(1.0) if zero is None or op.rank(zero) == 0 else op.const([1.0])
        return op.DequantizeLinear(x, scale, zero)
    ones = op.full(op.shape_of(zero), 1.0, ir.DataType.FLOAT)
    ones.shape = zero.shape
    return op.DequantizeLinear(x, ones, zero, axis=axis)


def _quantize_like(
    op: OpBuilder, y: ir.Value, scale: ir.Value, zero: OptionalValue, like: ir.Value
) -> ir.Value:
    """Quantize to the type of another tensor."""
    if zero is None:
        zero = op.const(0, like.dtype)
    return op.QuantizeLinear(y, scale, zero)


def _only_read_as_float(node: ir.Node) -> bool:
    y = node.outputs[0]
    readers = [r for r, _ in y.uses()]
    return (
        bool(readers)
        and not y.is_graph_output()
        and all(is_op(r, "Cast") and _cast_dtype(r) in FLOATS for r in readers)
    )


def _cast_dtype(cast: ir.Node) -> ir.DataType:
    return ir.DataType(cast.attributes["to"].as_int())
