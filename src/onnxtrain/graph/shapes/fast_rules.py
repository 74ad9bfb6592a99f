"""Types and shapes of the commonest float operators, without a round trip through protobuf.

Only what is beyond doubt: wherever a type, rank or size is unknown or does not fit, ``infer``
answers ``False`` and onnx's inference decides, or complains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_standard
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim

_Formula = Callable[[ir.Node], Sequence[Dim] | None]

_SAME = (
    *("Abs", "Ceil", "Clip", "Cos", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSwish", "LeakyRelu"),
    *("Log", "Mish", "Neg", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Softplus"),
    *("Sqrt", "Tanh"),
)
_ARITHMETIC = ("Add", "Div", "Mul", "Pow", "Sub")
_COMPARISONS = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")


def infer(node: ir.Node) -> bool:
    """Set the type and shape of a node's output if they are certain; tell whether they are."""
    formula = _FORMULAS.get(node.op_type)
    if formula is None or not is_standard(node) or len(node.outputs) != 1:
        return False
    x = node.inputs[1] if node.op_type == "Where" and len(node.inputs) == 3 else node.inputs[0]
    if x is None or x.dtype not in S.FLOATS or not isinstance(x.type, ir.TensorType):
        return False
    dims = formula(node)
    if dims is None or None in dims:
        return False
    y = node.outputs[0]
    y.type = _BOOL if node.op_type in _COMPARISONS else x.type
    S.set_dims(y, dims)
    return True


def _first(node: ir.Node) -> Sequence[Dim] | None:
    x = node.inputs[0]
    return None if x is None else S.dims_of(x)


def _softmax(node: ir.Node) -> Sequence[Dim] | None:
    dims, given = _first(node), node.attributes.get("axis")
    axis = -1 if given is None else given.as_int()
    return dims if dims is not None and -len(dims) <= axis < len(dims) else None


def _broadcast(node: ir.Node) -> Sequence[Dim] | None:
    numbers = node.inputs[1:] if node.op_type == "Where" else node.inputs
    if len({x.dtype for x in numbers if x is not None}) != 1:
        return None
    result: Sequence[Dim] | None = ()
    for x in node.inputs:
        dims = None if x is None else S.dims_of(x)
        if result is None or dims is None:
            return None
        result = _meet(result, dims)
    return result


def _meet(a: Sequence[Dim], b: Sequence[Dim]) -> list[Dim] | None:
    n = max(len(a), len(b))
    left, right = [1] * (n - len(a)) + list(a), [1] * (n - len(b)) + list(b)
    for p, q in zip(left, right, strict=True):
        if isinstance(p, int) and isinstance(q, int) and p != q and 1 not in (p, q):
            return None
    return [D.broadcast(p, q) for p, q in zip(left, right, strict=True)]


def _transpose(node: ir.Node) -> Sequence[Dim] | None:
    dims, perm = _first(node), node.attributes.get("perm")
    if dims is None:
        return None
    order = list(range(len(dims)))[::-1] if perm is None else list(perm.as_ints())
    return [dims[i] for i in order] if sorted(order) == list(range(len(dims))) else None


def _matmul(node: ir.Node) -> Sequence[Dim] | None:
    if len(node.inputs) != 2 or node.inputs[1] is None:
        return None
    a, b = _first(node), S.dims_of(node.inputs[1])
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return None
    if a[-1] != b[-2] or node.inputs[0].dtype != node.inputs[1].dtype:  # pyright: ignore
        return None
    batch = _meet(a[:-2], b[:-2])
    return None if batch is None else [*batch, a[-2], b[-1]]


_BOOL = ir.TensorType(ir.DataType.BOOL)
_FORMULAS: dict[str, _Formula] = {
    **dict.fromkeys(_SAME, _first),
    **dict.fromkeys((*_ARITHMETIC, *_COMPARISONS, "Where"), _broadcast),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _softmax),
    "Transpose": _transpose,
    "MatMul": _matmul,
}
