"""Convolutions.

Resize: whole factors by repetition, everything else by constant matrices.

Pad by slices that are joined.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.expand.images import col2im
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.lowering.forms import constant_scales
from onnxtrain.lowering.lowerings import lower

_MOST = 256  # convolutions that one is made of


@lower("ConvTranspose")
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
def conv_per_image(op, x, w, b=None, *, auto_pad, dilations, group, kernel_shape, pads, strides):
    """One convolution for each member of the batch, for runtimes that are wrong for several."""
    n = op.dims(x)[0]
    if not isinstance(n, int) or not 1 < n <= _MOST or auto_pad != "NOTSET":
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


_TABLE = 1 << 22  # elements of a matrix


@lower("Resize")
def nearest_by_repetition(op, x, roi=None, scales=None, sizes=None, *, node, mode):
    """[..., H, ...] -> [..., H, 1, ...], the same beside it, [..., H k, ...]."""
    factors = constant_scales(node)
    if mode != "nearest" or factors is None or not _reads_whole_cells(op, node, factors):
        return None
    y = x
    for axis, factor in enumerate(factors):
        if factor == 1:
            continue
        size = op.dims(y)[axis]
        others = [op.size(y, i) for i in range(op.rank(y))]
        lifted = op.Unsqueeze(y, [axis + 1])
        both = op.Concat(*[lifted] * int(factor), axis=axis + 1)
        others[axis] = size * int(factor) if isinstance(size, int) else -1
        y = op.reshape(both, _infer_one_dim(others))
    return op.Identity(x) if y is x else y


def _infer_one_dim(sizes: list) -> list:
    """Let -1 stand for a single computed size."""
    computed = [i for i, s in enumerate(sizes) if not isinstance(s, int)]
    if len(computed) == 1 and -1 not in sizes:
        sizes[computed[0]] = -1
    return sizes


def _reads_whole_cells(op: OpBuilder, node: ir.Node, factors: list[float]) -> bool:
    if not all(f >= 1 and float(f).is_integer() for f in factors) or max(factors) > 32:
        return False
    place = node.attributes.get("coordinate_transformation_mode")
    rounding = node.attributes.get("nearest_mode")
    place = "half_pixel" if place is None else place.as_string()
    rounding = "round_prefer_floor" if rounding is None else rounding.as_string()
    if place == "asymmetric":
        return rounding == "floor"
    return place in ("half_pixel", "pytorch_half_pixel") and rounding in (
        "round_prefer_floor",
        "round_prefer_ceil",
    )


@lower("Resize")
def resize_by_matmul(op, x, roi=None, scales=None, sizes=None, *, node):
    """Along each axis that changes, a product with the Resize of an identity matrix."""
    rank = op.rank(x)
    before, after = op.dims(x), op.dims(node.outputs[0])
    given = node.attributes.get("axes")
    axes = [a % rank for a in given.as_ints()] if given else list(range(rank))
    place = node.attributes.get("coordinate_transformation_mode")
    policy = node.attributes.get("keep_aspect_ratio_policy")
    if place is not None and place.as_string() == "tf_crop_and_resize":
        return None
    if policy is not None and policy.as_string() != "stretch":
        return None
    factors = op.constant(scales) if scales is not None else None
    if scales is not None and op.dims(scales) == (0,):
        factors = None
    if factors is None and sizes is None:
        return None
    if not x.dtype.is_floating_point():
        return None
    y = x
    for i, axis in enumerate(axes):
        n, m = before[axis], after[axis]
        if (factors is None and n == m) or (factors is not None and factors[i] == 1):
            continue
        if not isinstance(n, int) or not isinstance(m, int):
            return None
        if n * max(n, m) > _TABLE:
            return None
        table = _table(node, n, m, None if factors is None else float(factors[i]))
        if table.shape != (m, n):
            return None
        matrix = op.const(table, x.dtype)
        if axis == rank - 1:
            y = op.MatMul(y, op.const(table.T.copy(), x.dtype))
        elif axis == rank - 2:
            y = op.MatMul(matrix, y)
        else:
            last = op.move_axis(y, axis, rank - 1)
            y = op.move_axis(op.MatMul(last, op.const(table.T.copy(), x.dtype)), rank - 1, axis)
    return op.Identity(x) if y is x else y


_COPIED_ATTRIBUTES = (
    "mode",
    "coordinate_transformation_mode",
    "nearest_mode",
    "cubic_coeff_a",
    "antialias",
    "exclude_outside",
)


def _table(node: ir.Node, n: int, m: int, factor: float | None) -> np.ndarray:
    """Return the matrix [m, n] that one axis is multiplied with."""
    kept = [a for name, a in node.attributes.items() if name in _COPIED_ATTRIBUTES]
    names = ["x", "", "scales"] if factor is not None else ["x", "", "", "sizes"]
    proto = onnx.NodeProto(op_type="Resize", input=names, output=["y"])
    proto.attribute.extend(ir.serde.serialize_attribute(a) for a in kept)
    graph = onnx.GraphProto(name="resize", node=[proto])
    graph.input.extend(onnx.ValueInfoProto(name=name) for name in names if name)
    graph.output.append(onnx.ValueInfoProto(name="y"))
    model = onnx.ModelProto(
        ir_version=10, graph=graph, opset_import=[onnx.OperatorSetIdProto(version=19)]
    )
    feeds: dict[str, Any] = {"x": np.eye(n, dtype=np.float32)}
    if factor is not None:
        feeds["scales"] = np.asarray([factor, 1.0], np.float32)
    else:
        feeds["sizes"] = np.asarray([m, n], np.int64)
    from onnx.reference import ReferenceEvaluator  # large, and not needed to train

    (table,) = ReferenceEvaluator(model).run(None, feeds)
    return np.asarray(table)


@lower("Pad")
def pad(op, x, pads, value=None, axes=None, *, mode):
    """Axis after axis: what is cut off, then what is added in front and behind."""
    amounts = op.constant(pads)
    chosen = op.axes(axes, op.rank(x)) if axes is not None else list(range(op.rank(x)))
    filler = op.constant(value) if value is not None else np.zeros(())
    if amounts is None or chosen is None or (mode == "constant" and filler is None):
        return None
    count = len(chosen)
    y = x
    for i, axis in enumerate(chosen):
        before, after = int(amounts[i]), int(amounts[i + count])
        if before or after:
            y = _along(op, y, axis, before, after, mode, filler)
            if y is None:
                return None
    return op.Identity(x) if y is x else y


def _along(
    op: OpBuilder, x: ir.Value, axis: int, before: int, after: int, mode: str, filler
) -> ir.Value | None:
    n = op.dims(x)[axis]
    if before < 0 or after < 0:
        end = np.iinfo(np.int64).max if after >= 0 else after
        x = op.Slice(x, [max(-before, 0)], [end], [axis])
        before, after = max(before, 0), max(after, 0)
        n = op.dims(x)[axis]
    parts = [x]
    if mode == "constant":
        for count, front in ((before, True), (after, False)):
            if count:
                block = _block(op, x, axis, count, filler)
                if block is None:
                    return None
                parts.insert(0 if front else len(parts), block)
    elif isinstance(n, int):
        padding: Any = mode
        where = np.pad(np.arange(n), (before, after), mode=padding)
        front = [_one(op, x, axis, int(w)) for w in where[:before]]
        back = [_one(op, x, axis, int(w)) for w in where[before + n :]]
        parts = [*front, x, *back]
    elif mode == "edge":
        first = _one(op, x, axis, 0)
        last = op.Slice(x, [-1], [np.iinfo(np.int64).max], [axis])
        parts = [*[first] * before, x, *[last] * after]
    elif mode == "reflect":
        front = [_one(op, x, axis, i) for i in range(before, 0, -1)]
        back = [op.Slice(x, [-i - 1], [-i], [axis]) for i in range(1, after + 1)]
        parts = [*front, x, *back]
    else:
        return None
    return op.Concat(*parts, axis=axis) if len(parts) > 1 else x


def _one(op: OpBuilder, x: ir.Value, axis: int, i: int) -> ir.Value:
    return op.Slice(x, [i], [i + 1], [axis])


def _block(op: OpBuilder, x: ir.Value, axis: int, count: int, filler) -> ir.Value | None:
    """Return ``count`` slices of one value."""
    assert x.dtype is not None
    dims: list[Any] = list(op.dims(x))
    dims[axis] = count
    number = np.asarray(filler).reshape(())
    if all(isinstance(d, int) for d in dims):
        return op.const(np.full(dims, number), x.dtype)
    sizes = [count if i == axis else op.size(x, i) for i in range(len(dims))]
    one = op.const(np.full([1] * len(dims), number), x.dtype)
    return op.Tile(one, op.vector(sizes))
