"""Fused operators of the ``com.microsoft`` domain that optimisers put into inference files."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.decompose import decomposition

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
def fused_matmul(op, a, b, *, alpha=1.0, transA=0, transB=0, transBatchA=0, transBatchB=0):  # noqa: N803
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
    wide = op.cast(x, ir.DataType(stash_type))
    inverse = op.Reciprocal(
        op.Sqrt(op.Add(op.ReduceMean(op.Mul(wide, wide), axes, keepdims=1), epsilon))
    )
    return op.Mul(op.cast(op.Mul(wide, inverse), x.dtype), scale), inverse


@decomposition("com.microsoft::SkipLayerNormalization")
def skip_layer_normalization(op, x, skip, gamma, beta=None, bias=None, *, epsilon=1e-5):
    """Layer normalisation of ``x + skip + bias``; the fourth output is that sum."""
    total = op.Add(x, skip)
    if bias is not None:
        total = op.Add(total, bias)
    y, mean, inverse = op.LayerNormalization(
        total, gamma, beta, axis=-1, epsilon=epsilon, _outputs=3
    )
    return y, mean, inverse, total


@decomposition("com.microsoft::SkipSimplifiedLayerNormalization")
def skip_simplified_layer_normalization(op, x, skip, gamma, bias=None, *, epsilon=1e-5):
    """Root-mean-square normalisation of ``x + skip + bias``; the fourth output is that sum."""
    total = op.Add(x, skip)
    if bias is not None:
        total = op.Add(total, bias)
    y, inverse = simplified_layer_normalization(op, total, gamma, epsilon=epsilon)
    return y, None, inverse, total


@decomposition("com.microsoft::EmbedLayerNormalization")
def embed_layer_normalization(
    op, ids, segments, words, positions, segment_table, gamma, beta, mask=None, position_ids=None, *,
    epsilon=1e-12, mask_index_type=0,
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


# -- quantised weights ---------------------------------------------------------------


@decomposition("com.microsoft::MatMulNBits")
def matmul_n_bits(
    op, a, b, scales, zero_points=None, g_idx=None, bias=None, *, K=None, N=None, accuracy_level=0,  # noqa: N803
    bits=4, block_size=32, node,
):  # fmt: skip
    """``A @ dequantised(B)^T``: the weights stay 4 bits wide, in the standard's packing."""
    packed, points = op.constant(b), op.constant(zero_points)
    if bits not in (4, 8) or packed is None or g_idx is not None:
        raise PrepareError(
            f"node {node.name!r}: {S.describe(node)} can be expressed for constant 4 or 8 bit weights only"
        )
    if zero_points is not None and (points is None or points.dtype != np.uint8):
        raise PrepareError(
            f"node {node.name!r}: {S.describe(node)} has zero points that are not packed constants"
        )
    blocks = -(-K // block_size)
    flat = _unpack(packed.reshape(N, -1), bits)[:, : blocks * block_size]
    if points is None:
        zeros = np.full((N, blocks), 1 << (bits - 1), np.uint8)
    else:
        zeros = _unpack(points.reshape(N, -1), bits)[:, :blocks]
    narrow = ir.DataType.UINT4 if bits == 4 else ir.DataType.UINT8
    weight = op.DequantizeLinear(
        _narrow(op, flat, narrow),
        op.Reshape(scales, [N, blocks]),
        _narrow(op, zeros, narrow),
        axis=1,
        block_size=block_size,
    )
    if blocks * block_size != K:
        weight = op.Slice(weight, [0], [K], [1])
    y = op.MatMul(a, op.Transpose(weight, perm=[1, 0]))
    return y if bias is None else op.Add(y, bias)


def _unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)


def _narrow(op: OpBuilder, array: np.ndarray, dtype: ir.DataType) -> ir.Value:
    return op.const(array.astype(dtype.numpy()), dtype)


# -- attention --------------------------------------------------------------------------


@decomposition("com.microsoft::Attention")
def attention(
    op, x, weights, bias=None, mask=None, past=None, attention_bias=None, past_length=None, *,
    num_heads=None, unidirectional=0, scale=None, mask_filter_value=-10000.0, qkv_hidden_sizes=None,
    do_rotary=0, past_present_share_buffer=0, rotary_embedding_dim=0, node,
):  # fmt: skip
    """Self-attention with one joint projection."""
    if past is not None or past_length is not None or do_rotary:
        raise PrepareError(
            f"node {node.name!r}: {S.describe(node)}: a key-value cache cannot be trained through"
        )
    projected = op.MatMul(x, weights)
    if bias is not None:
        projected = op.Add(projected, bias)
    if qkv_hidden_sizes is not None:
        q, k, v = op.Split(projected, op.const(qkv_hidden_sizes), axis=-1, _outputs=3)
    else:
        q, k, v = op.Split(projected, axis=-1, num_outputs=3, _outputs=3)
    heads = [_split_heads(op, t, num_heads) for t in (q, k, v)]
    extra = _mask_bias(op, mask, x, mask_filter_value, node)
    y, _ = _attend(op, *heads, scale, extra, attention_bias, unidirectional, mask_filter_value)
    return (_join_heads(op, y),)


@decomposition("com.microsoft::MultiHeadAttention")
def multi_head_attention(
    op, query, key=None, value=None, bias=None, mask=None, attention_bias=None, past_key=None,
    past_value=None, past_length=None, cache=None, *, num_heads=None, scale=None, unidirectional=0,
    mask_filter_value=-10000.0, node,
):  # fmt: skip
    """Attention of projected queries, keys and values, each [batch, sequence, heads * size]."""
    if (
        any(v is not None for v in (past_key, past_value, past_length, cache))
        or key is None
        or value is None
    ):
        raise PrepareError(
            f"node {node.name!r}: {S.describe(node)}: only separate query, key and value without a cache"
        )
    if bias is not None:
        sizes = [op.dims(query)[-1], op.dims(query)[-1], op.dims(value)[-1]]
        bq, bk, bv = op.Split(bias, op.const(sizes), axis=0, _outputs=3)
        query = op.Add(query, bq)
        key = op.Add(key, bk) if op.rank(key) == 3 else key
        value = op.Add(value, bv) if op.rank(value) == 3 else value
    q = _split_heads(op, query, num_heads)
    k = key if op.rank(key) == 4 else _split_heads(op, key, num_heads)
    v = value if op.rank(value) == 4 else _split_heads(op, value, num_heads)
    extra = _mask_bias(op, mask, query, mask_filter_value, node)
    y, _ = _attend(op, q, k, v, scale, extra, attention_bias, unidirectional, mask_filter_value)
    return (_join_heads(op, y),)


@decomposition("com.microsoft::RotaryEmbedding")
def rotary_embedding(
    op, x, position_ids, cos_cache, sin_cache, *, interleaved=0, num_heads=0, rotary_embedding_dim=0,
    scale=1.0, is_packed_batching=0, node,
):  # fmt: skip
    """Rotate pairs of features by an angle that grows with the position."""
    if (
        is_packed_batching
        or op.constant(position_ids) is None
        and op.rank(position_ids) == 1
        or rotary_embedding_dim
    ):
        raise PrepareError(
            f"node {node.name!r}: {S.describe(node)}: only full rotation with [batch, sequence] positions"
        )
    flat = op.rank(x) == 3
    half = op.dims(cos_cache)[-1]
    heads = _split_heads(op, x, _number_of_heads(op, x, num_heads, half)) if flat else x
    cos = op.Unsqueeze(op.Gather(cos_cache, position_ids, axis=0), [1])  # [B, 1, S, half]
    sin = op.Unsqueeze(op.Gather(sin_cache, position_ids, axis=0), [1])
    if interleaved:
        pairs = op.reshape(
            heads, [op.size(heads, 0), op.size(heads, 1), op.size(heads, 2), half, 2]
        )
        left, right = (
            op.Squeeze(p, [-1]) for p in op.Split(pairs, axis=-1, num_outputs=2, _outputs=2)
        )
    else:
        left, right = op.Split(heads, axis=-1, num_outputs=2, _outputs=2)
    a = op.Sub(op.Mul(left, cos), op.Mul(right, sin))
    b = op.Add(op.Mul(left, sin), op.Mul(right, cos))
    if interleaved:
        both = op.Concat(op.Unsqueeze(a, [-1]), op.Unsqueeze(b, [-1]), axis=-1)
        y = op.reshape_like(both, heads)
    else:
        y = op.Concat(a, b, axis=-1)
    return _join_heads(op, y) if flat else y


def _number_of_heads(op: OpBuilder, x: ir.Value, given: int, half: Any) -> int:
    width = op.dims(x)[-1]
    return given or width // (2 * half)  # pyright: ignore[reportOperatorIssue, reportOptionalOperand]


def _split_heads(op: OpBuilder, x: ir.Value, heads: int) -> ir.Value:
    """[B, S, H*D] -> [B, H, S, D]."""
    width = op.dims(x)[-1]
    size = width // heads if isinstance(width, int) else -1
    split = op.reshape(x, [op.size(x, 0), op.size(x, 1), heads, size])
    return op.Transpose(split, perm=[0, 2, 1, 3])


def _join_heads(op: OpBuilder, x: ir.Value) -> ir.Value:
    """[B, H, S, D] -> [B, S, H*D]."""
    turned = op.Transpose(x, perm=[0, 2, 1, 3])
    h, d = op.dims(x)[1], op.dims(x)[3]
    width = h * d if isinstance(h, int) and isinstance(d, int) else -1
    return op.reshape(turned, [op.size(turned, 0), op.size(turned, 1), width])


def _attend(
    op: OpBuilder, q: ir.Value, k: ir.Value, v: ir.Value, scale: float | None, mask: ir.Value | None,
    bias: ir.Value | None, causal: int, low: float,
) -> tuple[ir.Value, ir.Value]:  # fmt: skip
    if scale:
        factor = op.const(scale, q.dtype)
    else:
        factor = op.Reciprocal(op.Sqrt(op.count(q, [3])))
    scores = op.Mul(op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2])), factor)
    if mask is not None:
        scores = op.Add(scores, mask)
    if bias is not None:
        scores = op.Add(scores, bias)
    if causal:
        s, t = op.size(q, 2), op.size(k, 2)
        assert q.dtype is not None
        ones = op.full([s, t], 1.0, q.dtype)
        later = op.Trilu(ones, op.const(1), upper=1)
        scores = op.Add(scores, op.Mul(later, low))
    weights = op.Softmax(scores, axis=-1)
    return op.MatMul(weights, v), weights


def _mask_bias(
    op: OpBuilder, mask: ir.Value | None, x: ir.Value, low: float, node: ir.Node
) -> ir.Value | None:
    """Turn a [batch, sequence] mask of ones and zeros into what is added to the scores."""
    if mask is None:
        return None
    if op.rank(mask) != 2:
        raise PrepareError(
            f"node {node.name!r}: {S.describe(node)}: only masks of shape [batch, sequence]"
        )
    keep = op.Cast(mask, to=x.dtype)
    return op.Unsqueeze(op.Mul(op.Sub(1.0, keep), low), [1, 2])
