"""Bodies of control flow, written into the graph around them."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.errors import ShapeError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.captured_values import subgraphs_of


def inline(op: OpBuilder, body: ir.Graph, inputs: list[ir.Value]) -> list[ir.Value]:
    """Append the nodes of a body once; return its outputs."""
    values: dict[ir.Value, ir.Value] = dict(zip(body.inputs, inputs, strict=True))
    for x in body.initializers.values():
        assert x.const_value is not None
        values[x] = op.const(x.const_value.numpy(), x.const_value.dtype)
    for node in body:
        if any(True for _ in subgraphs_of(node)):
            raise ShapeError("a body with control flow inside is not written out")
        new = ir.Node(
            node.domain,
            node.op_type,
            [None if x is None else values.get(x, x) for x in node.inputs],
            list(node.attributes.values()),
            num_outputs=len(node.outputs),
            version=node.version,
        )
        emitted = op.append(new)
        outputs = emitted if isinstance(emitted, tuple) else (emitted,)
        values |= dict(zip(node.outputs, outputs, strict=True))
    return [values.get(y, y) for y in body.outputs]
