"""Constants: nodes turned into initializers, small integer arithmetic folded."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import nodes
from onnxtrain.graph.shapes.fold_budget import within_elements
from onnxtrain.graph.simplify.evaluate_node import evaluate_node

_SMALL = 4096  # elements: what we fold ourselves; a runtime folds the rest when it loads the model

_FOLDABLE = frozenset(
    (
        *("Abs", "Add", "And", "Cast", "CastLike", "Concat", "ConstantOfShape", "Div", "Equal"),
        *("Expand", "Gather", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual"),
        *("Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Range", "Reciprocal", "ReduceMax"),
        *("ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Shape", "Size", "Slice", "Split"),
        *("Sqrt", "Squeeze", "Sub", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where"),
    )
)


def lift_constants(model: ir.Model) -> set[str]:
    """Turn Constant nodes and subgraph initializers into initializers; return their names."""
    before = set(model.graph.initializers)
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    passes.LiftSubgraphInitializersToMainGraphPass()(model)
    return set(model.graph.initializers) - before


def fold(model: ir.Model, constants: set[str], *, subgraphs: bool = False) -> set[str]:
    """Replace nodes whose outputs are known by initializers, in place; return the new names.

    Only ``constants`` count as known, never a parameter; and integers that shape inference found.
    With ``subgraphs``, the nodes of bodies are replaced too.
    """
    graph, opset = model.graph, model.opset_imports[""]
    added: set[str] = set()
    for node in nodes(graph, *_FOLDABLE, subgraphs=subgraphs):
        home = node.graph
        if len(node.outputs) != 1 or not isinstance(home, ir.Graph):
            continue
        y = node.outputs[0]
        if y.is_graph_output():
            continue
        array = _known_integers(y)
        if array is None and node.inputs:
            known = constants | added
            if all(_is_constant(x, known) for x in node.inputs) and within_elements(node, _SMALL):
                array = _evaluate(node, opset)
        if array is None or array.size > _SMALL:
            continue
        name = y.name or ""
        if home is not graph:  # another body may use the name
            name = _unused(f"{name}.known", graph)
        assert y.dtype is not None
        own = np.ascontiguousarray(array).reshape(array.shape)
        value = ir.Value(
            name=name,
            type=ir.TensorType(y.dtype),
            shape=ir.Shape(array.shape),
            const_value=ir.Tensor(own, dtype=y.dtype, name=name),
        )
        y.name = f"{name}.folded"
        y.replace_all_uses_with(value)
        home.remove(node, safe=True)
        graph.register_initializer(value)
        added.add(name)
    return added


def _unused(name: str, graph: ir.Graph) -> str:
    base, n = name, 2
    while name in graph.initializers:
        name, n = f"{base}.{n}", n + 1
    return name


def _is_constant(x: ir.Value | None, constants: set[str]) -> bool:
    if x is None:
        return True
    return (
        x.name in constants
        and x.const_value is not None
        and x.const_value.size <= _SMALL
        and not x.is_graph_input()
    )


def _known_integers(y: ir.Value) -> np.ndarray | None:
    elements, dims = S.symbolic_of(y), S.dims_of(y)
    if elements is None or dims is None or not all(isinstance(e, int) for e in elements):
        return None
    if len(dims) > 1 or y.dtype is None:
        return None
    array = np.asarray(elements, y.dtype.numpy())
    return array.reshape(()) if dims == () else array


def _evaluate(node: ir.Node, opset: int) -> np.ndarray | None:
    tensors = {x: x.const_value for x in node.inputs if x is not None}
    arrays = {x: t.numpy() for x, t in tensors.items() if t is not None}
    return evaluate_node(node, arrays, opset)
