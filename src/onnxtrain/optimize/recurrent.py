"""Unroll loops over time, in which recurrent layers run.

onnxruntime runs the body of a Scan from the host, node by node, and cannot capture it as a CUDA
graph. Where the number of steps is known, copies of the body can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.expand.control_flow import unroll
from onnxtrain.graph.builder import OpBuilder, replace_value
from onnxtrain.graph.nodes import nodes, subgraphs_of


def unroll_scans(model: ir.Model, op: OpBuilder) -> int:
    """Replace Scan nodes by a copy of their body for each step; return how many.

        before:  s, ys = Scan(s0, xs)
        after:   s1, y1 = body(s0, xs[0]);  s2, y2 = body(s1, xs[1]);  ...  ys = Concat(y1, y2 ...)

    The backward loop reads values of the forward loop step by step: without the Concat.
    """
    parts: dict[ir.Value, Sequence[ir.Value]] = {}
    return sum(_unroll(op, node, parts) for node in nodes(model.graph, "Scan"))


def _unroll(op: OpBuilder, node: ir.Node, parts: dict[ir.Value, Sequence[ir.Value]]) -> int:
    body = node.attributes["body"].as_graph()
    inputs = [x for x in node.inputs if x is not None]
    if len(inputs) < len(node.inputs) or any(any(subgraphs_of(n)) for n in body):
        return 0
    op.position = node

    def split(x: ir.Value, axis: int, steps: int) -> Sequence[ir.Value]:
        return parts[x] if x in parts and not axis else _split(op, x, axis, steps)

    unrolled = unroll(op, node, inputs, split, most_nodes=T.UNROLLED_LOOP_NODES)
    if unrolled is None:
        return 0
    results = list(unrolled.states)
    for pieces, axis in unrolled.stacks:
        stacked = _join(op, [op.Unsqueeze(p, [axis]) for p in pieces], axis)
        results.append(stacked)
        if not axis:
            parts[stacked] = pieces
    for old, new in zip(node.outputs, results, strict=False):
        if new.type is None:
            new.type = old.type
        replace_value(old, new, list(old.uses()))
    op.graph.remove(node, safe=True)
    return 1


def _split(op: OpBuilder, x: ir.Value, axis: int, steps: int) -> list[ir.Value]:
    """Return the slices of a value along an axis, by few Split nodes that can be captured."""
    size = T.CUDA_GRAPH_CONCAT_INPUTS
    chunks = [x]
    if steps > size:
        sizes = [min(size, steps - start) for start in range(0, steps, size)]
        chunks = _outputs(op.Split(x, op.const(sizes), axis=axis, _outputs=len(sizes)))
    slices = []
    for chunk in chunks:
        count = op.dims(chunk)[axis]
        assert isinstance(count, int)
        split = op.Split(chunk, op.const([1] * count), axis=axis, _outputs=count)
        slices += [op.Squeeze(s, [axis]) for s in _outputs(split)]
    return slices


def _join(op: OpBuilder, pieces: Sequence[ir.Value], axis: int) -> ir.Value:
    """Concatenate values, at most as many at once as can be captured."""
    size = T.CUDA_GRAPH_CONCAT_INPUTS
    while len(pieces) > 1:
        groups = [pieces[i : i + size] for i in range(0, len(pieces), size)]
        pieces = [op.Concat(*g, axis=axis) if len(g) > 1 else g[0] for g in groups]
    return pieces[0]


def _outputs(results: ir.Value | Sequence[ir.Value]) -> list[ir.Value]:
    return [results] if isinstance(results, ir.Value) else list(results)
