"""What is cut out of a tensor twice is cut out once, and a cut that takes all is none.

Exporters write ``x[0::2, 0::2]`` and ``x[0::2, 1::2]`` as two cuts each, of which the first ones
are equal. Shared, the gradients of all pieces lie side by side and are put together in two steps;
apart, each piece would be padded with zeros to the whole and added.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import nodes


def shared_slices(model: ir.Model, op: OpBuilder) -> int:
    """Let equal slices of one value be one; return how many there are less."""
    first: dict[tuple, ir.Value] = {}
    removed = 0
    for node in list(nodes(op.graph, "Slice")):
        x, y = node.inputs[0], node.outputs[0]
        numbers = _numbers(node)
        if x is None or numbers is None or y.is_graph_output():
            continue
        stands = x if _takes_all(x, y, numbers) else first.setdefault((x, *numbers), y)
        if stands is not y:
            y.replace_all_uses_with(stands)
            op.graph.remove(node, safe=True)
            removed += 1
    return removed


def _numbers(node: ir.Node) -> tuple[tuple[int, ...] | None, ...] | None:
    """Return starts, ends, axes and steps, if all that are given are constants."""
    numbers: list[tuple[int, ...] | None] = []
    for value in (*node.inputs[1:], None, None)[:4]:
        array = S.constant_of(value)
        if value is not None and array is None:
            return None
        numbers.append(None if array is None else tuple(int(v) for v in array.ravel()))
    return tuple(numbers)


def _takes_all(x: ir.Value, y: ir.Value, numbers: tuple[tuple[int, ...] | None, ...]) -> bool:
    return S.same_shape(x, y) and all(step > 0 for step in numbers[3] or ())


__all__ = ["shared_slices"]
