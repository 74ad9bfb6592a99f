"""Resize: whole factors by repetition, everything else by constant matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.lowering.forms.resize import constant_scales
from onnxtrain.lowering.registry import lower

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
        y = op.reshape(both, _one_open(others))
    return op.Identity(x) if y is x else y


def _one_open(sizes: list) -> list:
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
def by_matrices(op, x, roi=None, scales=None, sizes=None, *, node):
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


_KEPT = (
    "mode",
    "coordinate_transformation_mode",
    "nearest_mode",
    "cubic_coeff_a",
    "antialias",
    "exclude_outside",
)


def _table(node: ir.Node, n: int, m: int, factor: float | None) -> np.ndarray:
    """Return the matrix [m, n] that one axis is multiplied with."""
    kept = [a for name, a in node.attributes.items() if name in _KEPT]
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
