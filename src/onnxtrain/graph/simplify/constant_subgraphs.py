"""Values that depend on no input and on no weight: masks, positions and what is made of them.

Exporters write a causal mask as a dozen nodes over numbers that are known. Each layer has a copy of
the last of them; equal ones are computed once.

What one node gives for known inputs, by the reference implementation of the standard.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.formula_tables import is_mask
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.inference import output_fits
from onnxtrain.graph.simplify.dead_code import equality_key

_UNSUPPORTED_DTYPES = (ir.DataType.BFLOAT16, ir.DataType.STRING)


def evaluate_node(
    node: ir.Node, arrays: Mapping[ir.Value, np.ndarray], opset: int
) -> np.ndarray | None:
    """Return a node's only output as an array of its type; ``None`` if that cannot be told."""
    given = [x for x in node.inputs if x is not None]
    if any(x.dtype in _UNSUPPORTED_DTYPES for x in given):
        return None
    graph = onnx.GraphProto(name="fold", node=[ir.serde.serialize_node(node)])
    feeds = {x.name or "": arrays[x] for x in given}
    for name in feeds:
        graph.input.append(onnx.ValueInfoProto(name=name))
    graph.output.append(onnx.ValueInfoProto(name=node.outputs[0].name))
    model = onnx.ModelProto(
        ir_version=10, graph=graph, opset_import=[onnx.OperatorSetIdProto(version=opset)]
    )
    from onnx.reference import ReferenceEvaluator  # large, and not needed to train

    try:
        with np.errstate(all="ignore"):
            (array,) = ReferenceEvaluator(model).run(None, feeds)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, MemoryError):
        return None  # the node stays; the runtime will say what is wrong with it, if anything
    array = np.asarray(array)
    y = node.outputs[0]
    return array if y.dtype is not None and array.dtype == y.dtype.numpy() else None


_FOLDABLE_OPS = (
    *("Abs", "Add", "And", "Cast", "Clip", "Concat", "ConstantOfShape", "CumSum", "Div", "Equal"),
    *("Expand", "Gather", "GatherElements", "GatherND", "Greater", "GreaterOrEqual", "Identity"),
    *("IsInf", "IsNaN", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or"),
    *("Range", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Sign", "Slice"),
    *("Squeeze", "Sub", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where", "Xor"),
)
_SAMPLE = 64
_INTEGER_DTYPES = (ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64)


class FoldableValues:
    """The values of a graph that are computed from known numbers alone.

    Args:
        graph: with its parameters as inputs, so that they are not among the numbers.
        opset: of its operators.
        limit: of elements that a value may have to be computed.
    """

    def __init__(self, graph: ir.Graph, opset: int, limit: int) -> None:
        self._opset, self._limit = opset, limit
        self._producers: dict[ir.Value, ir.Node] = {}
        self._known: dict[ir.Value, np.ndarray | None] = {}
        self._first: dict[tuple, ir.Value] = {}
        self._same: dict[ir.Value, ir.Value] = {}
        for node in nodes(graph, *_FOLDABLE_OPS):
            if len(node.outputs) == 1 and self._is_foldable(node):
                self._producers[node.outputs[0]] = node

    def __contains__(self, x: ir.Value | None) -> bool:
        """Return whether nodes compute a value from known numbers, or it is several of them."""
        if x is None or x in self._producers:
            return x is not None
        return x.const_value is not None and x.const_value.size > 1 and self._is_number(x)

    def array(self, x: ir.Value) -> np.ndarray | None:
        """Return the elements of a value, ``None`` if they cannot be told."""
        pending = [x]
        while pending:
            y = pending[-1]
            node = self._producers.get(y)
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

    def _is_foldable(self, node: ir.Node) -> bool:
        sizes = D.static_sizes(S.dims_of(node.outputs[0]))
        if sizes is None or math.prod(sizes) > self._limit or node.outputs[0].is_graph_output():
            return False
        given = [x for x in node.inputs if x is not None]
        if not all(
            x in self._producers or self._is_number(x) or self._is_uniform(x) for x in given
        ):
            return False
        return output_fits(node, self._limit)

    def _is_number(self, x: ir.Value) -> bool:
        """Return whether an initializer is no weight, by its type, size or values."""
        tensor = x.const_value
        if tensor is None or x.is_graph_input() or tensor.size > self._limit:
            return False
        if x.dtype in _INTEGER_DTYPES or tensor.size == 1 or S.is_generated_constant(x):
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
