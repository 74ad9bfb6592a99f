"""Evaluate subgraphs that depend on constants only: masks, positions and what derives from them.

Exporters compute a causal mask with a dozen nodes from constants, and each layer repeats the last
of these nodes. :class:`FoldableValues` finds such subgraphs and computes equal nodes once;
:func:`evaluate_node` computes one node with onnx's reference implementation.
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
    """Compute the only output of a node; return ``None`` if the evaluation fails."""
    inputs = [x for x in node.inputs if x is not None]
    if any(x.dtype in _UNSUPPORTED_DTYPES for x in inputs):
        return None
    graph = onnx.GraphProto(name="fold", node=[ir.serde.serialize_node(node)])
    feeds = {x.name or "": arrays[x] for x in inputs}
    for name in feeds:
        graph.input.append(onnx.ValueInfoProto(name=name))
    graph.output.append(onnx.ValueInfoProto(name=node.outputs[0].name))
    model = onnx.ModelProto(
        ir_version=10, graph=graph, opset_import=[onnx.OperatorSetIdProto(version=opset)]
    )
    from onnx.reference import ReferenceEvaluator  # slow to import; most models do not need it

    try:
        with np.errstate(all="ignore"):
            (array,) = ReferenceEvaluator(model).run(None, feeds)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, MemoryError):
        return None  # keep the node: the runtime reports what is wrong with it, if anything
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
_SAMPLE = 64  # elements compared before the whole array is read
_INTEGER_DTYPES = (ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64)


class FoldableValues:
    """The values of a graph that depend on constants only, evaluated on demand.

    Args:
        graph: the graph; its parameters must be inputs, so that they do not count as constants.
        opset: the opset of its operators.
        limit: largest number of elements of a value to compute.
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
        """Return whether a value is computed from constants, or a constant that is not a scalar."""
        if x is None or x in self._producers:
            return x is not None
        return x.const_value is not None and x.const_value.size > 1 and self._is_constant(x)

    def array(self, x: ir.Value) -> np.ndarray | None:
        """Return the elements of a value, ``None`` if they cannot be computed."""
        pending = [x]
        while pending:
            y = pending[-1]
            node = self._producers.get(y)
            if y in self._known or node is None:
                pending.pop()
                if y not in self._known:
                    self._known[y] = self._constant_array(y)
                continue
            missing = [z for z in node.inputs if z is not None and z not in self._known]
            pending += missing
            if not missing:
                self._known[y] = self._evaluate(node)
        return self._known[x]

    def _is_foldable(self, node: ir.Node) -> bool:
        sizes = D.static_sizes(S.dims_of(node.outputs[0]))
        if sizes is None or math.prod(sizes) > self._limit or node.outputs[0].is_graph_output():
            return False
        inputs = [x for x in node.inputs if x is not None]
        if not all(
            x in self._producers or self._is_constant(x) or self._is_uniform(x) for x in inputs
        ):
            return False
        return output_fits(node, self._limit)

    def _is_constant(self, x: ir.Value) -> bool:
        """Return whether an initializer cannot be a weight, by its dtype, size or values."""
        tensor = x.const_value
        if tensor is None or x.is_graph_input() or tensor.size > self._limit:
            return False
        if x.dtype in _INTEGER_DTYPES or tensor.size == 1 or S.is_generated_constant(x):
            return True
        return S.is_float(x) and is_mask(tensor.numpy())

    def _is_uniform(self, x: ir.Value) -> bool:
        """Return whether all elements of an initializer are equal, as in a mask of zeros."""
        array = S.constant_of(x)
        if array is None or not 0 < array.size <= self._limit:
            return False
        sample = array.reshape(-1)[:_SAMPLE]  # rules out most weights without reading them
        return bool((sample == sample[0]).all() and (array == sample[0]).all())

    def _evaluate(self, node: ir.Node) -> np.ndarray | None:
        inputs = [x for x in node.inputs if x is not None]
        arrays = {x: a for x in inputs if (a := self._known[x]) is not None}
        y = node.outputs[0]
        if any(x not in arrays for x in inputs) or y.dtype is None:
            return None
        key = equality_key(node, [self._same[x] if x is not None else None for x in node.inputs])
        first = self._same[y] = y if key is None else self._first.setdefault(key, y)
        if first is not y:
            return self._known[first]
        if is_op(node, "Cast"):
            (array,) = arrays.values()
            with np.errstate(all="ignore"):
                return array.astype(y.dtype.numpy())
        return evaluate_node(node, arrays, self._opset)

    def _constant_array(self, x: ir.Value) -> np.ndarray | None:
        array = S.constant_of(x)
        if array is not None:
            self._same[x] = self._first.setdefault((x.dtype, array.shape, array.tobytes()), x)
        return array
