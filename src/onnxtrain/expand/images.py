"""Resize, Pad, GridSample and crops.

For lowering, Resize by an integer factor becomes repetition, any other Resize a matmul with a
constant matrix, and Pad a concatenation of slices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.expand.expansions import LOWERING, TRAINING, expansion, on_target, raise_unsupported
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, minus
from onnxtrain.graph.windows import repeat_nearest

# CUDA has no bfloat16 kernel of Resize.
expansion("Resize", when=on_target(lacks="Resize.bfloat16"))(repeat_nearest)


_MAX_MATRIX_ELEMENTS = 1 << 22


@expansion("Resize", when=LOWERING)
def nearest_by_repetition(op, x, roi=None, scales=None, sizes=None, *, node, mode):
    """Repeat each element: [..., H, ...] -> [..., H, k, ...] -> [..., H * k, ...]."""
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
    """Replace the only computed size by -1, which Reshape infers."""
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


@expansion("Resize", when=LOWERING)
def resize_by_matmul(op, x, roi=None, scales=None, sizes=None, *, node):
    """Multiply each resized axis by a matrix: the Resize of an identity matrix."""
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
        if n * max(n, m) > _MAX_MATRIX_ELEMENTS:
            return None
        table = _resize_matrix(node, n, m, None if factors is None else float(factors[i]))
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


def _resize_matrix(node: ir.Node, n: int, m: int, factor: float | None) -> np.ndarray:
    """Return the matrix [m, n] that resizes one axis, from the reference evaluator."""
    copied = [a for name, a in node.attributes.items() if name in _COPIED_ATTRIBUTES]
    names = ["x", "", "scales"] if factor is not None else ["x", "", "", "sizes"]
    proto = onnx.NodeProto(op_type="Resize", input=names, output=["y"])
    proto.attribute.extend(ir.serde.serialize_attribute(a) for a in copied)
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

    try:
        with np.errstate(all="ignore"):
            (table,) = ReferenceEvaluator(model).run(None, feeds)
    except RuntimeError as error:  # an option that the evaluator does not have
        raise_unsupported(node, S.first_line(error))
    return np.asarray(table)


def constant_scales(node: ir.Node) -> list[float] | None:
    """Return the scale of every axis of a Resize, ``None`` if they are not constant.

    Constant sizes count as scales if a float32 scale reproduces the size exactly.
    """
    x = node.inputs[0]
    assert x is not None
    dims = S.dims_of(x)
    if dims is None:
        return None
    inputs = [*node.inputs, None, None, None]
    axes_given = node.attributes.get("axes")
    axes = [a % len(dims) for a in axes_given.as_ints()] if axes_given else list(range(len(dims)))
    policy = node.attributes.get("keep_aspect_ratio_policy")
    factors = [1.0] * len(dims)
    scales, sizes = S.constant_of(inputs[2]), S.symbolic_of(inputs[3])
    if scales is not None and scales.size:
        for a, s in zip(axes, scales, strict=True):
            factors[a] = float(s)
        return factors
    if sizes is None or (policy is not None and policy.as_string() != "stretch"):
        return None
    for a, size in zip(axes, sizes, strict=True):
        if size == dims[a]:
            continue
        before = dims[a]
        if not isinstance(size, int) or not isinstance(before, int):
            return None
        scale = float(np.float32(size / before))
        if int(np.floor(np.float32(before) * np.float32(scale))) != size:
            return None
        factors[a] = scale
    return factors


@expansion("Pad", when=LOWERING)
def pad(op, x, pads, value=None, axes=None, *, mode):
    """Pad axis by axis: slice off negative pads, then concatenate the positive ones."""
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
            y = _pad_axis(op, y, axis, before, after, mode, filler)
            if y is None:
                return None
    return op.Identity(x) if y is x else y


def _pad_axis(
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
                block = _constant_slices(op, x, axis, count, filler)
                if block is None:
                    return None
                parts.insert(0 if front else len(parts), block)
    elif isinstance(n, int):
        padding: Any = mode
        where = np.pad(np.arange(n), (before, after), mode=padding)
        front = [_slice_at(op, x, axis, int(w)) for w in where[:before]]
        back = [_slice_at(op, x, axis, int(w)) for w in where[before + n :]]
        parts = [*front, x, *back]
    elif mode == "edge":
        first = _slice_at(op, x, axis, 0)
        last = op.Slice(x, [-1], [np.iinfo(np.int64).max], [axis])
        parts = [*[first] * before, x, *[last] * after]
    elif mode == "reflect":
        front = [_slice_at(op, x, axis, i) for i in range(before, 0, -1)]
        back = [op.Slice(x, [-i - 1], [-i], [axis]) for i in range(1, after + 1)]
        parts = [*front, x, *back]
    else:
        return None
    return op.Concat(*parts, axis=axis) if len(parts) > 1 else x


def _slice_at(op: OpBuilder, x: ir.Value, axis: int, i: int) -> ir.Value:
    return op.Slice(x, [i], [i + 1], [axis])


def _constant_slices(op: OpBuilder, x: ir.Value, axis: int, count: int, filler) -> ir.Value | None:
    """Return ``count`` slices filled with one value."""
    assert x.dtype is not None
    dims: list[Any] = list(op.dims(x))
    dims[axis] = count
    number = np.asarray(filler).reshape(())
    if all(isinstance(d, int) for d in dims):
        return op.const(np.full(dims, number), x.dtype)
    sizes = [count if i == axis else op.size(x, i) for i in range(len(dims))]
    one = op.const(np.full([1] * len(dims), number), x.dtype)
    return op.Tile(one, op.vector(sizes))


@expansion("com.microsoft::Pad", when=TRAINING)
def contrib_pad(op, x, pads, value=None, *, mode="constant"):
    """The standard operator of the same name; ``pads`` may be [1, n]."""
    filler = None if value is None else op.Reshape(value, op.const([]))
    return op.Pad(x, op.Reshape(pads, [-1]), filler, mode=mode)


@expansion("com.microsoft::GridSample", when=TRAINING)
def grid_sample(op, x, grid, *, align_corners=0, mode="bilinear", padding_mode="zeros"):
    """The standard operator of the same name, whose modes were renamed in opset 20."""
    names = {"bilinear": "linear", "bicubic": "cubic"}
    return op.GridSample(
        x, grid, align_corners=align_corners, mode=names.get(mode, mode), padding_mode=padding_mode
    )


@expansion("com.microsoft::CropAndResize", when=TRAINING)
def crop_and_resize(
    op, x, rois, batch_indices, crop_size, *, mode="bilinear", extrapolation_value=0.0, node
):
    """GridSample of boxes ``(y1, x1, y2, x2)``, in fractions of the image, with aligned corners.

    Pixels outside of the image are ``extrapolation_value``.
    """
    sizes = op.constant(crop_size)
    if sizes is None:
        raise_unsupported(node, "crop_size must be constant")
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
    # Without align_corners: GridSample would divide by zero for an image of one row.
    sampling = "nearest" if kind == "nearest" else "linear"
    y = op.GridSample(images, grid, mode=sampling, padding_mode="border", align_corners=0)
    inside = op.And(op.Unsqueeze(above, [1, 3]), op.Unsqueeze(beside, [1, 2]))
    return op.Where(inside, y, op.const(extrapolation_value, x.dtype))


def _sample_positions(
    op: OpBuilder, start: ir.Value, end: ir.Value, size: ir.Value, count: int, kind: str
) -> tuple[ir.Value, ir.Value]:
    """Return sampling positions in [-1, 1], and whether they are inside the image; [R, count]."""
    last = op.Sub(size, 1.0)
    if count > 1:
        # Same order as the kernel: rounding decides whether the last pixel is inside.
        step = op.Div(op.Mul(op.Sub(end, start), last), float(count - 1))
        steps = op.const([float(i) for i in range(count)], start.dtype)
        at = op.Add(op.Mul(start, last), op.Mul(steps, step))
    else:
        at = op.Mul(op.Mul(op.Add(start, end), 0.5), last)
    inside = op.And(op.GreaterOrEqual(at, 0.0), op.LessOrEqual(at, last))
    if kind == "nearest":
        at = op.Floor(op.Add(at, 0.5))  # halves round up, as in the kernel
    return op.Sub(op.Div(op.Add(op.Mul(at, 2.0), 1.0), size), 1.0), inside


@expansion("com.microsoft::ImageScaler", when=TRAINING)
def image_scaler(op, x, *, bias=None, scale=1.0):
    """``scale * x`` plus a bias per channel."""
    y = op.Mul(x, scale)
    if not bias:
        return y
    return op.Add(y, op.const(np.asarray(bias).reshape(1, -1, 1, 1), x.dtype))


@expansion("com.microsoft::Crop", when=TRAINING)
def crop(op, x, *, border=None, scale=None):
    """Slice each image: ``border`` is left, top, right, bottom; ``scale`` is height and width."""
    left, top, right, bottom = border or [0, 0, 0, 0]
    if scale:
        ends = [top + scale[0], left + scale[1]]
    else:
        ends = [minus(op, op.size(x, 2), bottom), minus(op, op.size(x, 3), right)]
    return op.Slice(x, [top, left], op.vector(ends), [2, 3])
