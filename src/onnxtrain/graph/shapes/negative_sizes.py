"""Sizes below zero, which end the process if onnx's inference meets them in a Slice."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.errors import OnnxTrainError, PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.captured_values import subgraphs_of
from onnxtrain.graph.nodes import is_standard

_BRANCH = "onnxtrain.branch"  # key in Graph.meta: perhaps it is never run


def mark_branches(node: ir.Node) -> None:
    """Note that the bodies of an If, and what is inside of them, may never be run."""
    inside = node.graph is not None and bool(node.graph.meta.get(_BRANCH))
    if inside or node.op_type == "If":
        for body in subgraphs_of(node):
            body.meta[_BRANCH] = True


def check_output_sizes(node: ir.Node) -> None:
    """Raise an error if an output of a node has a size below zero.

    In a branch that may never be run the size is taken for unknown: there are models that ask for
    the rank of an input, and have a branch for each.
    """
    for y in node.outputs:
        if y.shape is not None and any(isinstance(d, int) and d < 0 for d in y.shape):
            if node.graph is not None and node.graph.meta.get(_BRANCH):
                known = S.dims_of(y) or ()
                S.set_dims(y, [None if isinstance(d, int) and d < 0 else d for d in known])
                continue
            raise PrepareError(
                f"node {node.name!r}: {S.describe(node)}: {S.describe_value(y)} has a size below "
                "zero\nhint: look at the constants and attributes of this node"
            )


def check_before_conversion(model: ir.Model) -> None:
    """Raise an error if some size comes out below zero, before onnx is given the whole model.

    What cannot be inferred at an old opset is left to those who come later.
    """
    if not any(_is_slice(n) for n in model.graph.all_nodes()):
        return  # nothing else aborts
    _check(model.clone().graph, model.opset_imports[""])


def _is_slice(node: ir.Node) -> bool:
    return node.op_type == "Slice" and is_standard(node)


def _check(graph: ir.Graph, opset: int) -> None:
    for node in graph:
        if not any(_is_slice(n) for body in subgraphs_of(node) for n in body.all_nodes()):
            mark_branches(node)
        for body in subgraphs_of(node):
            _check(body, opset)
        try:
            S.infer_node(node, opset)
        except (OnnxTrainError, RuntimeError, ValueError, TypeError, LookupError):
            check_output_sizes(node)
