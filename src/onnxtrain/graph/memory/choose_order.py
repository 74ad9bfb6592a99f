"""The order of nodes in a file that needs the least memory, of those that are worth a try."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.memory.peak import Sizes, peak_of
from onnxtrain.graph.memory.run_order import run_order
from onnxtrain.graph.simplify.file_order import file_order

_SIZE = 32  # what a symbolic size counts as


def order_for_memory(graph: ir.Graph) -> None:
    """Reorder the nodes of a graph, in place, so that onnxruntime needs little memory to run it.

    Two orders are compared by the most memory that results take at a time: the graph's own, and the
    one that makes onnxruntime follow it. Layers without large products, whose weights' gradients
    may wait, want the second; of convolutions, the first lets windows be gathered late.
    """
    own = list(graph)
    other = file_order(own)
    sizes = Sizes(other=_SIZE)
    outputs = {y.name or "" for y in graph.outputs}
    first, second = (peak_of(run_order(nodes), sizes, outputs) for nodes in (own, other))
    if second < first:
        graph.remove(own)
        graph.extend(other)
