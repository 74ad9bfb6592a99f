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


# -- normalisation -----------------------------------------------------------------


@decomposition("SimplifiedLayerNormalization", "com.microsoft::SimplifiedLayerNormalization")
def simplified_layer_normalization(op, x, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    """``x / sqrt(mean(x^2) + epsilon) * scale``; the second output is the reciprocal root."""
    axes = list(range(axis % op.rank(x), op.rank(x)))
    wide = x if x.dtype == ir.DataType.DOUBLE else op.cast(x, ir.DataType(stash_type))
    inverse = op.Reciprocal(
        op.Sqrt(op.Add(op.ReduceMean(op.Mul(wide, wide), axes, keepdims=1), epsilon))
    )
    return op.Mul(op.cast(op.Mul(wide, inverse), x.dtype), scale), inverse


@decomposition("com.microsoft::SkipLayerNormalization")
def skip_layer_normalization(op, x, skip, gamma, beta=None, bias=None, *, epsilon=1e-12):
    """Layer normalisation of ``x + skip + bias``; the fourth output is that sum."""
    total = op.Add(x, skip)
    if bias is not None:
        total = op.Add(total, bias)
    y, mean, inverse = op.LayerNormalization(
        total, gamma, beta, axis=-1, epsilon=epsilon, _outputs=3
    )
    return y, mean, inverse, total


@decomposition("com.microsoft::SkipSimplifiedLayerNormalization")
def skip_simplified_layer_normalization(op, x, skip, gamma, bias=None, *, epsilon=1e-12):
    """Root-mean-square normalisation of ``x + skip + bias``; the fourth output is that sum."""
    total = op.Add(x, skip)
    if bias is not None:
        total = op.Add(total, bias)
    y, inverse = simplified_layer_normalization(op, total, gamma, epsilon=epsilon)
    return y, None, inverse, total


@decomposition("com.microsoft::EmbedLayerNormalization")
def embed_layer_normalization(
    op, ids, segments, words, positions, segment_table, gamma, beta, mask=None, position_ids=None,
    *, epsilon=1e-12, mask_index_type=0,
):  # fmt: skip
    """Layer normalisation of the sum of word, position and segment embeddings."""
    total = op.Gather(words, ids, axis=0)
    if position_ids is None:
        stop = op.size(ids, 1)
        stop = op.const(stop) if isinstance(stop, int) else op.Squeeze(stop, [0])
        position_ids = op.Range(op.const(0), stop, op.const(1))
    total = op.Add(total, op.Gather(positions, position_ids, axis=0))
    if segments is not None and segment_table is not None:
        total = op.Add(total, op.Gather(segment_table, segments, axis=0))
    lengths = None if mask is None else op.ReduceSum(mask, [1], keepdims=0)
    return op.LayerNormalization(total, gamma, beta, axis=-1, epsilon=epsilon), lengths, total
