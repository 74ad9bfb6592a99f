"""Convolution, Col2Im and pooling; operators on channels-last images at the end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.expand.activations import apply_activation
from onnxtrain.expand.expansions import LOWERING, TRAINING, expansion, on_target, raise_unsupported
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.windows import pad, tap_slices, window_geometry

_MAX_CONVS = 256  # that one convolution may be split into


@expansion("ConvTranspose", when=LOWERING)
def conv_transpose(
    op,
    x,
    w,
    b=None,
    *,
    auto_pad,
    dilations,
    group,
    kernel_shape,
    output_padding,
    output_shape,
    pads,
    strides,
):
    """Insert zeros between the pixels, then convolve with the flipped kernel."""
    n = op.rank(x) - 2
    kernel, sizes = op.dims(w)[2:], op.dims(x)[2:]
    if auto_pad != "NOTSET" or output_shape or not all(isinstance(k, int) for k in kernel):
        return None
    if not all(isinstance(s, int) for s in sizes):
        return None
    strides, dilations = strides or [1] * n, dilations or [1] * n
    pads, extra = pads or [0] * 2 * n, output_padding or [0] * n
    for i, stride in enumerate(strides):
        if stride > 1:  # [.., H, ..] @ [H, (H - 1) s + 1]
            size = sizes[i]
            table = np.zeros((size, (size - 1) * stride + 1))
            table[np.arange(size), np.arange(size) * stride] = 1
            last = op.move_axis(x, i + 2, n + 1)
            x = op.move_axis(op.MatMul(last, op.const(table, x.dtype)), n + 1, i + 2)
    for i, k in enumerate(kernel):
        if k > 1:
            w = op.Gather(w, op.const(np.arange(k)[::-1].copy()), axis=i + 2)
    # [C, M / g, ...] -> [M, C / g, ...]
    channels, each = op.dims(w)[:2]
    if group > 1:
        w = op.Reshape(w, [group, channels // group, each, *kernel])
        w = op.Transpose(w, perm=[0, 2, 1, *range(3, n + 3)])
        w = op.Reshape(w, [group * each, channels // group, *kernel])
    else:
        w = op.Transpose(w, perm=[1, 0, *range(2, n + 2)])
    before = [(k - 1) * d - p for k, d, p in zip(kernel, dilations, pads[:n], strict=True)]
    after = [
        (k - 1) * d - p + e for k, d, p, e in zip(kernel, dilations, pads[n:], extra, strict=True)
    ]
    cut = [*(min(p, 0) for p in before), *(min(p, 0) for p in after)]
    if any(cut):
        x = op.Pad(x, [0, 0, *cut[:n], 0, 0, *cut[n:]])
    around = [max(p, 0) for p in (*before, *after)]
    return op.Conv(x, w, b, dilations=dilations, group=group, pads=around, strides=[1] * n)


@expansion("Conv", when=LOWERING)
def conv_1d(op, x, w, b=None, *, auto_pad, dilations, group, kernel_shape, pads, strides):
    """Convolve images of height 1, for runtimes that only have 2-D convolutions."""
    if op.rank(x) != 3 or auto_pad != "NOTSET":
        return None
    pads = pads or [0, 0]
    y = op.Conv(
        op.Unsqueeze(x, [2]),
        op.Unsqueeze(w, [2]),
        b,
        dilations=[1, *(dilations or [1])],
        group=group,
        pads=[0, pads[0], 0, pads[1]],
        strides=[1, *(strides or [1])],
    )
    return op.Squeeze(y, [2])


@expansion("Conv", when=LOWERING)
def conv_3d(op, x, w, b=None, *, auto_pad, dilations, group, kernel_shape, pads, strides):
    """One 2-D convolution per output slice; the slices under the kernel become channels."""
    if op.rank(x) != 5 or auto_pad != "NOTSET" or op.static(x) is None or op.static(w) is None:
        return None
    pads, strides, dilations = pads or [0] * 6, strides or [1] * 3, dilations or [1] * 3
    deep, step, spread = op.dims(w)[2], strides[0], dilations[0]
    if pads[0] or pads[3]:
        x = op.Pad(x, [pads[0], pads[3]], op.const(0, x.dtype), [2])
    n, channels, depth, high, wide = op.dims(x)
    reach = (deep - 1) * spread + 1
    m, each = op.dims(w)[:2]
    kernel = op.Reshape(w, [m, each * deep, *op.dims(w)[3:]])
    slices = []
    for start in range(0, depth - reach + 1, step):
        part = op.Slice(x, [start], [start + reach], [2], [spread])
        y = op.Conv(
            op.Reshape(part, [n, channels * deep, high, wide]),
            kernel,
            b,
            dilations=dilations[1:],
            group=group,
            pads=[*pads[1:3], *pads[4:6]],
            strides=strides[1:],
        )
        slices.append(op.Unsqueeze(y, [2]))
    if not 0 < len(slices) <= _MAX_CONVS:
        return None
    return op.Concat(*slices, axis=2) if len(slices) > 1 else slices[0]


@expansion("Conv", when=LOWERING)
def conv_per_image(op, x, w, b=None, *, auto_pad, dilations, group, kernel_shape, pads, strides):
    """One convolution per example, for runtimes that are wrong for larger batches."""
    n = op.dims(x)[0]
    if not isinstance(n, int) or not 1 < n <= _MAX_CONVS or auto_pad != "NOTSET":
        return None
    ys = [
        op.Conv(
            op.Slice(x, [i], [i + 1], [0]),
            w,
            b,
            dilations=dilations,
            group=group,
            pads=pads,
            strides=strides,
        )
        for i in range(n)
    ]
    return op.Concat(*ys, axis=0)


@expansion("com.microsoft::FusedConv", when=TRAINING)
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
    return apply_activation(
        op, y if z is None else op.Add(y, z), activation, activation_params, node
    )


@expansion("com.microsoft::ConvTransposeWithDynamicPads", when=TRAINING)
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
    """ConvTranspose with ``pads`` as an input, which must be constant."""
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


@expansion("Col2Im", when=on_target(lacks="Col2Im"))
@expansion("Col2Im", when=LOWERING)
def col2im(
    op: OpBuilder,
    x: ir.Value,
    image: ir.Value,
    block: ir.Value,
    *,
    dilations: Sequence[int] | None,
    pads: Sequence[int] | None,
    strides: Sequence[int] | None,
) -> ir.Value | None:
    """A transposed convolution whose kernels are one-hot: each column is added at its position."""
    size, window = op.constant(image), op.constant(block)
    if size is None or window is None:
        return None
    n = len(window)
    k = int(np.prod(window))
    strides, dilations, pads = strides or [1] * n, dilations or [1] * n, pads or [0] * 2 * n
    channels = op.dims(x)[1]
    if not isinstance(channels, int):
        return None
    channels //= k
    out = [int(p) + pads[i] + pads[i + n] for i, p in enumerate(size)]
    reach = [(int(w) - 1) * d + 1 for w, d in zip(window, dilations, strict=True)]
    steps = [(o - r) // s + 1 for o, r, s in zip(out, reach, strides, strict=True)]
    spare = [o - (t - 1) * s - r for o, t, s, r in zip(out, steps, strides, reach, strict=True)]
    batch = op.size(x, 0)
    first = batch if isinstance(batch, int) else -1
    columns = op.Reshape(x, [first, channels * k, *steps])
    w = np.zeros((channels, k, 1, k))
    w[:, np.arange(k), 0, np.arange(k)] = 1
    w = w.reshape(channels * k, 1, *(int(v) for v in window))
    cropped = list(pads[:n]) != list(pads[n:])
    cropped = cropped and op.target.lacks("ConvTranspose.asymmetric_pads")
    y = op.ConvTranspose(
        columns,
        op.const(w, x.dtype),
        dilations=dilations,
        group=channels,
        pads=[0] * 2 * n if cropped else pads,
        strides=strides,
        output_padding=spare,
    )
    if not cropped:
        return y
    ends = [o - e for o, e in zip(out, pads[n:], strict=True)]
    return op.Slice(y, list(pads[:n]), ends, list(range(2, n + 2)))


# CUDA has no kernel of version 22, the first opset whose MaxPool takes bfloat16.
@expansion("MaxPool", when=on_target(lacks="MaxPool.opset22", min_opset=22))
def max_pool_by_slices(
    op: OpBuilder,
    x: ir.Value,
    *,
    node: ir.Node,
    dilations: list[int] | None,
    kernel_shape: list[int],
    pads: list[int] | None,
    strides: list[int] | None,
) -> ir.Value | None:
    """``Max`` over shifted slices of ``x``, one per element of the window, padded with -inf."""
    if not can_decompose_max_pool(node, op.opset):
        return None
    win = window_geometry(kernel_shape, strides, dilations, pads)
    return op.Max(*tap_slices(op, pad(op, x, win, float("-inf")), win, like=node.outputs[0]))


def can_decompose_max_pool(node: ir.Node, opset: int) -> bool:
    """Return whether a MaxPool can be a Max over shifted slices, one per element of its window."""
    dtype = node.outputs[0].dtype
    options = S.attributes_of(node, opset)
    indices = node.outputs[1] if len(node.outputs) > 1 else None
    plain = options["auto_pad"] == "NOTSET" and not options["ceil_mode"]
    unread = indices is None or not (indices.uses() or indices.is_graph_output())
    return plain and unread and dtype in (ir.DataType.FLOAT, ir.DataType.BFLOAT16)


@expansion("MaxPool", when=LOWERING)
def max_pool_rounded_up(
    op, x, *, auto_pad, ceil_mode, dilations, kernel_shape, pads, storage_order, strides, node
):
    """Pad the end by what ``ceil_mode`` adds: before opset 10 sizes are always rounded down."""
    n = op.rank(x) - 2
    sizes, out = op.dims(x)[2:], op.dims(node.outputs[0])[2:]
    if not ceil_mode or auto_pad != "NOTSET" or len(node.outputs) > 1:
        return None
    if not all(isinstance(s, int) for s in (*sizes, *out)):
        return None
    strides, dilations, pads = strides or [1] * n, dilations or [1] * n, pads or [0] * 2 * n
    behind = []
    for i in range(n):
        reach = (out[i] - 1) * strides[i] + (kernel_shape[i] - 1) * dilations[i] + 1
        behind.append(max(pads[i + n], reach - sizes[i] - pads[i]))
    if any(b >= k for b, k in zip(behind, kernel_shape, strict=True)):
        return None
    return op.MaxPool(
        x,
        dilations=dilations,
        kernel_shape=kernel_shape,
        pads=[*pads[:n], *behind],
        strides=strides,
    )


@expansion("GlobalAveragePool", when=LOWERING)
def global_average_pool(op, x):
    """The mean over all spatial axes."""
    return op.ReduceMean(x, list(range(2, op.rank(x))), keepdims=1)


@expansion("GlobalMaxPool", when=LOWERING)
def global_max_pool(op, x):
    """The maximum over all spatial axes."""
    return op.ReduceMax(x, list(range(2, op.rank(x))), keepdims=1)


@expansion("com.microsoft::NhwcConv", "com.microsoft::NhwcFusedConv", when=TRAINING)
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
    """Convolution of channels-last images, plus ``z``, then an activation."""
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


@expansion("com.microsoft::NhwcMaxPool", when=TRAINING)
def nhwc_max_pool(
    op, x, *, kernel_shape, auto_pad=None, ceil_mode=0, dilations=None, pads=None, strides=None
):
    """MaxPool of channels-last images."""
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
    """Transpose [N, ..., C] to [N, C, ...]."""
    return op.move_axis(x, -1, 1)


def channels_last(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Transpose [N, C, ...] to [N, ..., C]."""
    return op.move_axis(x, 1, -1)
