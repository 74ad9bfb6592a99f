"""The order of nodes in a file, so that onnxruntime runs them in an order that needs little memory.

A reverse sweep emits nodes in a good order: the gradient of a layer's weight directly behind that
of its input, and what is computed again from the forward pass only where it is needed. onnxruntime
does not keep it. It walks from the nodes that nothing reads up to what they read, of several always
to the one that is last in the file first, and runs a node when all that it reads is done. From a
file in the order of the sweep it computes again too early, and weights' gradients last.

So independent nodes are the other way round in the file: of those that could come next, the one
that is to run last, and behind all others the nodes that nothing reads. The walk then meets them in
the order of the sweep.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.graph.captured_values import captured


def file_order(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """Return nodes, which are in the order to be run in, in the order for a file."""
    place = {node: i for i, node in enumerate(nodes)}
    waiting: list[int] = []
    readers: list[list[int]] = [[] for _ in nodes]
    for i, node in enumerate(nodes):
        values = (x for x in (*node.inputs, *captured(node)) if x is not None)
        sources = {place[p] for x in values if (p := x.producer()) in place}
        waiting.append(len(sources))
        for source in sources:
            readers[source].append(i)
    ready = [-i for i, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    order: list[ir.Node] = []
    ends: list[int] = []
    while ready:
        i = -heapq.heappop(ready)
        if readers[i]:
            order.append(nodes[i])
        else:
            ends.append(i)
        for reader in readers[i]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, -reader)
    order += [nodes[i] for i in sorted(ends, reverse=True)]
    assert len(order) == len(nodes)
    return order


__all__ = ["file_order"]
