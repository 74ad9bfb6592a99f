"""Operators that the standard has under the same or another name, and small ones on indices."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.builder.size_arithmetic import minus
from onnxtrain.graph.prepare.decompose import decomposition
from onnxtrain.graph.prepare.decompositions.contrib.heads import refuse

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
        refuse(node, "a row without a gradient and gradients by frequency are not expressed")
    return op.Gather(weight, indices, axis=0)


@decomposition("com.microsoft::WordConvEmbedding")
def word_conv_embedding(
    op, words, weight, bias, table, *, conv_window_size=None, embedding_size=None,
    char_embedding_size=None, node,
):  # fmt: skip
    """The largest of ``tanh(conv(letters))`` over the windows of each word; 0 ends a word.

    Words without letters, for which the kernel writes nothing, are zeros.
    """
    width = op.dims(weight)[2]
    if not isinstance(width, int):
        refuse(node, "the width of its windows is not known")
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
        refuse(node, f"distance {metric!r}")
    difference = op.Sub(op.Unsqueeze(a, [1]), op.Unsqueeze(b, [0]))
    squares = op.ReduceSum(op.Mul(difference, difference), [2], keepdims=0)
    return op.Sqrt(squares) if metric == "euclidean" else squares


@decomposition("com.microsoft::ConvTransposeWithDynamicPads")
def conv_transpose_with_dynamic_pads(
    op, x, w, pads=None, b=None, *, auto_pad=None, dilations=None, group=1, kernel_shape=None,
    output_padding=None, strides=None, node,
):  # fmt: skip
    """The standard operator with pads that are an input, and have to be constant."""
    given = op.constant(pads)
    if pads is not None and given is None:
        refuse(node, "the pads are computed at run time")
    return op.ConvTranspose(
        x, w, b, auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape,
        output_padding=output_padding, strides=strides,
        pads=None if given is None else [int(p) for p in given.reshape(-1)],
    )  # fmt: skip


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
