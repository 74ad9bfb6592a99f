"""Parts of a packed projection, cut out where they lie.

torch's MultiheadAttention computes queries, keys and values side by side as ``[..., 3 E]``, brings
the three to the front, ``[3, ..., E]``, and picks each. A Split of the last axis gives the same
numbers without moving all of them first, and its gradient joins the parts without moving them back.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.prepare import mark_constants


def split_qkv(model: ir.Model, op: OpBuilder) -> int:
    """Cut packed projections where they lie; return how many."""
    graph, known, changed = model.graph, set(model.graph.initializers), 0
    for node in nodes(graph, "Transpose"):
        packed = _packed(node)
        if packed is None:
            continue
        x, parts, picks = packed
        here = OpBuilder(graph, "parts/", target=op.target, before=picks[0][0])
        dims = S.dims_of(x)
        assert dims is not None
        sizes = [here.dims(picks[0][0].outputs[0])[-1]] * parts
        cut = here.Split(x, here.const(sizes), axis=len(dims) - 1, _outputs=parts)
        for pick, index in picks:
            pick.outputs[0].replace_all_uses_with(cut[index])
        changed += 1
    mark_constants(model, set(graph.initializers) - known)
    return changed


def _packed(turn: ir.Node) -> tuple[ir.Value, int, list[tuple[ir.Node, int]]] | None:
    """Return what is packed, of how many parts, and the nodes that pick one each."""
    ahead = _before(turn, "Unsqueeze")
    apart = None if ahead is None else _before(ahead, "Reshape")
    after = _only_reader(turn, "Squeeze")
    if ahead is None or apart is None or after is None:
        return None
    x, wide = apart.inputs[0], S.dims_of(apart.outputs[0])
    dims = None if x is None else S.dims_of(x)
    if x is None or dims is None or wide is None or None in dims or len(dims) + 1 != len(wide):
        return None
    parts, width, rank = wide[-2], wide[-1], len(wide)
    if not isinstance(parts, int) or not isinstance(width, int) or dims[-1] != parts * width:
        return None
    if list(wide[:-2]) != list(dims[:-1]) or _axes(ahead, rank + 1) != [0]:
        return None
    perm = turn.attributes.get("perm")
    swapped = [rank - 1, *range(1, rank - 1), 0, rank]  # the new axis trades places with the parts
    if perm is None or list(perm.as_ints()) != swapped or _axes(after, rank + 1) != [rank - 1]:
        return None
    y, picks = after.outputs[0], []
    if y.is_graph_output():
        return None
    for node, at in y.uses():
        index = _index(node) if at == 0 and node.graph is turn.graph else None
        if index is None or not -parts <= index < parts or node.outputs[0].is_graph_output():
            return None
        picks.append((node, index % parts))
    order = {node: i for i, node in enumerate(turn.graph or ())}
    return (x, parts, sorted(picks, key=lambda p: order[p[0]])) if picks else None


def _before(node: ir.Node, kind: str) -> ir.Node | None:
    x = node.inputs[0]
    maker = None if x is None else x.producer()
    if x is None or maker is None or not is_op(maker, kind) or maker.graph is not node.graph:
        return None
    return maker if len(x.uses()) == 1 and not x.is_graph_output() else None


def _only_reader(node: ir.Node, kind: str) -> ir.Node | None:
    y = node.outputs[0]
    if len(y.uses()) != 1 or y.is_graph_output():
        return None
    ((reader, _),) = y.uses()
    return reader if is_op(reader, kind) and reader.graph is node.graph else None


def _axes(node: ir.Node, rank: int) -> list[int] | None:
    axes = S.constant_of((*node.inputs, None)[1])
    return None if axes is None else [int(a) % rank for a in axes]


def _index(node: ir.Node) -> int | None:
    """Return the position that a Gather of one element of the first axis reads."""
    axis = node.attributes.get("axis")
    if not is_op(node, "Gather") or (axis is not None and axis.as_int() != 0):
        return None
    index = S.constant_of(node.inputs[1])
    return int(index) if index is not None and index.ndim == 0 else None
