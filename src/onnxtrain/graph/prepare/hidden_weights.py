"""Weights that are no initializers of the graph: brought to light where training can reach them."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.nodes import is_op
from onnxtrain.graph.prepare.classical import rewrite_classical
from onnxtrain.graph.prepare.local_functions import inline_functions
from onnxtrain.graph.roles import lift_weights

_LARGE = 16  # elements: what a function holds of fewer is a number of its formula


def show_weights(model: ir.Model) -> tuple[ir.Model, list[str]]:
    """Return the model with all its weights as initializers, and a line for each kind of change.

    The argument must not be used any more. Weights lie in Constant nodes, in bodies of If, Loop and
    Scan, in attributes of linear models, and in local functions, which are then inlined.
    """
    repairs = []
    if any(_holds_weights(function) for function in model.functions.values()):
        repairs.append(f"{len(model.functions)} local function(s) with weights inlined")
        model = inline_functions(model)
    repairs += rewrite_classical(model)
    lifted = lift_weights(model)
    if lifted:
        repairs.append(f"{len(lifted)} weight(s) in Constant nodes or bodies became initializers")
    return model, repairs


def _holds_weights(function: ir.Function) -> bool:
    return any(_is_large(node) for node in function.all_nodes())


def _is_large(node: ir.Node) -> bool:
    value = node.attributes.get("value") if is_op(node, "Constant") else None
    if value is None or value.is_ref():
        return False
    tensor = value.as_tensor()
    return tensor.dtype.is_floating_point() and tensor.size >= _LARGE
