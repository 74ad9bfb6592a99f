"""One value put in the place of another."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir


def replace_value(old: ir.Value, new: ir.Value, uses: Sequence[tuple[ir.Node, int]]) -> None:
    """Let ``uses`` of ``old`` read ``new``; as an output of the graph it goes by the old name."""
    for node, index in uses:
        node.replace_input_with(index, new)
    if old.shape is not None:
        new.shape = old.shape
    graph, name = old.graph, old.name
    if not old.is_graph_output() or graph is None:
        return
    for i, y in enumerate(graph.outputs):
        if y is old:
            graph.outputs[i] = new
    old.name, new.name = f"{name}.inner", name
