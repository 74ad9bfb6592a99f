"""Output shapes of convolutions, poolings and Resize."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.graph.shapes.formulas import Attributes, Formula, dims_in, elements_in, input_of


def _conv(node: ir.Node, a: Attributes) -> Sequence[Dim] | None:
    dims, w = dims_in(node), dims_in(node, 1)
    kernel = a.get("kernel_shape") or (None if w is None else w[2:])
    if dims is None or kernel is None:
        return None
    return [dims[0], None if w is None else w[0], *_windows(dims[2:], kernel, a)]


def _pool(node: ir.Node, a: Attributes) -> Sequence[Dim] | None:
    dims, kernel = dims_in(node), a.get("kernel_shape")
    if dims is None or kernel is None:
        return None
    out = [*dims[:2], *_windows(dims[2:], kernel, a)]
    if a.get("ceil_mode") and len(node.outputs) > 1:
        S.set_dims(node.outputs[1], out)
    return out


def _windows(sizes: Sequence[Dim], kernel: Sequence[Dim], a: Attributes) -> list[Dim]:
    """Return the number of windows along each axis."""
    n = len(sizes)
    strides, dilations = a.get("strides") or [1] * n, a.get("dilations") or [1] * n
    pads, auto = a.get("pads") or [0] * 2 * n, a.get("auto_pad") or "NOTSET"
    out: list[Dim] = []
    for i, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            out.append(D.floordiv(D.add(size, stride - 1), stride))
            continue
        extent = D.add(D.mul(dilations[i], D.sub(kernel[i], 1)), 1)
        before, after = (0, 0) if auto == "VALID" else (pads[i], pads[i + n])
        room = D.sub(D.add(size, before + after), extent)
        if not a.get("ceil_mode"):
            out.append(D.add(D.floordiv(room, stride), 1))
        elif isinstance(size, int) and isinstance(room, int):
            count = -(-room // stride) + 1
            out.append(count - 1 if (count - 1) * stride >= size + before else count)
        else:
            out.append(None)
    return out


def _conv_transpose(node: ir.Node, a: Attributes) -> Sequence[Dim] | None:
    dims, w = dims_in(node), dims_in(node, 1)
    if dims is None or w is None or a.get("output_shape"):
        return None
    if (a.get("auto_pad") or "NOTSET") != "NOTSET":
        return None
    n = len(dims) - 2
    kernel = a.get("kernel_shape") or w[2:]
    strides, dilations = a.get("strides") or [1] * n, a.get("dilations") or [1] * n
    pads, extra = a.get("pads") or [0] * 2 * n, a.get("output_padding") or [0] * n
    out: list[Dim] = [dims[0], D.mul(w[1], a["group"])]
    for i in range(n):
        size = D.mul(strides[i], D.sub(dims[2 + i], 1))
        size = D.add(D.add(size, extra[i]), D.add(D.mul(D.sub(kernel[i], 1), dilations[i]), 1))
        out.append(D.sub(size, pads[i] + pads[i + n]))
    return out


def _resize(node: ir.Node, a: Attributes) -> Sequence[Dim] | None:
    dims = dims_in(node)
    if dims is None or (a.get("keep_aspect_ratio_policy") or "stretch") != "stretch":
        return None
    axes = [i % len(dims) for i in (a.get("axes") or range(len(dims)))]
    out = list(dims)
    sizes = elements_in(node, 3) if node.op_type == "Resize" else None
    if sizes is not None:
        for axis, size in zip(axes, sizes, strict=True):
            out[axis] = size
        return out
    scales = S.constant_of(input_of(node, 1 if node.op_type == "Upsample" else 2))
    if scales is None or len(scales) != len(axes):
        return None
    for axis, scale in zip(axes, scales, strict=True):
        out[axis] = _scaled(dims[axis], scale)
    return out


def _scaled(size: Dim, scale: float) -> Dim:
    if float(scale).is_integer():
        return D.mul(size, int(scale))
    # The runtimes multiply in float32.
    return int(np.floor(size * np.float32(scale))) if isinstance(size, int) else None


def _stft(node: ir.Node, a: Attributes) -> Sequence[Dim] | None:
    """Frames as runtimes count them; onnx takes both sides where the length is the window's."""
    dims, window = dims_in(node), dims_in(node, 2)
    step, length = elements_in(node, 1), elements_in(node, 3)
    size = length[0] if length else window[0] if window else None
    if dims is None:
        return None
    frames = D.add(D.floordiv(D.sub(dims[1], size), step[0] if step else None), 1)
    bins = D.add(D.floordiv(size, 2), 1) if a.get("onesided", 1) else size
    return [dims[0], frames, bins, 2]


FORMULAS: dict[str, Formula] = {
    "STFT": _stft,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    **dict.fromkeys(("AveragePool", "LpPool", "MaxPool"), _pool),
    **dict.fromkeys(("Resize", "Upsample"), _resize),
}
