"""Values that depend on no input and on no weight: masks, positions and what is made of them.

Exporters write a causal mask as a dozen nodes over numbers that are known. Each layer has a copy of
the last of them; equal ones are computed once.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.roles.fixed_values import is_mask
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.fold_budget import within_elements
from onnxtrain.graph.simplify.evaluate_node import evaluate_node
from onnxtrain.graph.simplify.redundant import equality_key

_COMPUTED = (
    *("Abs", "Add", "And", "Cast", "Clip", "Concat", "ConstantOfShape", "CumSum", "Div", "Equal"),
    *("Expand", "Gather", "GatherElements", "GatherND", "Greater", "GreaterOrEqual", "Identity"),
    *("IsInf", "IsNaN", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or"),
    *("Range", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Sign", "Slice"),
    *("Squeeze", "Sub", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where", "Xor"),
)
_SAMPLE = 64
_COUNTS = (ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64)


class ClosedValues:
    """The values of a graph that are computed from known numbers alone.

    Args:
        graph: with its parameters as inputs, so that they are not among the numbers.
        opset: of its operators.
        limit: of elements that a value may have to be computed.
    """

    def __init__(self, graph: ir.Graph, opset: int, limit: int) -> None:
        self._opset, self._limit = opset, limit
        self._made: dict[ir.Value, ir.Node] = {}
        self._known: dict[ir.Value, np.ndarray | None] = {}
        self._first: dict[tuple, ir.Value] = {}
        self._same: dict[ir.Value, ir.Value] = {}
        for node in nodes(graph, *_COMPUTED):
            if len(node.outputs) == 1 and self._is_closed(node):
                self._made[node.outputs[0]] = node

    def __contains__(self, x: ir.Value | None) -> bool:
        """Return whether nodes compute a value from known numbers, or it is several of them."""
        if x is None or x in self._made:
            return x is not None
        return x.const_value is not None and x.const_value.size > 1 and self._is_number(x)

    def array(self, x: ir.Value) -> np.ndarray | None:
        """Return the elements of a value, ``None`` if they cannot be told."""
        pending = [x]
        while pending:
            y = pending[-1]
            node = self._made.get(y)
            if y in self._known or node is None:
                pending.pop()
                if y not in self._known:
                    self._known[y] = self._constant(y)
                continue
            missing = [z for z in node.inputs if z is not None and z not in self._known]
            pending += missing
            if not missing:
                self._known[y] = self._computed(node)
        return self._known[x]

    def _is_closed(self, node: ir.Node) -> bool:
        sizes = D.numbers(S.dims_of(node.outputs[0]))
        if sizes is None or math.prod(sizes) > self._limit or node.outputs[0].is_graph_output():
            return False
        given = [x for x in node.inputs if x is not None]
        if not all(x in self._made or self._is_number(x) or self._is_uniform(x) for x in given):
            return False
        return within_elements(node, self._limit)

    def _is_number(self, x: ir.Value) -> bool:
        """Return whether an initializer is no weight, by its type, size or values."""
        tensor = x.const_value
        if tensor is None or x.is_graph_input() or tensor.size > self._limit:
            return False
        if x.dtype in _COUNTS or tensor.size == 1 or S.is_own_constant(x):
            return True
        return S.is_float(x) and is_mask(tensor.numpy())

    def _is_uniform(self, x: ir.Value) -> bool:
        """Return whether all elements are equal, as in the mask that stands for none."""
        array = S.constant_of(x)
        if array is None or not 0 < array.size <= self._limit:
            return False
        some = array.reshape(-1)[:_SAMPLE]  # weights are told apart without reading all of them
        return bool((some == some[0]).all() and (array == some[0]).all())

    def _computed(self, node: ir.Node) -> np.ndarray | None:
        arrays = {x: self._known[x] for x in node.inputs if x is not None}
        given = {x: a for x, a in arrays.items() if a is not None}
        y = node.outputs[0]
        if len(given) < len(arrays) or y.dtype is None:
            return None
        key = equality_key(node, [self._same[x] if x is not None else None for x in node.inputs])
        first = self._same[y] = y if key is None else self._first.setdefault(key, y)
        if first is not y:
            return self._known[first]
        if is_op(node, "Cast"):
            (array,) = given.values()
            with np.errstate(all="ignore"):
                return array.astype(y.dtype.numpy())
        return evaluate_node(node, given, self._opset)

    def _constant(self, x: ir.Value) -> np.ndarray | None:
        array = S.constant_of(x)
        if array is not None:
            self._same[x] = self._first.setdefault((x.dtype, array.shape, array.tobytes()), x)
        return array


__all__ = ["ClosedValues"]
