"""Several nodes that take a tensor apart become one Split.

``qkv[0]``, ``qkv[1]``, ``qkv[2]`` come from exporters as three Gathers or Slices. The gradient of
each is as large as the whole tensor, and mostly zeros; the gradient of Split is one Concat.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder


@dataclasses.dataclass(frozen=True)
class _Part:
    """What a node takes: ``[start, end)`` of an axis, which it drops or keeps."""

    node: ir.Node
    axis: int
    start: int
    end: int
    drops: bool


def split_parts(model: ir.Model) -> int:
    """Rewrite the graph in place; give how many tensors are split. Values keep their names."""
    graph, count = model.graph, 0
    values = [*graph.inputs, *graph.initializers.values(), *(y for n in graph for y in n.outputs)]
    crowded = [x for x in values if len(x.uses()) > 1 and S.dims_of(x)]
    op = OpBuilder(graph, "prepare/") if crowded else None
    for x in crowded:
        for parts in _wholes(graph, x):
            assert op is not None
            _split(op, x, parts)
            count += 1
    return count


def _wholes(graph: ir.Graph, x: ir.Value) -> list[list[_Part]]:
    """Give the groups of nodes that take all of ``x`` along an axis, every place once."""
    found: dict[int, list[_Part]] = {}
    for use in x.uses():
        part = _part(use.node, x) if use.idx == 0 and use.node.graph is graph else None
        if part is not None:
            found.setdefault(part.axis, []).append(part)
    wholes = []
    for axis, parts in found.items():
        parts.sort(key=lambda p: p.start)
        ends = [p.end for p in parts]
        size = (S.dims_of(x) or ())[axis]
        if len(parts) > 1 and [p.start for p in parts] == [0, *ends[:-1]] and ends[-1] == size:
            wholes.append(parts)
    return wholes


def _part(node: ir.Node, x: ir.Value) -> _Part | None:
    if node.domain != "" or node.op_type not in ("Gather", "Slice"):
        return None
    dims = S.dims_of(x) or ()
    if node.op_type == "Gather":
        attribute, index = node.attributes.get("axis"), S.constant_of(node.inputs[1])
        axis = (0 if attribute is None else attribute.as_int()) % len(dims)
        size = dims[axis]
        if index is None or index.ndim or not isinstance(size, int):
            return None
        start = int(index) % size
        return _Part(node, axis, start, start + 1, drops=True)
    given = [S.constant_of(v) for v in node.inputs[1:]]
    if any(v is None or v.size != 1 for v in given) or len(given) < 3:
        return None
    starts, ends, axes, *steps = (int(np.ravel(v)[0]) for v in given if v is not None)
    axis = axes % len(dims)
    size = dims[axis]
    if not isinstance(size, int) or any(step != 1 for step in steps):
        return None
    start, end, _ = slice(starts, ends).indices(size)
    return _Part(node, axis, start, end, drops=False) if end > start else None


def _split(op: OpBuilder, x: ir.Value, parts: list[_Part]) -> None:
    graph = op.graph
    nodes = {p.node for p in parts}
    first = next(n for n in graph if n in nodes)
    inside = OpBuilder(graph, op.prefix, before=first, parent=op)
    axis = parts[0].axis
    sizes = inside.const([p.end - p.start for p in parts])
    pieces = inside.Split(x, sizes, axis=axis, _outputs=len(parts))
    fresh = [
        inside.Squeeze(piece, [axis]) if part.drops else piece
        for part, piece in zip(parts, pieces, strict=True)
    ]
    for part, new in zip(parts, fresh, strict=True):
        old = part.node.outputs[0]
        new.type, new.shape, name = old.type, old.shape, old.name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        graph.remove(part.node, safe=True)
        new.name = name
