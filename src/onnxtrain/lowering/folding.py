"""Fold constants, remove inference no-ops, and bound the cost of a verification run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import VerificationError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_standard, nodes, subgraphs_of
from onnxtrain.graph.shapes.inference import output_fits
from onnxtrain.graph.simplify import RANDOM_OPS
from onnxtrain.lowering.types import undo_cast

_LIMIT = 1 << 20  # elements of a folded constant


def fold_constants(model: ir.Model, weights: frozenset[str]) -> None:
    """Replace nodes that depend on constants only by initializers, in place.

    ``weights`` do not count as constants: they keep their names and values.
    """
    graph, opset = model.graph, model.opset_imports[""]
    for node in list(graph):
        array = folded(node, opset, weights)
        if array is not None and not node.outputs[0].is_graph_output():
            _replace_by_initializer(graph, node, array)


def folded(node: ir.Node, opset: int, weights: frozenset[str]) -> np.ndarray | None:
    """Return the value of a node, ``None`` unless it depends on constants only."""
    if not is_standard(node) or node.op_type in RANDOM_OPS or any(True for _ in subgraphs_of(node)):
        return None
    y = node.outputs[0]
    if len(node.outputs) != 1 or y.dtype is None or not isinstance(y.type, ir.TensorType):
        return None
    array = _inferred_ints(y)
    known = array is None and node.inputs and all(_is_constant(x, weights) for x in node.inputs)
    if known and output_fits(node, _LIMIT):
        array = _evaluate(node, opset)
    if array is None or array.size > _LIMIT or array.dtype != y.dtype.numpy():
        return None
    return np.asarray(array)


def remove_inference_no_ops(model: ir.Model) -> None:
    """Remove inference Dropout, casts to the same type, expands to the same shape, cast pairs."""
    for node in nodes(model.graph, subgraphs=True):
        graph = node.graph
        if not isinstance(graph, ir.Graph):
            continue
        x, y = node.inputs[0] if node.inputs else None, node.outputs[0] if node.outputs else None
        if node.op_type == "Concat":
            _drop_empty_parts(node)
        if x is None or y is None or y.is_graph_output():
            continue
        idle = (
            (node.op_type == "Dropout" and _is_inference_dropout(node))
            or (node.op_type == "Cast" and x.dtype == y.dtype and x.dtype is not None)
            or (node.op_type == "Expand" and S.same_shape(x, y))
        )
        source = x if idle else undo_cast(node)
        if source is not None:
            y.replace_all_uses_with(source)
            graph.remove(node, safe=True)


def _drop_empty_parts(node: ir.Node) -> None:
    """Remove empty inputs from a Concat."""
    axis = node.attributes["axis"].as_int()
    dims = [None if x is None else S.dims_of(x) for x in node.inputs]
    if any(sizes is not None and not -len(sizes) <= axis < len(sizes) for sizes in dims):
        return  # shape inference reports it
    nonempty = [
        x for x, sizes in zip(node.inputs, dims, strict=True) if not sizes or sizes[axis] != 0
    ]
    if nonempty and len(nonempty) < len(node.inputs):
        for i, x in enumerate(nonempty):
            node.replace_input_with(i, x)
        node.resize_inputs(len(nonempty))


def _is_inference_dropout(node: ir.Node) -> bool:
    if len(node.outputs) > 1 and node.outputs[1].uses():
        return False
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return True
    training = S.constant_of(node.inputs[2])
    return training is not None and not bool(training)


def _is_constant(x: ir.Value | None, weights: frozenset[str]) -> bool:
    if x is None:
        return True
    known = x.const_value is not None and not x.is_graph_input() and x.name not in weights
    return known and x.const_value.size <= _LIMIT  # pyright: ignore[reportOptionalMemberAccess]


def _inferred_ints(y: ir.Value) -> np.ndarray | None:
    """Return integers that shape inference knows."""
    elements, dims = S.symbolic_of(y), S.dims_of(y)
    if elements is None or dims is None or len(dims) > 1 or y.dtype is None:
        return None
    if not all(isinstance(e, int) for e in elements):
        return None
    return np.asarray(elements, y.dtype.numpy()).reshape(() if dims == () else (-1,))


def _evaluate(node: ir.Node, opset: int) -> np.ndarray | None:
    feeds = {
        x.name or "": x.const_value.numpy()
        for x in node.inputs
        if x is not None and x.const_value is not None
    }
    graph = onnx.GraphProto(name="fold", node=[ir.serde.serialize_node(node)])
    graph.input.extend(onnx.ValueInfoProto(name=name) for name in feeds)
    graph.output.append(onnx.ValueInfoProto(name=node.outputs[0].name))
    imports = [onnx.OperatorSetIdProto(version=opset)]
    from onnx.reference import ReferenceEvaluator  # large, and not needed to train

    try:
        with np.errstate(all="ignore"):
            evaluator = ReferenceEvaluator(
                onnx.ModelProto(ir_version=10, graph=graph, opset_import=imports)
            )
            (array,) = evaluator.run(None, feeds)
    except (
        RuntimeError,
        TypeError,
        ValueError,
        IndexError,
        NotImplementedError,
        AttributeError,
        MemoryError,
    ):
        return None  # the node stays as it is
    return np.asarray(array) if not isinstance(array, list) else None


def _replace_by_initializer(graph: ir.Graph, node: ir.Node, array: np.ndarray) -> None:
    y = node.outputs[0]
    name = y.name or ""
    assert y.dtype is not None
    tensor = ir.Tensor(np.ascontiguousarray(array).reshape(array.shape), dtype=y.dtype, name=name)
    value = ir.Value(
        name=name, type=ir.TensorType(y.dtype), shape=ir.Shape(array.shape), const_value=tensor
    )
    y.name = f"{name}.folded"
    y.replace_all_uses_with(value)
    graph.remove(node, safe=True)
    graph.register_initializer(value)


_MAX_ELEMENTS = 1 << 27  # of one tensor
_MAX_COMPARED = 1 << 26  # elements of an output, which is compared in float64
_MAX_READS = 1 << 34  # elements read by the windows of one pooling node
_MAX_STEPS = 1 << 18  # of a recurrent operator
_MAX_ITERATIONS = 1 << 20  # steps of a loop times nodes of its body
_ASSUMED_SIZE = 3  # of a symbolic dimension
_POOLS = frozenset({"AveragePool", "LpPool", "MaxPool"})
_RECURRENT = frozenset({"GRU", "LSTM", "RNN"})


def with_assumed_sizes(model: onnx.ModelProto, sizes: Mapping[str, int]) -> onnx.ModelProto:
    """Return a copy whose inputs have the sizes of a run, for shape inference to continue from."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for x in copy.graph.input:
        for d in x.type.tensor_type.shape.dim:
            if not d.HasField("dim_value"):
                d.dim_value = sizes.get(d.dim_param, _ASSUMED_SIZE)
    return copy


def check_run_budget(model: ir.Model) -> None:
    """Raise if running a model with inferred shapes would take too much time or memory.

    Raises:
        VerificationError: with the names of the nodes.
    """
    over = [
        f"node {node.name!r}: {S.describe(node)}: {why}"
        for node in model.graph.all_nodes()
        if is_standard(node)
        for why in _excess(node)
    ]
    if over:
        raise VerificationError(
            "\n  ".join(["the model is too large to verify, or cannot be run:", *over[:5]])
            + "\nhint: lower with verify=False and compare on inputs of your own"
        )


def _excess(node: ir.Node) -> Iterator[str]:
    for y in node.outputs:
        elements = _elements(y)
        limit = _MAX_COMPARED if y.is_graph_output() else _MAX_ELEMENTS
        if elements > limit:
            yield f"{S.describe_value(y)} has {elements} elements, the limit is {limit}"
        elif node.op_type in _POOLS and "kernel_shape" in node.attributes:
            reads = elements * math.prod(node.attributes["kernel_shape"].as_ints())
            if reads > _MAX_READS:
                yield f"its windows read {reads} elements, the limit is {_MAX_READS}"
    if node.op_type in _RECURRENT and node.inputs[0] is not None:
        dims = S.dims_of(node.inputs[0]) or (1,)
        if isinstance(dims[0], int) and dims[0] > _MAX_STEPS:
            yield f"{dims[0]} steps, the limit is {_MAX_STEPS}"
        if 0 in dims:
            yield "onnxruntime crashes on recurrent operators with empty inputs"
    if node.op_type == "Loop" and _is_counted(node):
        trips = S.constant_of(node.inputs[0])
        body = max(1, len(node.attributes["body"].as_graph()))
        if (
            trips is not None
            and trips.size == 1
            and int(trips.reshape(-1)[0]) * body > _MAX_ITERATIONS
        ):
            yield f"{int(trips.reshape(-1)[0])} steps, the limit is {_MAX_ITERATIONS // body}"


def _elements(x: ir.Value) -> int:
    dims = S.dims_of(x)
    return math.prod(d if isinstance(d, int) else _ASSUMED_SIZE for d in dims or ())


def _is_counted(node: ir.Node) -> bool:
    """Return whether a Loop always runs to its trip count: its condition is constant."""
    body = node.attributes["body"].as_graph()
    if len(body.inputs) < 2 or not body.outputs:
        return False
    condition = body.outputs[0]
    while (producer := condition.producer()) is not None:
        source = producer.inputs[0] if producer.op_type == "Identity" else None
        if source is None:
            return producer.op_type == "Constant"
        condition = source
    return condition is body.inputs[1] or S.constant_of(condition) is not None
