"""Constants and weights: lift them to initializers, fold what is known, repair what hides them.

    lift_constants       Constant nodes and initializers of subgraphs -> initializers
    fold_constants       small arithmetic on known values -> initializers
    expose_weights       weights in Constant nodes, bodies, local functions and ai.onnx.ml
                         attributes -> initializers, so that training can update them
    fuse_sigmoid         1 / (1 + exp(u)) -> Sigmoid(-u)
    drop_accuracy_level  MatMulNBits(accuracy_level=4) -> MatMulNBits(accuracy_level=0)

``fuse_sigmoid`` is needed for gradients: where ``exp(u)`` overflows, the quotient and its
derivative are 0, but the gradients of the separate operators are ``0 * inf``.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.opset_imports import RUNTIME_DOMAIN
from onnxtrain.graph.shapes.inference import output_fits
from onnxtrain.graph.simplify.constant_subgraphs import evaluate_node
from onnxtrain.importer.functions import inline_functions
from onnxtrain.importer.ml_models import rewrite_ml_operators
from onnxtrain.importer.parameters import lift_weights

_MAX_FOLDED_ELEMENTS = 4096  # a runtime folds larger constants when it loads the model

_FOLDABLE_OPS = frozenset(
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


def fold_constants(model: ir.Model, constants: set[str], *, subgraphs: bool = False) -> set[str]:
    """Replace nodes with known outputs by initializers, in place; return the new names.

    Known are ``constants`` (never a parameter) and integers from shape inference. With
    ``subgraphs``, nodes of bodies are replaced, too.
    """
    graph, opset = model.graph, model.opset_imports[""]
    added: set[str] = set()
    for node in nodes(graph, *_FOLDABLE_OPS, subgraphs=subgraphs):
        home = node.graph
        if len(node.outputs) != 1 or not isinstance(home, ir.Graph):
            continue
        y = node.outputs[0]
        if y.is_graph_output():
            continue
        array = _known_integers(y)
        if array is None and node.inputs:
            known = constants | added
            if all(_is_constant(x, known) for x in node.inputs) and output_fits(
                node, _MAX_FOLDED_ELEMENTS
            ):
                array = _evaluate_constant(node, opset)
        if array is None or array.size > _MAX_FOLDED_ELEMENTS:
            continue
        name = y.name or ""
        if home is not graph:  # another body may use the same name
            name = _unused_name(f"{name}.known", graph)
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


def _unused_name(name: str, graph: ir.Graph) -> str:
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
        and x.const_value.size <= _MAX_FOLDED_ELEMENTS
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


def _evaluate_constant(node: ir.Node, opset: int) -> np.ndarray | None:
    tensors = {x: x.const_value for x in node.inputs if x is not None}
    arrays = {x: t.numpy() for x, t in tensors.items() if t is not None}
    return evaluate_node(node, arrays, opset)


_MIN_WEIGHT_ELEMENTS = 16  # smaller tensors in a function are coefficients of its formula


def expose_weights(model: ir.Model) -> tuple[ir.Model, list[str]]:
    """Return the model with all weights as initializers, and lines for the report.

    The argument must not be used any more. Weights may be in Constant nodes, in bodies of If, Loop
    and Scan, in attributes of linear models, and in local functions, which are then inlined.
    """
    repairs = []
    if any(_holds_weights(function) for function in model.functions.values()):
        repairs.append(f"{len(model.functions)} local function(s) with weights inlined")
        model = inline_functions(model)
    repairs += rewrite_ml_operators(model)
    lifted = lift_weights(model)
    if lifted:
        repairs.append(f"{len(lifted)} weight(s) in Constant nodes or bodies became initializers")
    return model, repairs


def _holds_weights(function: ir.Function) -> bool:
    return any(_is_weight_constant(node) for node in function.all_nodes())


def _is_weight_constant(node: ir.Node) -> bool:
    value = node.attributes.get("value") if is_op(node, "Constant") else None
    if value is None or value.is_ref():
        return False
    tensor = value.as_tensor()
    return tensor.dtype.is_floating_point() and tensor.size >= _MIN_WEIGHT_ELEMENTS


def fuse_sigmoid(model: ir.Model) -> list[str]:
    """Replace ``1 / (1 + exp(u))`` by ``Sigmoid(-u)``, in place; return lines for the report."""
    count = 0
    for node in nodes(model.graph, "Reciprocal", "Div"):
        u = _sigmoid_input(node)
        if u is None:
            continue
        _replace_by_sigmoid(model.graph, node, u)
        count += 1
    return [f"{count} logistic function(s) that were written out became Sigmoid"] if count else []


def _sigmoid_input(node: ir.Node) -> ir.Value | None:
    """Return ``u`` if the node computes ``1 / (1 + exp(u))``."""
    if is_op(node, "Div") and not _is_number(node.inputs[0], 1.0):
        return None
    below = _producer(node.inputs[-1], "Add")
    if below is None:
        return None
    for one, other in (below.inputs, reversed(below.inputs)):
        power = _producer(other, "Exp")
        if power is not None and _is_number(one, 1.0):
            return power.inputs[0]
    return None


def _replace_by_sigmoid(graph: ir.Graph, node: ir.Node, u: ir.Value) -> None:
    old = node.outputs[0]
    negation = u.producer()
    x = None if negation is None else _negated(negation)
    if x is None:
        minus = ir.node("Neg", [u])
        x = minus.outputs[0]
        x.name, x.type, x.shape = f"{old.name}.negated", u.type, u.shape
        graph.insert_before(node, minus)
    sigmoid = ir.node("Sigmoid", [x], name=node.name)
    graph.insert_before(node, sigmoid)
    new = sigmoid.outputs[0]
    new.name, new.type, new.shape = old.name, old.type, old.shape
    old.name = f"{old.name}.replaced"
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _negated(node: ir.Node) -> ir.Value | None:
    """Return ``x`` if the node computes ``-x``."""
    if is_op(node, "Neg"):
        return node.inputs[0]
    if is_op(node, "Mul"):
        for number, x in (node.inputs, reversed(node.inputs)):
            if _is_number(number, -1.0):
                return x
    return None


def _producer(x: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if x is None else x.producer()
    return node if node is not None and is_op(node, op_type) else None


def _is_number(x: ir.Value | None, number: float) -> bool:
    """Return whether a value is a constant scalar; rank 0, so that it cannot change the shape."""
    if x is None or x.const_value is None or x.const_value.size != 1 or x.is_graph_input():
        return False
    array = S.constant_of(x)
    return array is not None and array.ndim == 0 and float(array) == number


def drop_accuracy_level(model: ir.Model) -> list[str]:
    """Forbid MatMulNBits to quantize its input to 8 bits, in place; return lines for the report.

    Its gradient assumes float operands. With accuracy_level 4 the forward pass would be off by up
    to a percent, and onnxruntime returns zeros if the scales are not constants.
    """
    count = 0
    for node in model.graph.all_nodes():
        if node.domain != RUNTIME_DOMAIN or "accuracy_level" not in node.attributes:
            continue
        count += node.attributes.pop("accuracy_level").as_int() != 0
    if not count:
        return []
    return [f"{count} product(s) with packed weights do not round their input (accuracy_level 0)"]
