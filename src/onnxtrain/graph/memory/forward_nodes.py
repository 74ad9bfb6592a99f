"""The nodes that a value is made by: of the first output of a training graph, the forward pass."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.captured_values import captured


def forward_nodes(graph: ir.Graph) -> set[ir.Node]:
    """Return the nodes behind the first output, which is the loss, or what the model gives."""
    return ancestors(graph.outputs[0]) if graph.outputs else set()


def ancestors(value: ir.Value) -> set[ir.Node]:
    """Return the nodes that a value is made by."""
    seen: set[ir.Node] = set()
    pending = [value.producer()]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [x.producer() for x in (*node.inputs, *captured(node)) if x is not None]
    return seen


__all__ = ["ancestors", "forward_nodes"]
