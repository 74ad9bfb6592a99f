"""Operators that the standard has under the same or another name, and small ones on indices.

Boxes cut out of images and brought to one size.

Columns of features by their numbers, where only inference tells the rank.

TensorScatter: writing into a cache at a running position.

Sequences packed one behind the other, without padding; and biases by relative position.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from onnxtrain.expand.attention_parts import (
    join_heads,
    raise_unsupported,
    scaled_dot_product_attention,
    split_heads,
)
from onnxtrain.expand.expansions import decomposition
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, minus

_INT64 = ir.DataType.INT64


@decomposition("com.microsoft::GatherND")
def gather_nd(op, data, indices):
    """The standard operator of the same name."""
    return op.GatherND(data, op.cast(indices, _INT64))


@decomposition("com.microsoft::GridSample")
def grid_sample(op, x, grid, *, align_corners=0, mode="bilinear", padding_mode="zeros"):
    """The standard operator of the same name, whose modes have other names since opset 20."""
    names = {"bilinear": "linear", "bicubic": "cubic"}
    return op.GridSample(
        x, grid, align_corners=align_corners, mode=names.get(mode, mode), padding_mode=padding_mode
    )


@decomposition("com.microsoft::Pad")
def pad(op, x, pads, value=None, *, mode="constant"):
    """The standard operator of the same name; pads may be [1, n]."""
    filler = None if value is None else op.Reshape(value, op.const([]))
    return op.Pad(x, op.Reshape(pads, [-1]), filler, mode=mode)


@decomposition("com.microsoft::ExpandDims")
def expand_dims(op, x, axis):
    """Insert an axis of size one."""
    return op.Unsqueeze(x, op.Reshape(op.cast(axis, _INT64), [1]))


@decomposition("com.microsoft::Range")
def range_(op, start, limit, delta=None):
    """The standard operator of the same name; the step is one if it is left out."""
    scalars = [op.Reshape(v, op.const([])) for v in (start, limit)]
    step = op.const(1, start.dtype) if delta is None else op.Reshape(delta, op.const([]))
    return op.Range(*scalars, step)


@decomposition("com.microsoft::SampleOp")
def sample_op(op, x):
    """What came in."""
    return op.Identity(x)


@decomposition("com.microsoft::TorchEmbedding")
def torch_embedding(op, weight, indices, padding_idx=None, scale_grad_by_freq=None, *, node):
    """Rows of a table."""
    if padding_idx is not None or scale_grad_by_freq is not None:
        raise_unsupported(
            node, "a row without a gradient and gradients by frequency are not expressed"
        )
    return op.Gather(weight, indices, axis=0)


@decomposition("com.microsoft::WordConvEmbedding")
def word_conv_embedding(
    op,
    words,
    weight,
    bias,
    table,
    *,
    conv_window_size=None,
    embedding_size=None,
    char_embedding_size=None,
    node,
):
    """The largest of ``tanh(conv(letters))`` over the windows of each word; 0 ends a word.

    Words without letters, for which the kernel writes nothing, are zeros.
    """
    width = op.dims(weight)[2]
    if not isinstance(width, int):
        raise_unsupported(node, "the width of its windows is not known")
    letters = op.Unsqueeze(op.Gather(table, words, axis=0), [1])  # [words, 1, length, size]
    heights = op.Tanh(op.Squeeze(op.Conv(letters, weight, bias), [3]))  # [words, filters, windows]
    real = op.Cast(op.Greater(words, op.const(0, words.dtype)), to=_INT64)
    count = op.ReduceSum(real, [1], keepdims=1)
    last = op.Sub(op.Max(count, width), width)
    hidden = op.Greater(op.iota(op.size(heights, 2)), op.Unsqueeze(last, [2]))
    largest = op.ReduceMax(op.Where(hidden, -2.0, heights), [2], keepdims=0)  # tanh is above -1
    begun = op.Greater(op.Slice(words, [0], [1], [1]), op.const(0, words.dtype))
    return op.Where(begun, largest, 0.0)


@decomposition("com.microsoft::UnfoldTensor")
def unfold_tensor(op, x, *, size, dim=-1, step=1):
    """All slices of ``size`` along an axis, one every ``step``, as one more axis at the end."""
    axis = dim % op.rank(x)
    room = minus(op, op.size(x, axis), size)
    count = room // step + 1 if isinstance(room, int) else op.Add(op.Div(room, step), 1)
    starts = op.Mul(op.iota(count), step)
    at = op.Add(op.Unsqueeze(starts, [1]), op.iota(size))  # [count, size]
    return op.move_axis(op.Gather(x, at, axis=axis), axis + 1, -1)


@decomposition("com.microsoft::CDist")
def c_dist(op, a, b, *, metric="sqeuclidean", node):
    """Distances between rows: ``sum((a - b)^2)`` or its root."""
    if metric not in ("sqeuclidean", "euclidean"):
        raise_unsupported(node, f"distance {metric!r}")
    difference = op.Sub(op.Unsqueeze(a, [1]), op.Unsqueeze(b, [0]))
    squares = op.ReduceSum(op.Mul(difference, difference), [2], keepdims=0)
    return op.Sqrt(squares) if metric == "euclidean" else squares


@decomposition("com.microsoft::ConvTransposeWithDynamicPads")
def conv_transpose_with_dynamic_pads(
    op,
    x,
    w,
    pads=None,
    b=None,
    *,
    auto_pad=None,
    dilations=None,
    group=1,
    kernel_shape=None,
    output_padding=None,
    strides=None,
    node,
):
    """The standard operator with pads that are an input, and have to be constant."""
    given = op.constant(pads)
    if pads is not None and given is None:
        raise_unsupported(node, "the pads are computed at run time")
    return op.ConvTranspose(
        x,
        w,
        b,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        output_padding=output_padding,
        strides=strides,
        pads=None if given is None else [int(p) for p in given.reshape(-1)],
    )


@decomposition("com.microsoft::BiasSoftmax")
def bias_softmax(op, x, bias, *, is_inner_broadcast, axis=1):
    """Softmax of ``x + bias`` over all axes from ``axis`` on."""
    total = op.Add(x, bias)
    total.shape = x.shape
    rank = op.rank(x)
    at = axis % rank
    if at == rank - 1:
        return op.Softmax(total, axis=-1)
    rows = op.Reshape(total, op.const([*[0] * at, -1]))
    return op.reshape_like(op.Softmax(rows, axis=-1), x)


@decomposition("com.microsoft::BiasDropout")
def bias_dropout(op, x, bias, residual=None, ratio=None, training_mode=None, *, seed=None):
    """``dropout(x + bias) + residual`` and what was kept."""
    y, kept = op.Dropout(op.Add(x, bias), ratio, training_mode, seed=seed, _outputs=2)
    return y if residual is None else op.Add(y, residual), kept


@decomposition("com.microsoft::BitmaskBiasDropout")
def bitmask_bias_dropout(op, x, bias, residual=None, ratio=None, training_mode=None, *, seed=None):
    """``dropout(x + bias) + residual``."""
    y = op.Dropout(op.Add(x, bias), ratio, training_mode, seed=seed)
    return y if residual is None else op.Add(y, residual)


@decomposition("com.microsoft::BitmaskDropout")
def bitmask_dropout(op, x, ratio=None, training_mode=None, *, seed=None):
    """Dropout without its packed mask."""
    return op.Dropout(x, ratio, training_mode, seed=seed)


@decomposition("com.microsoft::IsAllFinite")
def is_all_finite(op, *inputs, isinf_only=0, isnan_only=0):
    """Whether no element is infinite or not a number."""
    bad = None
    for x in inputs:
        terms = [] if isnan_only else [op.IsInf(x)]
        terms += [] if isinf_only else [op.IsNaN(x)]
        for term in terms:
            any_ = op.ReduceMax(op.Cast(op.Reshape(term, [-1]), to=ir.DataType.INT32), keepdims=0)
            bad = any_ if bad is None else op.Max(bad, any_)
    return op.Equal(bad, op.const(0, ir.DataType.INT32))


@decomposition("com.microsoft::CropAndResize")
def crop_and_resize(
    op, x, rois, batch_indices, crop_size, *, mode="bilinear", extrapolation_value=0.0, node
):
    """Pixels between the corners of boxes ``(y1, x1, y2, x2)``, which are shares of the image.

    Corners fall on pixels; where a box leaves the image its pixels are ``extrapolation_value``.
    """
    sizes = op.constant(crop_size)
    if sizes is None:
        raise_unsupported(node, "the size of the crops has to be constant")
    kind = mode.decode() if isinstance(mode, bytes) else mode
    height, width = (int(n) for n in sizes)
    tops, lefts, bottoms, rights = op.Split(rois, axis=1, num_outputs=4, _outputs=4)  # [R, 1]
    rows, above = _sample_positions(
        op, tops, bottoms, op.count(x, [2]), height, kind
    )  # [R, height]
    columns, beside = _sample_positions(op, lefts, rights, op.count(x, [3]), width, kind)
    shape = op.vector([1, height, width, 1])
    grid = op.Concat(
        op.Expand(op.Unsqueeze(columns, [1, 3]), shape),
        op.Expand(op.Unsqueeze(rows, [2, 3]), shape),
        axis=3,
    )
    images = op.Gather(x, batch_indices, axis=0)
    # Not aligned by corners: an image of one row would divide by zero.
    way = "nearest" if kind == "nearest" else "linear"
    y = op.GridSample(images, grid, mode=way, padding_mode="border", align_corners=0)
    inside = op.And(op.Unsqueeze(above, [1, 3]), op.Unsqueeze(beside, [1, 2]))
    return op.Where(inside, y, op.const(extrapolation_value, x.dtype))


def _sample_positions(
    op: OpBuilder, start: ir.Value, end: ir.Value, size: ir.Value, count: int, kind: str
) -> tuple[ir.Value, ir.Value]:
    """Return where pixels are read, from -1 to 1, and whether the image has them; [R, count]."""
    last = op.Sub(size, 1.0)
    if count > 1:
        # In the order of the kernel: rounding decides whether the last pixel is inside.
        step = op.Div(op.Mul(op.Sub(end, start), last), float(count - 1))
        steps = op.const([float(i) for i in range(count)], start.dtype)
        at = op.Add(op.Mul(start, last), op.Mul(steps, step))
    else:
        at = op.Mul(op.Mul(op.Add(start, end), 0.5), last)
    inside = op.And(op.GreaterOrEqual(at, 0.0), op.LessOrEqual(at, last))
    if kind == "nearest":
        at = op.Floor(op.Add(at, 0.5))  # halves go up, as in the kernel
    return op.Sub(op.Div(op.Add(op.Mul(at, 2.0), 1.0), size), 1.0), inside


@decomposition("ai.onnx.ml::ArrayFeatureExtractor")
def array_feature_extractor(op, x, at):
    """Gather along the last axis; a vector gives a row."""
    flat = op.Reshape(at, op.const([-1]))
    columns = op.Gather(x, flat, axis=op.rank(x) - 1)
    return columns if op.rank(x) > 1 else op.Unsqueeze(columns, [0])


@decomposition("TensorScatter")
def tensor_scatter(op, past_cache, update, write_indices=None, *, axis=-2, mode="linear"):
    """ScatterElements at the written positions."""
    where = write_positions(op, past_cache, update, write_indices, axis, mode)
    return op.ScatterElements(past_cache, where, update, axis=axis)


def write_positions(
    op: OpBuilder,
    cache: ir.Value,
    update: ir.Value,
    write_indices: ir.Value | None,
    axis: int,
    mode: str,
) -> ir.Value:
    """Give, in the shape of ``update``, the position along ``axis`` that each element goes to."""
    rank = op.rank(cache)
    axis %= rank
    line = op.reshape(op.iota(op.size(update, axis)), [-1] + [1] * (rank - 1 - axis))
    if write_indices is not None:
        line = op.Add(op.reshape(write_indices, [-1] + [1] * (rank - 1)), line)
    if mode == "circular":
        line = op.Mod(line, op.vector([op.size(cache, axis)]))
    return op.expand_like(line, update)


@decomposition("com.microsoft::PackedAttention")
def packed_attention(
    op,
    x,
    weights,
    bias,
    token_offset,
    sums,
    attention_bias=None,
    *,
    num_heads,
    scale=None,
    qkv_hidden_sizes=None,
):
    """Attention of [tokens, width] with a joint projection, each sequence by itself."""
    y = op.Add(op.MatMul(x, weights), bias)
    if qkv_hidden_sizes:
        q, k, v = op.Split(y, qkv_hidden_sizes, axis=-1, _outputs=3)
    else:
        q, k, v = op.Split(y, axis=-1, num_outputs=3, _outputs=3)
    return _attend_packed(op, q, k, v, sums, token_offset, attention_bias, num_heads, scale)


@decomposition("com.microsoft::PackedMultiHeadAttention")
def packed_multi_head_attention(
    op,
    query,
    key=None,
    value=None,
    bias=None,
    token_offset: Any = None,
    sums: Any = None,
    attention_bias=None,
    *,
    num_heads,
    scale=None,
    mask_filter_value=-10000.0,
    node,
):
    """Attention of projected [tokens, width], each sequence by itself."""
    if key is None:  # [tokens, heads, 3, size]
        query, key, value = (
            op.Reshape(op.Gather(query, op.const(i), axis=2), [0, -1]) for i in range(3)
        )
    if bias is not None:
        width, total = op.dims(query)[-1], op.dims(bias)[-1]
        if not isinstance(width, int) or not isinstance(total, int):
            raise_unsupported(node, "the widths of the bias are not known")
        parts = op.Split(bias, [width, width, total - 2 * width], axis=0, _outputs=3)
        query, key, value = (op.Add(t, b) for t, b in zip((query, key, value), parts, strict=True))
    assert value is not None
    return _attend_packed(
        op, query, key, value, sums, token_offset, attention_bias, num_heads, scale
    )


def _attend_packed(
    op: OpBuilder,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    sums: ir.Value,
    offsets: ir.Value,
    bias: ir.Value | None,
    heads: int,
    scale: float | None,
) -> ir.Value:
    """All tokens attend in one matrix, of which only blocks on the diagonal count."""
    at = op.iota(op.size(q, 0))
    starts = op.cast(op.Slice(sums, [1], [-1], [0]), _INT64)
    # Of how many sequences each token lies behind the start: the number of its own.
    later = op.GreaterOrEqual(op.Unsqueeze(at, [1]), op.Unsqueeze(starts, [0]))
    own = op.ReduceSum(op.Cast(later, to=_INT64), [1], keepdims=0)
    same = op.Equal(op.Unsqueeze(own, [1]), op.Unsqueeze(own, [0]))
    added = None
    if bias is not None:  # [batch or 1, heads or 1, length, length]
        added = _pairwise_bias(op, bias, own, offsets, q)
    q, k, v = (split_heads(op, op.Unsqueeze(t, [0]), heads) for t in (q, k, v))
    y, _ = scaled_dot_product_attention(op, q, k, v, scale=scale, added=[added], allowed=[same])
    return op.Squeeze(join_heads(op, y), [0])


def _pairwise_bias(
    op: OpBuilder, bias: ir.Value, own: ir.Value, offsets: ir.Value, q: ir.Value
) -> ir.Value:
    """Return [1, heads or 1, tokens, tokens]; pairs of other sequences get anything."""
    count = op.vector([op.size(q, 0)])
    flat = op.Slice(op.cast(op.Reshape(offsets, [-1]), _INT64), [0], count, [0])
    length = op.vector([op.size(offsets, 1)])
    place = op.Mod(flat, length)
    whole = op.Transpose(bias, perm=[0, 2, 3, 1])  # [B, S, S, heads]
    batch = op.Min(own, op.Sub(op.Shape(bias, start=0, end=1), 1))
    rows = op.Unsqueeze(batch, [1])
    column = op.Unsqueeze(place, [1])
    index = op.Concat(
        op.Unsqueeze(op.Add(rows, op.Mul(op.Unsqueeze(place, [0]), 0)), [2]),
        op.Unsqueeze(op.Add(column, op.Mul(op.Unsqueeze(place, [0]), 0)), [2]),
        op.Unsqueeze(op.Add(op.Mul(column, 0), op.Unsqueeze(place, [0])), [2]),
        axis=2,
    )
    return op.Unsqueeze(op.Transpose(op.GatherND(whole, index), perm=[2, 0, 1]), [0])


@decomposition("com.microsoft::RestorePadding")
def restore_padding(op, x, token_offset):
    """Put each token back to its place; padding becomes zero."""
    places = op.cast(op.Reshape(token_offset, [-1]), _INT64)
    count = op.vector([op.size(x, 0)])
    real = op.Slice(places, [0], count, [0])
    total = op.Mul(op.vector([op.size(token_offset, 0)]), op.vector([op.size(token_offset, 1)]))
    zeros = op.full(op.Concat(total, op.vector([op.size(x, 1)]), axis=0), 0.0, x.dtype)
    filled = op.ScatterND(zeros, op.Unsqueeze(real, [1]), x)
    y = op.Reshape(filled, op.Concat(op.shape_of(token_offset), op.const([-1]), axis=0))
    S.set_dims(y, [*op.dims(token_offset), op.dims(x)[1]])
    return y


@decomposition("com.microsoft::RemovePadding")
def remove_padding(op, x, counts):
    """Drop padding: tokens one behind the other, their places, running sums, longest length."""
    batch, length = op.vector([op.size(x, 0)]), op.vector([op.size(x, 1)])
    lengths = op.cast(counts, _INT64)
    column = op.iota(op.size(x, 1))
    real = op.Less(column, op.Unsqueeze(lengths, [1]))  # [B, S]
    flat = op.Reshape(real, [-1])
    first = op.Reshape(op.NonZero(flat), [-1])
    rest = op.Reshape(op.NonZero(op.Not(flat)), [-1])
    rows = op.Reshape(x, op.Concat(op.Mul(batch, length), op.vector([op.size(x, 2)]), axis=0))
    packed = op.Gather(rows, first, axis=0)
    places = op.Reshape(op.Concat(first, rest, axis=0), op.Concat(batch, length, axis=0))
    sums = op.Concat(op.const([0]), op.CumSum(lengths, op.const(0)), axis=0)
    longest = op.Reshape(op.ReduceMax(lengths, keepdims=0), [1])
    return packed, *(op.Cast(t, to=counts.dtype) for t in (places, sums, longest))


@decomposition("com.microsoft::RelativePositionBias")
def relative_position_bias(
    op, table, query_length, key_length, *, max_distance, is_bidirectional=0, node
):
    """T5's bias: distances fall into bins, each with a number per head."""
    rows, columns = (
        op.iota(op.cast(op.Reshape(n, [1]), _INT64)) for n in (query_length, key_length)
    )
    buckets = op.dims(table)[0]
    if not isinstance(buckets, int):
        raise_unsupported(node, "the number of bins is not known")
    far = op.Sub(op.Unsqueeze(rows, [1]), op.Unsqueeze(columns, [0]))  # how far back
    base: Any = None
    if is_bidirectional:
        buckets //= 2
        base = op.Mul(op.Cast(op.Less(far, 0), to=_INT64), buckets)
        far = op.Abs(far)
    else:
        far = op.Max(far, 0)
    exact = buckets // 2
    wide = op.Cast(op.Max(far, 1), to=ir.DataType.FLOAT)
    steps = (buckets - exact) / math.log(max_distance / exact)
    large = op.Add(op.Cast(op.Mul(op.Log(op.Div(wide, float(exact))), steps), to=_INT64), exact)
    bins = op.Where(op.Less(far, exact), far, op.Min(large, buckets - 1))
    bins = bins if base is None else op.Add(bins, base)
    return op.Unsqueeze(op.Transpose(op.Gather(table, bins, axis=0), perm=[2, 0, 1]), [0])


@decomposition("com.microsoft::GatedRelativePositionBias")
def gated_relative_position_bias(
    op, query, query_bias, rel_pos, weight, bias, eco_a, token_offset=None, *, num_heads, node
):
    """``u (r a - 1) + 2`` times a bias by position; gates u and r come from the queries."""
    if token_offset is not None:
        raise_unsupported(node, "packed sequences")
    heads = split_heads(op, op.Add(query, query_bias), num_heads)  # [B, H, S, D]
    gates = op.Add(op.MatMul(heads, weight), bias)
    half = op.dims(weight)[-1]
    if not isinstance(half, int):
        raise_unsupported(node, "the width of the gates is not known")
    sums = op.ReduceSum(op.Reshape(gates, [0, 0, 0, 2, half // 2]), [-1], keepdims=0)
    u, r = op.Split(op.Sigmoid(sums), axis=-1, num_outputs=2, _outputs=2)  # [B, H, S, 1]
    return op.Mul(op.Add(op.Mul(u, op.Sub(op.Mul(r, eco_a), 1.0)), 2.0), rel_pos)
