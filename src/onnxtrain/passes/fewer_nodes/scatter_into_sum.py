"""Rows scattered into a sum instead of into zeros that are added to it.

A table that is both looked up and multiplied by, such as tied embeddings, has two gradients: a
whole one, and a few rows added up in a table of zeros. The rows can be added to the whole one.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import is_op, nodes


def scatter_into_sum(model: ir.Model, op: OpBuilder) -> int:
    """Let a ScatterND start from what would be added to it; return how many do."""
    changed = 0
    for node in nodes(model.graph, "Add"):
        for rows, whole in (tuple(node.inputs), tuple(reversed(node.inputs))):
            scatter = _scattered(rows, node)
            if scatter is None or whole is None or not S.same_shape(whole, node.outputs[0]):
                continue
            op.position = node
            y = node.outputs[0]
            new = op.ScatterND(whole, *scatter.inputs[1:], reduction="add")
            replace_value(y, new, list(y.uses()))
            changed += 1
            break
    return changed


def _scattered(x: ir.Value | None, reader: ir.Node) -> ir.Node | None:
    """Return the node that adds rows to zeros, if only ``reader`` reads the result."""
    node = None if x is None else x.producer()
    if x is None or node is None or len(x.uses()) != 1 or x.is_graph_output():
        return None
    kind = node.attributes.get("reduction")
    if not is_op(node, "ScatterND") or kind is None or kind.as_string() != "add":
        return None
    same = node.graph is reader.graph and S.same_shape(x, reader.outputs[0])
    return node if same and _is_zero(node.inputs[0]) else None


def _is_zero(x: ir.Value | None) -> bool:
    node = None if x is None else x.producer()
    if node is not None and is_op(node, "ConstantOfShape"):
        value = node.attributes.get("value")
        return value is None or not value.as_tensor().numpy().any()
    array = None if x is None else S.constant_of(x)
    return array is not None and not array.any()


__all__ = ["scatter_into_sum"]
