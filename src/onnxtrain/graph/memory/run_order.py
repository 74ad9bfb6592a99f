"""The order in which onnxruntime runs the nodes of a file."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.graph.captured_values import captured


def run_order(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """Return nodes, which are in the order of a file, in the order in which they run.

    The walk starts at the nodes that nothing reads and goes up to what they read, of several to the
    one that is last in the file first; a node runs when all that it reads has run.
    """
    place = {node: i for i, node in enumerate(nodes)}
    sources = [_sources(node, place) for node in nodes]
    read = {i for row in sources for i in row}
    pending = [(i, False) for i in range(len(nodes)) if i not in read]
    entered: set[int] = set()
    order: list[ir.Node] = []
    while pending:
        i, done = pending.pop()
        if done:
            order.append(nodes[i])
        elif i not in entered:
            entered.add(i)
            pending.append((i, True))
            pending += [(j, False) for j in sources[i] if j not in entered]
    return order


def _sources(node: ir.Node, place: dict[ir.Node, int]) -> list[int]:
    values = (x for x in (*node.inputs, *captured(node)) if x is not None)
    return sorted({place[p] for x in values if (p := x.producer()) in place})
