"""Numbers that a graph computes from sizes: how long a Range is, where a Slice ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.memory import Sizes
from onnxtrain.graph.shapes import dims as D

_MOST = 64  # numbers of a result that is followed
_Arrays = list[np.ndarray]


def open_sizes(
    nodes: Sequence[ir.Node], known: Mapping[str, ir.Value], symbols: Mapping[str, int]
) -> dict[str, int]:
    """Return numbers for symbols that no input has: results of a size that other sizes decide.

    Args:
        nodes: in the order in which they run.
        known: results by name, with the shapes that the file gives them.
        symbols: numbers for the symbols of inputs.
    """
    counted: dict[str, int] = {}
    values: dict[str, np.ndarray] = {}
    sizes = Sizes(symbols)
    for node in nodes:
        y = node.outputs[0] if node.outputs else None
        if y is None or node.domain:
            continue
        inputs = [_number(x, values) for x in node.inputs]
        made = _value(node, inputs, known, sizes)
        if made is not None and made.size <= _MOST:
            values[y.name or ""] = made
        more = _new_symbols(node, inputs, known, sizes, {**symbols, **counted})
        if more:
            counted |= more
            sizes = Sizes({**symbols, **counted})
    return counted


def _number(x: ir.Value | None, values: Mapping[str, np.ndarray]) -> np.ndarray | None:
    if x is None:
        return None
    if (number := values.get(x.name or "")) is not None:
        return number
    tensor = x.const_value
    if tensor is None or tensor.size > _MOST:
        return None
    return tensor.numpy().reshape(-1)


def _value(
    node: ir.Node, inputs: list[np.ndarray | None], known: Mapping[str, ir.Value], sizes: Sizes
) -> np.ndarray | None:
    """Return the numbers of a small result, in a row, if they can be told."""
    if node.op_type in ("Shape", "Size"):
        dims = _dims(node.inputs[0], known)
        if dims is None:
            return None
        numbers = [sizes.elements([d]) for d in dims]
        if any(n is None for n in numbers):
            return None
        if node.op_type == "Size":
            return np.array([math.prod(n for n in numbers if n is not None)])
        first, last = (node.attributes.get_int(n, d) for n, d in (("start", 0), ("end", len(dims))))
        return np.array(numbers[first:last], np.int64)
    compute = _COMPUTED.get(node.op_type)
    arrays = [a for a in inputs if a is not None]
    if compute is None or len(arrays) != len(inputs):
        return None
    return compute(arrays)


def _quotient(arrays: _Arrays) -> np.ndarray:
    a, b = arrays
    if not np.all(b):
        return np.zeros(0)
    return a // b if "i" in a.dtype.kind + b.dtype.kind else a / b


_COMPUTED: dict[str, Callable[[_Arrays], np.ndarray]] = {
    **dict.fromkeys(("Unsqueeze", "Squeeze", "Reshape", "Identity", "Cast"), lambda a: a[0]),
    "Add": lambda a: a[0] + a[1],
    "Sub": lambda a: a[0] - a[1],
    "Mul": lambda a: a[0] * a[1],
    "Div": _quotient,
    "Max": lambda a: np.maximum.reduce(np.broadcast_arrays(*a)),
    "Min": lambda a: np.minimum.reduce(np.broadcast_arrays(*a)),
    "Ceil": lambda a: np.ceil(a[0]),
    "Floor": lambda a: np.floor(a[0]),
    "Concat": np.concatenate,
    "ReduceProd": lambda a: np.prod(a[0], keepdims=True),
}
"""Operators that are followed, on numbers in a row."""


def _new_symbols(
    node: ir.Node,
    inputs: list[np.ndarray | None],
    known: Mapping[str, ir.Value],
    sizes: Sizes,
    told: Mapping[str, int],
) -> dict[str, int]:
    """Return numbers for symbols that come up with a node's result."""
    read = _SIZED.get(node.op_type)
    dims = _dims(node.outputs[0], known)
    if read is None or dims is None:
        return {}
    lengths = read(node, inputs, known, sizes)
    if lengths is None or len(lengths) != len(dims):
        return {}
    new = {}
    for d, n in zip(dims, lengths, strict=True):
        if isinstance(d, str) and n is not None and n >= 0 and _is_symbol(d):
            (name,) = D.symbols(d)
            if name not in told:
                new[name] = n
    return new


def _is_symbol(d: str) -> bool:
    names = list(D.symbols(d))
    return len(names) == 1 and all(D.substitute(d, {names[0]: n}) == n for n in (2, 3))


def _range(
    node: ir.Node, inputs: list[np.ndarray | None], known: Mapping[str, ir.Value], sizes: Sizes
) -> list[int | None] | None:
    numbers = [a for a in inputs if a is not None and a.size == 1]
    if len(numbers) != 3 or not numbers[2].item():
        return None
    start, limit, step = (float(n.item()) for n in numbers)
    return [max(0, math.ceil((limit - start) / step))]


def _slice(
    node: ir.Node, inputs: list[np.ndarray | None], known: Mapping[str, ir.Value], sizes: Sizes
) -> list[int | None] | None:
    dims = _dims(node.inputs[0], known)
    if dims is None or len(inputs) < 3 or any(a is None for a in inputs[1:]):
        return None
    starts, ends = (np.asarray(a).tolist() for a in inputs[1:3])
    axes = range(len(starts)) if len(inputs) < 4 else np.asarray(inputs[3]).tolist()
    steps = [1] * len(starts) if len(inputs) < 5 else np.asarray(inputs[4]).tolist()
    lengths = [sizes.elements([d]) for d in dims]
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        whole = lengths[axis]
        if whole is not None:
            lengths[axis] = len(range(whole)[slice(int(start), int(end), int(step))])
    return lengths


def _by_shape(place: int):
    def read(
        node: ir.Node, inputs: list[np.ndarray | None], known: Mapping[str, ir.Value], sizes: Sizes
    ) -> list[int | None] | None:
        shape = inputs[place] if len(inputs) > place else None
        return None if shape is None else [int(n) if n > 0 else None for n in shape.tolist()]

    return read


_SIZED = {
    "Range": _range,
    "Slice": _slice,
    "Reshape": _by_shape(1),
    "ConstantOfShape": _by_shape(0),
    "Expand": _by_shape(1),
}
"""Operators whose numbers decide how large their result is."""


def _dims(x: ir.Value | None, known: Mapping[str, ir.Value]) -> Sequence[D.Dim] | None:
    return None if x is None else S.dims_of(known.get(x.name or "", x))


__all__ = ["open_sizes"]
