"""Bounds on the values of a tensor, from the nodes that compute it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_op, is_standard

_MAX_DEPTH = 300  # nodes back that are looked at
_LAYOUT_OPS = frozenset(
    [
        *("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split", "Gather", "Concat"),
        *("Expand", "Identity", "Flatten", "Tile", "Neg", "Abs", "Relu", "Max", "Min", "Pad"),
        *("Where", "LeakyRelu", "MaxPool", "Dropout"),
    ]
)
_FINITE_PRESERVING_OPS = frozenset(
    [
        *("Add", "Sub", "Mul", "MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Sum", "Clip"),
        *("ReduceSum", "ReduceMean", "ReduceMax", "AveragePool", "GlobalAveragePool", "Resize"),
        *("Gelu", "Elu", "LayerNormalization", "BatchNormalization", "Softplus", "LogSoftmax"),
    ]
)
_BOUNDED_OPS = frozenset(
    ["Sigmoid", "Tanh", "Softmax", "Erf", "Sin", "Cos", "Sign", "OneHot", "HardSigmoid"]
)
_Seen = dict[tuple[ir.Value, bool], bool]


def may_be_infinite(x: ir.Value) -> bool:
    """Return whether a value may be NaN or infinite.

    An input of the model may, as long as it is only moved; sums and products of inputs count as
    finite: what overflows there is lost anyway.
    """
    return _may(x, _MAX_DEPTH, {}, moved=True)


def _may(x: ir.Value | None, depth: int, seen: _Seen, *, moved: bool) -> bool:
    if x is None or (x.dtype is not None and not x.dtype.is_floating_point()):
        return False
    if (x, moved) not in seen:
        seen[x, moved] = True
        seen[x, moved] = _look(x, depth, seen, moved=moved)
    return seen[x, moved]


def _look(x: ir.Value, depth: int, seen: _Seen, *, moved: bool) -> bool:
    array = S.constant_of(x)
    if array is not None:
        return not bool(np.isfinite(array.astype(np.float64)).all())
    node = x.producer()
    if node is None:
        return moved
    if not is_standard(node) or depth == 0:
        return True
    kind, inputs = node.op_type, node.inputs
    if kind in _BOUNDED_OPS:
        return False
    if kind == "Cast" or kind in _LAYOUT_OPS:
        return any(_may(v, depth - 1, seen, moved=moved) for v in inputs)
    safe = (
        kind in _FINITE_PRESERVING_OPS
        or (kind == "Exp" and _is_negated_size(inputs[0]))
        or (kind in ("Log", "Reciprocal") and _is_positive(inputs[0]))
        or (kind == "Sqrt" and _is_size(inputs[0]))
        or (kind == "Div" and _is_positive(inputs[1]))
    )
    return not safe or any(_may(v, depth - 1, seen, moved=False) for v in inputs)


def _is_size(x: ir.Value | None, depth: int = 8) -> bool:
    """Return whether no element is below zero."""
    if x is None or depth == 0:
        return False
    array = S.constant_of(x)
    if array is not None:
        return bool((array.astype(np.float64) >= 0).all())
    node = x.producer()
    if node is None or not is_standard(node):
        return False
    kind, inputs = node.op_type, node.inputs
    if kind in ("Abs", "Relu", "Exp", "Sigmoid", "Softmax", "Softplus", "Sqrt"):
        return True
    if kind == "Mul" and inputs[0] is inputs[1]:
        return True
    if kind in ("ReduceSum", "ReduceMean", "ReduceMax", "Reshape", "Unsqueeze", "Squeeze"):
        return _is_size(inputs[0], depth - 1)
    return kind in ("Add", "Mul") and all(_is_size(v, depth - 1) for v in inputs)


def _is_positive(x: ir.Value | None) -> bool:
    """Return whether every element is above zero, or is a constant that is not zero."""
    if x is None:
        return False
    array = S.constant_of(x)
    if array is not None:
        return bool((array != 0).all())
    node = x.producer()
    if node is None or not is_op(node, "Add"):
        return False
    numbers = [S.constant_of(v) for v in node.inputs]
    above = any(n is not None and bool((n.astype(np.float64) > 0).all()) for n in numbers)
    return above and all(_is_size(v) for v in node.inputs)


def _is_negated_size(x: ir.Value | None) -> bool:
    node = None if x is None else x.producer()
    return node is not None and node.op_type == "Neg" and _is_size(node.inputs[0])
