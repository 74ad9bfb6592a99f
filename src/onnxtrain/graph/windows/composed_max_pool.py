"""MaxPool as the largest of what its windows read."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.windows.geometry import pad, tap_slices, windows


def max_pool(
    op: OpBuilder,
    x: ir.Value,
    *,
    node: ir.Node,
    dilations: list[int] | None,
    kernel_shape: list[int],
    pads: list[int] | None,
    strides: list[int] | None,
) -> ir.Value | None:
    """``y = Max(tap slices of x)``, padded with minus infinity."""
    if not can_be_composed(node, op.opset):
        return None
    win = windows(kernel_shape, strides, dilations, pads)
    return op.Max(*tap_slices(op, pad(op, x, win, float("-inf")), win, like=node.outputs[0]))


def can_be_composed(node: ir.Node, opset: int) -> bool:
    """Return whether a MaxPool can be the largest of what its windows read, one slice per tap."""
    dtype = node.outputs[0].dtype
    options = S.attributes_of(node, opset)
    indices = node.outputs[1] if len(node.outputs) > 1 else None
    plain = options["auto_pad"] == "NOTSET" and not options["ceil_mode"]
    unread = indices is None or not (indices.uses() or indices.is_graph_output())
    return plain and unread and dtype in (ir.DataType.FLOAT, ir.DataType.BFLOAT16)
