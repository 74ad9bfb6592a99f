"""Sums of pieces that lie side by side become one tensor put together from them.

The gradients of slices of one tensor are slices of its gradient, each padded with zeros to the
whole and added to the others. Where the pieces do not overlap, a Concat does the same in one pass.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_standard


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A tensor padded with zeros along one axis."""

    x: ir.Value
    axis: int
    before: int
    size: int
    after: int


def pads_to_concat(node: ir.Node) -> int:
    """Turn a sum of padded pieces that fill the whole into their Concat; give 1 if it did."""
    if node.op_type != "Add" or node.outputs[0].dtype not in S.FLOATS:
        return 0
    pieces = _pieces(node, node)
    if pieces is None:
        return _sum_before_view(node)
    pieces.sort(key=lambda p: p.before)
    end = 0
    for piece in pieces:
        if piece.axis != pieces[0].axis or piece.before != end:
            return 0
        end += piece.size
    if pieces[-1].after:
        return 0
    node.op_type = "Concat"
    node.attributes["axis"] = ir.AttrInt64("axis", pieces[0].axis)
    node.resize_inputs(len(pieces))
    for i, piece in enumerate(pieces):
        node.replace_input_with(i, piece.x)
    return 1


def _sum_before_view(node: ir.Node) -> int:
    """Add padded pieces of one shape before they are joined to another shape, not behind."""
    first, second = (_own(x, node, "Reshape") for x in node.inputs)
    if first is None or second is None or first is second:
        return 0
    a, b, sizes = first.inputs[0], second.inputs[0], second.inputs[1]
    if _own(a, first, "Pad", "Concat") is None or _own(b, second, "Pad", "Concat") is None:
        return 0
    assert a is not None
    assert b is not None
    if not S.same_shape(a, b) or not S.same_shape(first.outputs[0], second.outputs[0]):
        return 0
    graph = node.graph
    assert graph is not None
    graph.remove(second)  # it becomes the sum, and the sum becomes the view
    node.op_type, second.op_type = "Reshape", "Add"
    node.attributes.update(second.attributes)
    second.attributes.clear()
    second.replace_input_with(0, a)
    second.replace_input_with(1, b)
    graph.insert_before(node, second)
    node.replace_input_with(0, second.outputs[0])
    node.replace_input_with(1, sizes)
    S.set_dims(second.outputs[0], S.dims_of(a))
    return 1


def _own(x: ir.Value | None, node: ir.Node, *kinds: str) -> ir.Node | None:
    """Return what makes a value that only one node reads, if it is of some kind."""
    before = None if x is None else x.producer()
    if x is None or before is None or before.graph is not node.graph or not is_standard(before):
        return None
    return before if before.op_type in kinds and _is_private(x) else None


def _is_private(x: ir.Value) -> bool:
    return len(x.uses()) == 1 and not x.is_graph_output()


def _pieces(node: ir.Node, last: ir.Node) -> list[_Piece] | None:
    """Return the pieces that a tree of sums adds up, if all its terms are some."""
    pieces: list[_Piece] = []
    for x in node.inputs:
        before = None if x is None else x.producer()
        if x is None or before is None or before.graph is not last.graph:
            return None
        if len(x.uses()) != 1 or x.is_graph_output() or not is_standard(before):
            return None
        if before.op_type == "Add":
            more = _pieces(before, last)
            if more is None:
                return None
            pieces += more
        else:
            piece = _piece(x, before, last.outputs[0])
            if piece is None:
                return None
            pieces.append(piece)
    return pieces


def _piece(x: ir.Value, pad: ir.Node, whole: ir.Value) -> _Piece | None:
    """Return what a Pad of zeros along one axis makes."""
    mode = pad.attributes.get("mode")
    if pad.op_type != "Pad" or (mode is not None and mode.as_string() != "constant"):
        return None
    data, amounts, value, axes = (*pad.inputs, None, None)[:4]
    if axes is not None or data is None:
        return None
    if value is not None:
        number = S.constant_of(value)
        if number is None or number.any():
            return None
    pads, dims = S.constant_of(amounts), S.dims_of(data)
    if pads is None or dims is None or len(pads) != 2 * len(dims) or (pads < 0).any():
        return None
    padded = [i for i in range(len(dims)) if pads[i] or pads[i + len(dims)]]
    if len(padded) != 1 or not S.same_shape(x, whole):
        return None
    axis = padded[0]
    size = dims[axis]
    if not isinstance(size, int):
        return None
    return _Piece(data, axis, int(pads[axis]), size, int(pads[axis + len(dims)]))
