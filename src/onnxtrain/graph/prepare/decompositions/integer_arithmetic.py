"""Integer arithmetic as floats between quantisers, for training straight through it.

``QLinearX(q, s, z)`` means quantise(X(dequantise(q))). Kernels for integers round in another place
at times, so that results may differ by one step.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_op
from onnxtrain.graph.prepare.decompose import decomposition, integer_decomposition
from onnxtrain.graph.shapes import FLOATS

Maybe = ir.Value | None


@integer_decomposition("QLinearMatMul")
def qlinear_matmul(op, a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero):
    """Quantised product of dequantised matrices; a scale per column of ``b``, per row of ``a``."""
    left = _float(op, a, a_scale, a_zero, axis=op.rank(a) - 2)
    right = _float(op, b, b_scale, b_zero, axis=op.rank(b) - 1)
    return op.QuantizeLinear(op.MatMul(left, right), y_scale, y_zero)


@integer_decomposition("QLinearConv")
def qlinear_conv(
    op, x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, b=None, *, auto_pad=None,
    dilations=None, group=1, kernel_shape=None, pads=None, strides=None,
):  # fmt: skip
    """Quantised convolution of dequantised images; a scale per filter."""
    weight = _float(op, w, w_scale, w_zero, axis=0)
    bias = None
    if b is not None:
        bias = op.Mul(op.Cast(b, to=x_scale.dtype), op.Mul(x_scale, w_scale))
    y = op.Conv(
        _float(op, x, x_scale, x_zero), weight, bias, auto_pad=auto_pad, dilations=dilations,
        group=group, kernel_shape=kernel_shape, pads=pads, strides=strides,
    )  # fmt: skip
    return op.QuantizeLinear(y, y_scale, y_zero)


@integer_decomposition("MatMulInteger")
def matmul_integer(op, a, b, a_zero=None, b_zero=None, *, node):
    """The product as floats, if all that reads it makes it floats anyway."""
    if not _becomes_float(node):
        return None
    return op.MatMul(_steps(op, a, a_zero), _steps(op, b, b_zero, axis=op.rank(b) - 1))


@integer_decomposition("ConvInteger")
def conv_integer(
    op, x, w, x_zero=None, w_zero=None, *, auto_pad=None, dilations=None, group=1,
    kernel_shape=None, pads=None, strides=None, node,
):  # fmt: skip
    """The convolution as floats, if all that reads it makes it floats anyway."""
    if not _becomes_float(node):
        return None
    return op.Conv(
        _steps(op, x, x_zero), _steps(op, w, w_zero, axis=0), auto_pad=auto_pad,
        dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads, strides=strides,
    )  # fmt: skip


@decomposition("com.microsoft::QuantizeLinear")
def quantize_linear(op, x, scale, zero_point=None, *, axis=None):
    """The standard operator of the same name."""
    return op.QuantizeLinear(x, scale, zero_point, axis=axis)


@decomposition("com.microsoft::DequantizeLinear")
def dequantize_linear(op, x, scale, zero_point=None, *, axis=None):
    """The standard operator of the same name."""
    return op.DequantizeLinear(x, scale, zero_point, axis=axis)


@integer_decomposition("com.microsoft::QLinearAdd")
def qlinear_add(op, a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero=None):
    """Quantised sum."""
    total = op.Add(_float(op, a, a_scale, a_zero), _float(op, b, b_scale, b_zero))
    return _back(op, total, y_scale, y_zero, a)


@integer_decomposition("com.microsoft::QLinearMul")
def qlinear_mul(op, a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero=None):
    """Quantised product, element by element."""
    product = op.Mul(_float(op, a, a_scale, a_zero), _float(op, b, b_scale, b_zero))
    return _back(op, product, y_scale, y_zero, a)


@integer_decomposition("com.microsoft::QLinearSigmoid")
def qlinear_sigmoid(op, x, x_scale, x_zero, y_scale, y_zero=None):
    """Quantised sigmoid."""
    return _back(op, op.Sigmoid(_float(op, x, x_scale, x_zero)), y_scale, y_zero, x)


@integer_decomposition("com.microsoft::QLinearLeakyRelu")
def qlinear_leaky_relu(op, x, x_scale, x_zero, y_scale, y_zero=None, *, alpha=0.01):
    """Quantised LeakyRelu."""
    y = op.LeakyRelu(_float(op, x, x_scale, x_zero), alpha=alpha)
    return _back(op, y, y_scale, y_zero, x)


@integer_decomposition("com.microsoft::QLinearSoftmax")
def qlinear_softmax(op, x, x_scale, x_zero, y_scale, y_zero, *, axis=-1, opset=13):
    """Quantised softmax along one axis; of older opsets over all axes from it on."""
    wide = _float(op, x, x_scale, x_zero)
    rank = op.rank(x)
    if opset >= 13 or axis % rank == rank - 1:
        return op.QuantizeLinear(op.Softmax(wide, axis=axis), y_scale, y_zero)
    rows = op.Reshape(wide, [*[0] * (axis % rank), -1])
    y = op.reshape_like(op.Softmax(rows, axis=-1), wide)
    return op.QuantizeLinear(y, y_scale, y_zero)


@integer_decomposition("com.microsoft::QLinearGlobalAveragePool")
def qlinear_global_average_pool(op, x, x_scale, x_zero, y_scale, y_zero, *, channels_last=0):
    """Quantised mean over all positions."""
    first = 1 if channels_last else 2
    axes = list(range(first, op.rank(x) - (1 if channels_last else 0)))
    y = op.ReduceMean(_float(op, x, x_scale, x_zero), axes, keepdims=1)
    return op.QuantizeLinear(y, y_scale, y_zero)


@integer_decomposition("com.microsoft::QLinearAveragePool")
def qlinear_average_pool(
    op, x, x_scale, x_zero, y_scale, y_zero=None, *, kernel_shape, auto_pad=None, ceil_mode=0,
    channels_last=0, count_include_pad=0, pads=None, strides=None,
):  # fmt: skip
    """Quantised pooling."""
    wide = _float(op, x, x_scale, x_zero)
    y = op.AveragePool(
        op.move_axis(wide, -1, 1) if channels_last else wide, kernel_shape=kernel_shape,
        auto_pad=auto_pad, ceil_mode=ceil_mode, count_include_pad=count_include_pad, pads=pads,
        strides=strides,
    )  # fmt: skip
    return _back(op, op.move_axis(y, 1, -1) if channels_last else y, y_scale, y_zero, x)


@integer_decomposition("com.microsoft::QLinearConcat")
def qlinear_concat(op, y_scale, y_zero, *triples, axis):
    """Quantised tensors of several scales behind each other."""
    parts = [_float(op, *triples[i : i + 3]) for i in range(0, len(triples), 3)]
    return op.QuantizeLinear(op.Concat(*parts, axis=axis), y_scale, y_zero)


@integer_decomposition("com.microsoft::QLinearWhere")
def qlinear_where(op, condition, x, x_scale, x_zero, y, y_scale, y_zero, z_scale, z_zero):
    """Elements of one or the other."""
    chosen = op.Where(condition, _float(op, x, x_scale, x_zero), _float(op, y, y_scale, y_zero))
    return op.QuantizeLinear(chosen, z_scale, z_zero)


@integer_decomposition("com.microsoft::QLinearConv")
def contrib_qlinear_conv(
    op, x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, b=None, *, channels_last=0,
    auto_pad=None, dilations=None, group=1, kernel_shape=None, pads=None, strides=None,
):  # fmt: skip
    """The standard operator of the same name; channels may come last."""
    y = qlinear_conv(
        op, op.move_axis(x, -1, 1) if channels_last else x, x_scale, x_zero, w, w_scale, w_zero,
        y_scale, y_zero, b, auto_pad=auto_pad, dilations=dilations, group=group,
        kernel_shape=kernel_shape, pads=pads, strides=strides,
    )  # fmt: skip
    return op.move_axis(y, 1, -1) if channels_last else y


@integer_decomposition("com.microsoft::QGemm")
def qgemm(
    op, a, a_scale, a_zero, b, b_scale, b_zero, c: Any = None, y_scale=None, y_zero=None, *,
    alpha=1.0, transA=0, transB=0,
):  # fmt: skip
    """Quantised Gemm; without a scale of the result, floats."""
    right = _float(op, b, b_scale, b_zero, axis=0 if transB else 1)
    y = op.Gemm(_float(op, a, a_scale, a_zero), right, alpha=alpha, transA=transA, transB=transB)
    if c is not None:  # integers in units of both scales
        unit = op.Mul(op.Mul(a_scale, b_scale), op.const(alpha, a_scale.dtype))
        y = op.Add(y, op.Mul(op.Cast(c, to=a_scale.dtype), unit))
    return y if y_scale is None else op.QuantizeLinear(y, y_scale, y_zero)


@integer_decomposition("com.microsoft::MatMulIntegerToFloat")
def matmul_integer_to_float(op, a, b, a_scale, b_scale, a_zero=None, b_zero=None, bias=None):
    """The product of dequantised matrices."""
    right = _float(op, b, b_scale, b_zero, axis=op.rank(b) - 1)
    y = op.MatMul(_float(op, a, a_scale, a_zero), right)
    return y if bias is None else op.Add(y, bias)


@integer_decomposition("com.microsoft::DynamicQuantizeMatMul")
def dynamic_quantize_matmul(op, a, b, b_scale, b_zero=None, bias=None):
    """The product of a matrix that is quantised on the way with one that is."""
    q, scale, zero = op.DynamicQuantizeLinear(a, _outputs=3)
    y = op.MatMul(_float(op, q, scale, zero), _float(op, b, b_scale, b_zero, axis=op.rank(b) - 1))
    return y if bias is None else op.Add(y, bias)


def _float(
    op: OpBuilder, x: ir.Value, scale: ir.Value, zero: Maybe = None, axis: int | None = None
) -> ir.Value:
    """Return a quantised tensor as floats, with a scale for all or one per index of an axis."""
    single = op.rank(scale) == 0 or op.dims(scale) == (1,)
    return op.DequantizeLinear(x, scale, zero, axis=None if single else axis)


def _steps(op: OpBuilder, x: ir.Value, zero: Maybe, axis: int | None = None) -> ir.Value:
    """Return whole numbers as floats, less their zero point."""
    if zero is None or op.rank(zero) == 0 or op.dims(zero) == (1,):
        scale = op.const(1.0) if zero is None or op.rank(zero) == 0 else op.const([1.0])
        return op.DequantizeLinear(x, scale, zero)
    ones = op.full(op.shape_of(zero), 1.0, ir.DataType.FLOAT)
    ones.shape = zero.shape
    return op.DequantizeLinear(x, ones, zero, axis=axis)


def _back(op: OpBuilder, y: ir.Value, scale: ir.Value, zero: Maybe, like: ir.Value) -> ir.Value:
    """Return floats quantised to the type of another tensor."""
    if zero is None:
        zero = op.const(0, like.dtype)
    return op.QuantizeLinear(y, scale, zero)


def _becomes_float(node: ir.Node) -> bool:
    y = node.outputs[0]
    readers = [r for r, _ in y.uses()]
    return (
        bool(readers)
        and not y.is_graph_output()
        and all(is_op(r, "Cast") and _target(r) in FLOATS for r in readers)
    )


def _target(cast: ir.Node) -> ir.DataType:
    return ir.DataType(cast.attributes["to"].as_int())
