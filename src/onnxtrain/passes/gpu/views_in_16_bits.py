"""What moves elements between two casts, in the short type.

``short(move(wide(x))) = move(x)`` for a number ``x`` of the short type, which a cast to float32 and
back leaves as it is. Such pairs are left where an operator between them is gone: two passes less,
and half the bytes for what is transposed.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.copy_nodes import copy_node
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.simplify.redundant import remove_dead_nodes

_MOVES = ("Gather", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
_SHORT = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)


def views_in_16_bits(model: ir.Model, op: OpBuilder) -> int:
    """Move elements in the type that they come from and go to; return how many casts went."""
    remove_dead_nodes(op.graph)
    moved: dict[ir.Value, ir.Value] = {}
    changed = 0
    for node in nodes(op.graph, "Cast"):
        x, y = node.inputs[0], node.outputs[0]
        if x is None or y.is_graph_output() or y.dtype not in _SHORT:
            continue
        chain = _chain(x, y.dtype)
        if chain is None:
            continue
        op.position = node
        replace_value(y, _moved(op, chain, moved), list(y.uses()))
        changed += 1
    return changed


def _chain(x: ir.Value, short: ir.DataType | None) -> list[ir.Node] | None:
    """Return the nodes from a cast of a short number to ``x``, the cast first."""
    chain: list[ir.Node] = []
    home = None
    while (node := x.producer()) is not None and home in (None, node.graph):
        home = node.graph
        chain.insert(0, node)
        source = node.inputs[0]
        if source is None:
            return None
        if is_op(node, "Cast"):
            return chain if source.dtype == short and x.dtype == ir.DataType.FLOAT else None
        if not is_op(node, *_MOVES):
            return None
        x = source
    return None


def _moved(op: OpBuilder, chain: list[ir.Node], moved: dict[ir.Value, ir.Value]) -> ir.Value:
    """Return what the nodes behind the first give for its input as it is."""
    x = chain[0].inputs[0]
    assert x is not None
    for node in chain[1:]:
        y = node.outputs[0]
        if y not in moved:
            moved[y] = copy_node(op, node, [x, *node.inputs[1:]])
            moved[y].shape = y.shape
        x = moved[y]
    return x


__all__ = ["views_in_16_bits"]
