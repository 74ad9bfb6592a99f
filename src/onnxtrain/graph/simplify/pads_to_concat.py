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
        return 0
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
