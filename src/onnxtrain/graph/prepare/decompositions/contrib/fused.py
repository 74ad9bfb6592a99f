"""Fused operators of the ``com.microsoft`` domain that optimisers put into inference files."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.prepare.decompose import decomposition

_ACTIVATIONS = {
    "": lambda op, x, p: x,
    "Clip": lambda op, x, p: op.Clip(x, p[0], p[1]),
    "Elu": lambda op, x, p: op.Elu(x, alpha=p[0] if p else None),
    "HardSigmoid": lambda op, x, p: op.HardSigmoid(x, alpha=p[0], beta=p[1]),
    "LeakyRelu": lambda op, x, p: op.LeakyRelu(x, alpha=p[0] if p else None),
    "Relu": lambda op, x, p: op.Relu(x),
    "Sigmoid": lambda op, x, p: op.Sigmoid(x),
    "Tanh": lambda op, x, p: op.Tanh(x),
}


def _activate(
    op: OpBuilder, x: ir.Value, name: str | None, parameters: list[float] | None, node: ir.Node
) -> ir.Value:
    function = _ACTIVATIONS.get(name or "")
    if function is None:
        raise PrepareError(f"node {node.name!r}: {S.describe(node)}: unknown activation {name!r}")
    return function(op, x, parameters or [])


@decomposition("com.microsoft::FastGelu")
def fast_gelu(op, x, bias=None):
    """Gelu of ``x + bias`` with the tanh approximation."""
    return op.Gelu(x if bias is None else op.Add(x, bias), approximate="tanh")


@decomposition("com.microsoft::Gelu")
def gelu(op, x):
    """Gelu with erf."""
    return op.Gelu(x)


@decomposition("com.microsoft::BiasGelu")
def bias_gelu(op, x, bias):
    """Gelu of ``x + bias``."""
    return op.Gelu(op.Add(x, bias))


@decomposition("com.microsoft::QuickGelu")
def quick_gelu(op, x, *, alpha=1.702):
    """``x * sigmoid(alpha * x)``."""
    return op.Mul(x, op.Sigmoid(op.Mul(x, alpha)))


@decomposition("com.microsoft::BiasSplitGelu")
def bias_split_gelu(op, x, bias):
    """The left half of ``x + bias`` times Gelu of the right half."""
    left, right = op.Split(op.Add(x, bias), axis=-1, num_outputs=2, _outputs=2)
    return op.Mul(left, op.Gelu(right))


@decomposition("com.microsoft::BiasAdd")
def bias_add(op, x, bias, skip):
    """``x + bias + skip``."""
    return op.Add(op.Add(x, bias), skip)


@decomposition("com.microsoft::Trilu")
def trilu(op, x, k=None, *, upper=1):
    """The standard operator of the same name."""
    return op.Trilu(x, k, upper=upper)


@decomposition("com.microsoft::FusedMatMul", "com.microsoft::TransposeMatMul")
def fused_matmul(op, a, b, *, alpha=1.0, transA=0, transB=0, transBatchA=0, transBatchB=0):
    """``alpha * A @ B`` with transposed operands.

    ``transBatch`` says that the first axis of the matrix stands in front of the batch axes.
    """

    def turned(x, transpose, batch):
        r = op.rank(x)
        if r < 2 or not (transpose or batch):
            return x
        perm = list(range(r))
        if batch:  # [M, batch..., K] -> [batch..., M, K]
            perm = [*range(1, r - 1), 0, r - 1]
        if transpose:
            perm[-2], perm[-1] = perm[-1], perm[-2]
        return op.Transpose(x, perm=perm)

    y = op.MatMul(turned(a, transA, transBatchA), turned(b, transB, transBatchB))
    return y if alpha == 1.0 else op.Mul(y, alpha)


@decomposition("com.microsoft::FusedConv")
def fused_conv(
    op, x, w, b=None, z=None, *, activation="", activation_params=None, auto_pad=None,
    dilations=None, group=1, kernel_shape=None, pads=None, strides=None, node,
):  # fmt: skip
    """Convolution, plus ``z`` if given, then an activation."""
    y = op.Conv(
        x, w, b, auto_pad=auto_pad, dilations=dilations, group=group,
        kernel_shape=kernel_shape, pads=pads, strides=strides,
    )  # fmt: skip
    return _activate(op, y if z is None else op.Add(y, z), activation, activation_params, node)


@decomposition("com.microsoft::FusedGemm")
def fused_gemm(
    op, a, b, c=None, *, activation="", activation_alpha=None, activation_beta=None,
    activation_gamma=None, alpha=1.0, beta=1.0, transA=0, transB=0, node,
):  # fmt: skip
    """Gemm, then an activation."""
    y = op.Gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    given = [p for p in (activation_alpha, activation_beta, activation_gamma) if p is not None]
    return _activate(op, y, activation, given, node)


@decomposition("com.microsoft::FusedMatMulActivation")
def fused_matmul_activation(
    op, a, b, *, activation, alpha=1.0, transA=0, transB=0, transBatchA=0, transBatchB=0,
    activation_alpha=None, activation_beta=None, activation_gamma=None, activation_axis=None, node,
):  # fmt: skip
    """``alpha * A @ B`` with transposed operands, then an activation."""
    y = fused_matmul(
        op, a, b, alpha=alpha, transA=transA, transB=transB, transBatchA=transBatchA,
        transBatchB=transBatchB,
    )  # fmt: skip
    if activation == "Softmax":
        return op.Softmax(y, axis=-1 if activation_axis is None else activation_axis)
    given = [p for p in (activation_alpha, activation_beta, activation_gamma) if p is not None]
    return _activate(op, y, activation, given, node)


@decomposition("com.microsoft::GemmFastGelu")
def gemm_fast_gelu(op, x, w, bias=None):
    """Gelu of ``x @ w + bias`` with the tanh approximation."""
    return fast_gelu(op, op.MatMul(x, w), bias)


@decomposition("com.microsoft::ScaledSiLU")
def scaled_silu(op, x, scale=None, *, alpha=1.0):
    """``z * sigmoid(z)`` of ``z = scale * x``; the input goes before the attribute."""
    z = op.Mul(x, alpha if scale is None else op.cast(scale, x.dtype))
    z.shape = x.shape
    return op.Mul(z, op.Sigmoid(z))


@decomposition("com.microsoft::GatedAdd")
def gated_add(op, x, y, gate):
    """``x + y * gate``, with a gate per row."""
    return op.Add(x, op.Mul(y, gate))


# -- channels last -----------------------------------------------------------------


@decomposition("com.microsoft::NhwcConv", "com.microsoft::NhwcFusedConv")
def nhwc_conv(
    op, x, w, b=None, z=None, *, activation="", activation_params=None, auto_pad=None,
    dilations=None, group=1, kernel_shape=None, pads=None, strides=None, node,
):  # fmt: skip
    """Convolution of images whose channels come last, plus ``z``, then an activation."""
    y = fused_conv(
        op, channels_first(op, x), w, b, None if z is None else channels_first(op, z),
        activation=activation, activation_params=activation_params, auto_pad=auto_pad,
        dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads, strides=strides,
        node=node,
    )  # fmt: skip
    return channels_last(op, y)


@decomposition("com.microsoft::NhwcMaxPool")
def nhwc_max_pool(
    op, x, *, kernel_shape, auto_pad=None, ceil_mode=0, dilations=None, pads=None, strides=None
):
    """Pooling of images whose channels come last."""
    y = op.MaxPool(
        channels_first(op, x), kernel_shape=kernel_shape, auto_pad=auto_pad, ceil_mode=ceil_mode,
        dilations=dilations, pads=pads, strides=strides,
    )  # fmt: skip
    return channels_last(op, y)


def channels_first(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return [N, ..., C] as [N, C, ...]."""
    return op.move_axis(x, -1, 1)


def channels_last(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return [N, C, ...] as [N, ..., C]."""
    return op.move_axis(x, 1, -1)
