"""Loops whose states keep their shape, though one size has lost its name on the way.

A Reshape to the shape that the state came with says so; where it were not true, the run would fail,
because all other sizes are known to agree.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import nodes
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.graph.shapes.infer import infer_shapes


def pin_loop_states(model: ir.Model) -> list[str]:
    """Reshape what a Loop carries where a single size is open, in place; say how often."""
    graph, count = model.graph, 0
    for node in nodes(graph, "Loop", subgraphs=True):
        body = node.attributes["body"].as_graph()
        for i, inner in enumerate(body.inputs[2:], 1):
            after = body.outputs[i]
            tensors = isinstance(inner.type, ir.TensorType) and isinstance(
                after.type, ir.TensorType
            )
            if tensors and _is_open(S.dims_of(inner), S.dims_of(after)):
                body.outputs[i] = _like(body, after, inner)
                count += 1
    if count:
        infer_shapes(graph, model.opset_imports[""])
    return [f"{count} state(s) of Loop keep the shape they come with"] if count else []


def _is_open(before: tuple[Dim, ...] | None, after: tuple[Dim, ...] | None) -> bool:
    """Return whether shapes differ in one size, which is a plain name on both sides."""
    if before is None or after is None or len(before) != len(after):
        return False
    differing = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    if len(differing) != 1:
        return False
    return all(d is None or (isinstance(d, str) and d.isidentifier()) for d in differing[0])


def _like(body: ir.Graph, value: ir.Value, ref: ir.Value) -> ir.Value:
    shape = ir.node("Shape", [ref])
    same = ir.node("Reshape", [value, shape.outputs[0]])
    for made, what in ((shape, "shape"), (same, "kept")):
        made.outputs[0].name = f"{value.name}.{what}"
        made.name = f"{value.name}.{what}"
        body.append(made)
    same.outputs[0].type = value.type
    return same.outputs[0]
