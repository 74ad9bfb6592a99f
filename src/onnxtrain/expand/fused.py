"""Fused operators of the ``com.microsoft`` domain that optimisers put into inference files.

Normalisations that take something else along: a sum, embeddings, a gate, an activation.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.expand.attention_parts import raise_unsupported, rms_norm
from onnxtrain.expand.expansions import decomposition
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder

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
    op,
    x,
    w,
    b=None,
    z=None,
    *,
    activation="",
    activation_params=None,
    auto_pad=None,
    dilations=None,
    group=1,
    kernel_shape=None,
    pads=None,
    strides=None,
    node,
):
    """Convolution, plus ``z`` if given, then an activation."""
    y = op.Conv(
        x,
        w,
        b,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    return _activate(op, y if z is None else op.Add(y, z), activation, activation_params, node)


@decomposition("com.microsoft::FusedGemm")
def fused_gemm(
    op,
    a,
    b,
    c=None,
    *,
    activation="",
    activation_alpha=None,
    activation_beta=None,
    activation_gamma=None,
    alpha=1.0,
    beta=1.0,
    transA=0,
    transB=0,
    node,
):
    """Gemm, then an activation."""
    y = op.Gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    given = [p for p in (activation_alpha, activation_beta, activation_gamma) if p is not None]
    return _activate(op, y, activation, given, node)


@decomposition("com.microsoft::FusedMatMulActivation")
def fused_matmul_activation(
    op,
    a,
    b,
    *,
    activation,
    alpha=1.0,
    transA=0,
    transB=0,
    transBatchA=0,
    transBatchB=0,
    activation_alpha=None,
    activation_beta=None,
    activation_gamma=None,
    activation_axis=None,
    node,
):
    """``alpha * A @ B`` with transposed operands, then an activation."""
    y = fused_matmul(
        op,
        a,
        b,
        alpha=alpha,
        transA=transA,
        transB=transB,
        transBatchA=transBatchA,
        transBatchB=transBatchB,
    )
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
    op,
    x,
    w,
    b=None,
    z=None,
    *,
    activation="",
    activation_params=None,
    auto_pad=None,
    dilations=None,
    group=1,
    kernel_shape=None,
    pads=None,
    strides=None,
    node,
):
    """Convolution of images whose channels come last, plus ``z``, then an activation."""
    y = fused_conv(
        op,
        channels_first(op, x),
        w,
        b,
        None if z is None else channels_first(op, z),
        activation=activation,
        activation_params=activation_params,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
        node=node,
    )
    return channels_last(op, y)


@decomposition("com.microsoft::NhwcMaxPool")
def nhwc_max_pool(
    op, x, *, kernel_shape, auto_pad=None, ceil_mode=0, dilations=None, pads=None, strides=None
):
    """Pooling of images whose channels come last."""
    y = op.MaxPool(
        channels_first(op, x),
        kernel_shape=kernel_shape,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        dilations=dilations,
        pads=pads,
        strides=strides,
    )
    return channels_last(op, y)


def channels_first(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return [N, ..., C] as [N, C, ...]."""
    return op.move_axis(x, -1, 1)


def channels_last(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return [N, C, ...] as [N, ..., C]."""
    return op.move_axis(x, 1, -1)


@decomposition("SimplifiedLayerNormalization", "com.microsoft::SimplifiedLayerNormalization")
def simplified_layer_normalization(op, x, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    """``x / sqrt(mean(x^2) + epsilon) * scale``; the second output is the reciprocal root."""
    axes = list(range(axis % op.rank(x), op.rank(x)))
    wide = x if x.dtype == ir.DataType.DOUBLE else op.cast(x, ir.DataType(stash_type))
    root = op.Sqrt(op.Add(op.ReduceMean(op.Mul(wide, wide), axes, keepdims=1), epsilon))
    return op.Mul(op.cast(op.Div(wide, root), x.dtype), scale), op.Reciprocal(root)


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
    op,
    ids,
    segments,
    words,
    positions,
    segment_table,
    gamma,
    beta,
    mask=None,
    position_ids=None,
    *,
    epsilon=1e-12,
    mask_index_type=0,
):
    """Layer normalisation of the sum of word, position and segment embeddings."""
    total = op.Gather(words, ids, axis=0)
    if position_ids is None:
        stop = op.size(ids, 1)
        stop = op.const(stop) if isinstance(stop, int) else op.Squeeze(stop, [0])
        position_ids = op.Range(op.const(0), stop, op.const(1))
    total = op.Add(total, op.Gather(positions, position_ids, axis=0))
    if segments is not None and segment_table is not None:
        total = op.Add(total, op.Gather(segment_table, segments, axis=0))
    y = op.LayerNormalization(total, gamma, beta, axis=-1, epsilon=epsilon)
    return y, _lengths(op, mask, ids), total


def _lengths(op: OpBuilder, mask: ir.Value | None, ids: ir.Value) -> ir.Value:
    """Return how many tokens of each row count: those up to the first that is masked.

    The runtime gives zeros if there is no mask.
    """
    if mask is None:
        zeros = op.full([op.size(ids, 0)], 0, ir.DataType.INT32)
        zeros.shape = ir.Shape([op.dims(ids)[0]])
        return zeros
    # Ones of the longest prefix without a zero.
    counted = op.Cast(op.Cast(mask, to=ir.DataType.BOOL), to=ir.DataType.INT32)
    ahead = op.CumSum(op.Sub(1, counted), op.const(1))
    prefix = op.Cast(op.Equal(ahead, op.const(0, ir.DataType.INT32)), to=ir.DataType.INT32)
    return op.ReduceSum(prefix, [1], keepdims=0)


@decomposition("com.microsoft::GroupNorm")
def group_norm(op, x, gamma, beta, *, groups, activation, channels_last=1, epsilon=1e-5, node):
    """Normalisation over groups of channels, which come last by default; then SiLU if asked."""
    return _group_norm(op, x, gamma, beta, groups, activation, channels_last, epsilon, node)


@decomposition("com.microsoft::SkipGroupNorm")
def skip_group_norm(
    op, x, gamma, beta, skip, bias=None, *, groups, activation, channels_last=1, epsilon=1e-5, node
):
    """The same of ``x + skip + bias``; the second output is that sum."""
    if op.rank(skip) == 2:
        skip = op.Unsqueeze(skip, [1, 2])
    total = op.Add(x, skip)
    if bias is not None:
        total = op.Add(total, bias)
    total.shape = x.shape
    y = _group_norm(op, total, gamma, beta, groups, activation, channels_last, epsilon, node)
    return y, total


def _group_norm(
    op: OpBuilder,
    x: ir.Value,
    gamma: ir.Value,
    beta: ir.Value,
    groups: int,
    activation: int,
    last: int,
    epsilon: float,
    node: ir.Node,
) -> ir.Value:
    if activation not in (0, 1):
        raise_unsupported(node, f"unknown activation {activation}")
    y = op.GroupNormalization(
        channels_first(op, x) if last else x,
        op.cast(gamma, x.dtype),
        op.cast(beta, x.dtype),
        epsilon=epsilon,
        num_groups=groups,
    )
    y = op.Mul(y, op.Sigmoid(y)) if activation else y
    return channels_last(op, y) if last else y


@decomposition("com.microsoft::BranchwiseRMSNorm")
def branchwise_rms_norm(op, x, scale=None, *, num_branches=0, epsilon=1e-5, node):
    """Root-mean-square normalisation of each branch; ``scale`` is for all branches or for one."""
    grouped = _branches(op, x, num_branches, node)
    weight = scale
    if scale is not None and op.rank(scale) == 1 and op.dims(scale) != op.dims(grouped)[-1:]:
        weight = op.Reshape(scale, op.vector([op.size(grouped, -2), op.size(grouped, -1)]))
    y = rms_norm(op, grouped, None if weight is None else op.cast(weight, x.dtype), epsilon)
    return op.reshape_like(y, x)


@decomposition("com.microsoft::GatedRMSNorm")
def gated_rms_norm(op, x, scale, gate, *, activation="silu", epsilon=1e-5, node):
    """Root-mean-square normalisation of each ``len(scale)`` elements, times a gate."""
    size = op.dims(scale)[0]
    if not isinstance(size, int):
        raise_unsupported(node, "the size of the scale is not known")
    rank = op.rank(x)
    pieces = op.Reshape(x, [*[0] * (rank - 1), -1, size])
    y = op.reshape_like(rms_norm(op, pieces, op.cast(scale, x.dtype), epsilon), x)
    opened = op.Sigmoid(gate)
    if activation in ("silu", "swish"):
        opened = op.Mul(gate, opened)
    elif activation != "sigmoid":
        raise_unsupported(node, f"unknown activation {activation!r}")
    return op.Mul(y, opened)


def _branches(op: OpBuilder, x: ir.Value, number: int, node: ir.Node) -> ir.Value:
    """Return [..., C * H] as [..., C, H]."""
    if not number:
        return x
    width = op.dims(x)[-1]
    if not isinstance(width, int):
        raise_unsupported(node, "the width of the branches is not known")
    return op.Reshape(x, [*[0] * (op.rank(x) - 1), number, width // number])


@decomposition("com.microsoft::HyperConnectionPreMix")
def hyper_connection_pre_mix(op, streams, pre_mix, *, num_branches=0, reduction_scale=1.0, node):
    """``scale * sum_c(streams_c * pre_mix_c)``."""
    grouped = _branches(op, streams, num_branches, node)
    mix = op.cast(_mix(op, pre_mix, grouped), streams.dtype)
    y = op.ReduceSum(op.Mul(grouped, mix), [-2], keepdims=0)
    return y if reduction_scale == 1.0 else op.Mul(y, reduction_scale)


@decomposition("com.microsoft::HyperConnectionPostMix")
def hyper_connection_post_mix(
    op, streams, block_output, post_mix, stream_mix=None, *, num_branches=0, node
):
    """``stream_mix^T streams + post_mix * block_output``."""
    grouped = _branches(op, streams, num_branches, node)
    mixed = grouped
    if stream_mix is not None:
        mixed = op.MatMul(op.mT(op.cast(stream_mix, streams.dtype)), grouped)
    gate = op.cast(_mix(op, post_mix, grouped), streams.dtype)
    y = op.Add(mixed, op.Mul(gate, op.Unsqueeze(block_output, [-2])))
    y.shape = grouped.shape
    return op.reshape_like(y, streams)


def _mix(op: OpBuilder, mix: ir.Value, grouped: ir.Value) -> ir.Value:
    """Return gates [..., C], [..., C, 1], [..., C, H] or [..., C * H] as [..., C, 1 or H]."""
    if op.rank(mix) == op.rank(grouped):
        return mix
    if op.dims(mix)[-1] == op.dims(grouped)[-2]:
        return op.Unsqueeze(mix, [-1])
    return op.reshape_like(mix, grouped)


@decomposition("com.microsoft::EngramGate")
def engram_gate(
    op, key, query, value, key_scale, query_scale, conv_scale=None, *, epsilon=1e-5, node
):
    """``sigmoid(sign(d) sqrt(max(|d|, 1e-6))) * value`` of the scaled product ``d``."""
    size = op.dims(key)[-1]
    if not isinstance(size, int):
        raise_unsupported(node, "the width of the keys is not known")
    product = op.Mul(
        rms_norm(op, key, key_scale, epsilon), rms_norm(op, query, query_scale, epsilon)
    )
    d = op.Mul(op.ReduceSum(product, [-1], keepdims=1), size**-0.5)
    root = op.Sqrt(op.Max(op.Abs(d), op.const(1e-6, d.dtype)))
    y = op.Mul(op.Sigmoid(op.Mul(op.sign(d), root)), op.Unsqueeze(value, [2]))
    y.shape = key.shape
    return y, None if conv_scale is None else rms_norm(op, y, conv_scale, epsilon)
