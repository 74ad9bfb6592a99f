"""What running a model would cost, as far as its sizes tell, before it is run to be verified."""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir

from onnxtrain.errors import VerificationError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_standard

_ELEMENTS = 1 << 27  # of one tensor
_READS = 1 << 34  # elements that the windows of one pooling read
_STEPS = 1 << 18  # of a recurrent operator
_ITERATIONS = 1 << 20  # of the nodes in the body of a loop
_SIZE = 3  # what a size that is only known by name is taken for
_POOLS = frozenset({"AveragePool", "LpPool", "MaxPool"})
_RECURRENT = frozenset({"GRU", "LSTM", "RNN"})


def check_run_budget(model: ir.Model) -> None:
    """Raise an error if a model with inferred shapes would take too long, or too much memory.

    Raises:
        VerificationError: naming the nodes.
    """
    over = [
        f"node {node.name!r}: {S.describe(node)}: {why}"
        for node in model.graph.all_nodes()
        if is_standard(node)
        for why in _excess(node)
    ]
    if over:
        raise VerificationError(
            "\n  ".join(["the model is too large to be verified, or cannot be run:", *over[:5]])
            + "\nhint: lower with verify=False and compare on inputs of your own"
        )


def _excess(node: ir.Node) -> Iterator[str]:
    for y in node.outputs:
        elements = _elements(y)
        if elements > _ELEMENTS:
            yield f"{S.describe_value(y)} has {elements} elements, the limit is {_ELEMENTS}"
        elif node.op_type in _POOLS and "kernel_shape" in node.attributes:
            reads = elements * math.prod(node.attributes["kernel_shape"].as_ints())
            if reads > _READS:
                yield f"its windows read {reads} elements, the limit is {_READS}"
    if node.op_type in _RECURRENT and node.inputs[0] is not None:
        dims = S.dims_of(node.inputs[0]) or (1,)
        if isinstance(dims[0], int) and dims[0] > _STEPS:
            yield f"{dims[0]} steps, the limit is {_STEPS}"
        if 0 in dims:
            yield "onnxruntime ends the process where a recurrent operator gets no elements"
    if node.op_type == "Loop" and _is_counted(node):
        trips = S.constant_of(node.inputs[0])
        body = max(1, len(node.attributes["body"].as_graph()))
        if trips is not None and trips.size == 1 and int(trips.reshape(-1)[0]) * body > _ITERATIONS:
            yield f"{int(trips.reshape(-1)[0])} steps, the limit is {_ITERATIONS // body}"


def _elements(x: ir.Value) -> int:
    dims = S.dims_of(x)
    return math.prod(d if isinstance(d, int) else _SIZE for d in dims or ())


def _is_counted(node: ir.Node) -> bool:
    """Return whether a Loop never ends before its count: its condition stays as it is."""
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
