"""Elements of small integer tensors (rank 0 or 1), as dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.graph.shapes.formulas import (
    Attributes,
    Formula,
    dims_in,
    elements_in,
    input_of,
    slice_end,
)

_LIMIT = 64
"""Longer vectors are no shapes."""

_Elements = tuple[Dim, ...] | None


def _shape(node: ir.Node, a: Attributes) -> _Elements:
    dims = dims_in(node)
    return None if dims is None else dims[slice(a.get("start") or 0, a.get("end"))]


def _size(node: ir.Node, a: Attributes) -> _Elements:
    dims = dims_in(node)
    return None if dims is None else (D.product(dims),)


def _same(node: ir.Node, a: Attributes) -> _Elements:
    return elements_in(node, 0) if _is_small(node.outputs[0]) else None


def _is_small(x: ir.Value) -> bool:
    dims = S.dims_of(x)
    return dims is not None and len(dims) <= 1


def _concat(node: ir.Node, a: Attributes) -> _Elements:
    out: list[Dim] = []
    for x in node.inputs:
        part = S.symbolic_of(x)
        if part is None:
            return None
        out += part
    return tuple(out)


def _gather(node: ir.Node, a: Attributes) -> _Elements:
    data, at = elements_in(node, 0), D.numbers(elements_in(node, 1))
    if data is None or at is None or any(not -len(data) <= i < len(data) for i in at):
        return None
    return tuple(data[i] for i in at)


def _slice(node: ir.Node, a: Attributes) -> _Elements:
    data, start, end = elements_in(node, 0), _one(node, 1), _one(node, 2)
    step = 1 if input_of(node, 4) is None else _one(node, 4)
    if data is None or start is None or end is None or step is None:
        return None
    return data[slice(start, slice_end(end, step), step)]


def _one(node: ir.Node, i: int) -> int | None:
    numbers = D.numbers(elements_in(node, i))
    return numbers[0] if numbers is not None and len(numbers) == 1 else None


def _split(node: ir.Node, a: Attributes) -> _Elements:
    data, parts = elements_in(node, 0), elements_in(node, 1)
    if data is None:
        return None
    if parts is None:
        if input_of(node, 1) is not None:
            return None
        n = a.get("num_outputs") or len(node.outputs)
        size = -(-len(data) // n)
        parts = tuple(min(size, len(data) - i * size) for i in range(n))
    at = 0
    for out, part in zip(node.outputs, parts, strict=False):
        if not isinstance(part, int):
            return None
        S.set_symbolic(out, data[at : at + part])
        at += part
    return S.symbolic_of(node.outputs[0])


def _arithmetic(f: Callable[[Dim, Dim], Dim]) -> Formula:
    def formula(node: ir.Node, a: Attributes) -> _Elements:
        left, right = elements_in(node, 0), elements_in(node, 1)
        if left is None or right is None or not _is_small(node.outputs[0]):
            return None
        n = max(len(left), len(right))
        if len(left) not in (1, n) or len(right) not in (1, n):
            return None
        return tuple(f(p, q) for p, q in zip(_to(n, left), _to(n, right), strict=True))

    return formula


def _to(n: int, elements: tuple[Dim, ...]) -> tuple[Dim, ...]:
    return elements * n if len(elements) == 1 else elements


def _divide(a: Dim, b: Dim) -> Dim:
    # Integer Div truncates; sizes are not negative, a number may be.
    if isinstance(a, int) and isinstance(b, int) and b:
        return int(a / b) if abs(a) < 2**50 else None
    quotient = D.floordiv(a, b)
    return quotient if D.mul(quotient, b) == a else None


def _reduce_prod(node: ir.Node, a: Attributes) -> _Elements:
    data = elements_in(node, 0)
    return None if data is None else (D.product(data),)


def _range(node: ir.Node, a: Attributes) -> _Elements:
    bounds = [S.symbolic_of(x) for x in node.inputs]
    numbers = D.numbers([None if b is None else b[0] for b in bounds])
    if numbers is None:
        return None
    values = range(*numbers)
    return tuple(values) if len(values) <= _LIMIT else None


def _constant_of_shape(node: ir.Node, a: Attributes) -> _Elements:
    dims = S.dims_of(node.outputs[0])
    if dims is None or len(dims) != 1 or not isinstance(dims[0], int) or dims[0] > _LIMIT:
        return None
    tensor = a.get("value")
    return (0 if tensor is None else int(tensor.numpy().reshape(-1)[0]),) * dims[0]


def _where(node: ir.Node, a: Attributes) -> _Elements:
    condition = S.constant_of(input_of(node, 0))
    left, right = elements_in(node, 1), elements_in(node, 2)
    if left is None or right is None:
        return None
    if condition is None:
        return left if left == right else None
    flags: Sequence[bool] = [bool(c) for c in condition.reshape(-1)]
    n = max(len(flags), len(left), len(right))
    if any(len(v) not in (1, n) for v in (flags, left, right)):
        return None
    flags = flags if len(flags) == n else flags * n
    pairs = zip(flags, _to(n, left), _to(n, right), strict=True)
    return tuple(p if flag else q for flag, p, q in pairs)


FORMULAS: dict[str, Formula] = {
    "Add": _arithmetic(D.add),
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Div": _arithmetic(_divide),
    "Gather": _gather,
    "Mul": _arithmetic(D.mul),
    "Range": _range,
    "ReduceProd": _reduce_prod,
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "Split": _split,
    "Sub": _arithmetic(D.sub),
    "Where": _where,
    **dict.fromkeys(("Cast", "CastLike", "Identity", "Reshape", "Squeeze", "Unsqueeze"), _same),
}
