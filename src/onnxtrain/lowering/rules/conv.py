"""Convolutions."""

from __future__ import annotations

import numpy as np

from onnxtrain.graph.composed import col2im
from onnxtrain.lowering.registry import lower

_MOST = 256  # convolutions that one is made of


@lower("ConvTranspose")
def conv_transpose(
    op, x, w, b=None, *,
    auto_pad, dilations, group, kernel_shape, output_padding, output_shape, pads, strides,
):  # fmt: skip
    """Zeros between the pixels, then a convolution with the turned kernel."""
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


@lower("Conv")
def conv_1d(op, x, w, b=None, *, auto_pad, dilations, group, kernel_shape, pads, strides):
    """A picture of one row, for runtimes with two-dimensional convolutions only."""
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


@lower("Conv")
def conv_3d(op, x, w, b=None, *, auto_pad, dilations, group, kernel_shape, pads, strides):
    """For each slice of the result, a picture that has the slices under the kernel as channels."""
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
    if not 0 < len(slices) <= _MOST:
        return None
    return op.Concat(*slices, axis=2) if len(slices) > 1 else slices[0]


@lower("Conv")
def conv_by_picture(op, x, w, b=None, *, auto_pad, dilations, group, kernel_shape, pads, strides):
    """One convolution for each member of the batch, for runtimes that are wrong for several."""
    n = op.dims(x)[0]
    if not isinstance(n, int) or not 1 < n <= _MOST or auto_pad != "NOTSET":
        return None
    ys = [
        op.Conv(
            op.Slice(x, [i], [i + 1], [0]), w, b,
            dilations=dilations, group=group, pads=pads, strides=strides,
        )
        for i in range(n)
    ]  # fmt: skip
    return op.Concat(*ys, axis=0)


lower("Col2Im")(col2im)


@lower("MaxPool")
def max_pool_rounded_up(
    op, x, *, auto_pad, ceil_mode, dilations, kernel_shape, pads, storage_order, strides, node
):
    """Before opset 10 sizes are rounded down: pad behind by what rounding up adds."""
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
