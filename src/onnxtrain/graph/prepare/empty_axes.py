"""Squeeze with an empty list of axes means what it means without one, as in onnxruntime.

The standard does not say, and onnx's own inference takes it for no axis at all.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.nodes import nodes


def drop_empty_axes(model: ir.Model) -> None:
    """Take empty axes away from Squeeze, in place; constants have been lifted."""
    for node in nodes(model.graph, "Squeeze", subgraphs=True):
        axes = node.inputs[1] if len(node.inputs) > 1 else None
        if axes is not None and axes.const_value is not None and axes.const_value.size == 0:
            node.resize_inputs(1)
