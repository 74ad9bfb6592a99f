"""A model at an older opset, node for node.

``lower`` composes what an opset lacks from other operators, which may cost: a ScatterND becomes a
product with a one-hot matrix. Here a node gets the form that the older opset has for it, or the
whole model stays as it is. The one exception is Shape of some axes, which becomes a Slice of Shape.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import is_standard
from onnxtrain.graph.simplify import remove_dead
from onnxtrain.lowering.destination import Destination
from onnxtrain.lowering.forms import apply_forms
from onnxtrain.lowering.registry import apply
from onnxtrain.lowering.rules.shape import shape

_OLDEST = 11  # of which the training graphs have been run


def restate(model: ir.Model, opset: int, prefix: str = "lower/") -> list[str]:
    """Restate a model at an older opset, in place; nodes of other domains stay as they are.

    Args:
        model: of the working opset, with the shapes of its values.
        opset: of the result; one that is not older changes nothing.
        prefix: what names of new values start with.

    Returns:
        The operators that cannot be restated; if there are any, nothing has changed.
    """
    working = model.opset_imports[""]
    if opset >= working:
        return []
    if opset < _OLDEST:
        return [f"opset {opset}"]
    destination = Destination(opset, working)
    unfit = [
        node
        for node in model.graph.all_nodes()
        if is_standard(node) and destination.obstacle(node) is not None
    ]
    stuck = sorted({node.op_type for node in unfit if not _is_part_of_shape(node)})
    if stuck:
        return stuck
    root = OpBuilder(model.graph, prefix)
    for node in unfit:
        _slice_of_shape(root, node)
    apply_forms(model, opset, prefix)
    remove_dead(model)
    return []


def _is_part_of_shape(node: ir.Node) -> bool:
    x = node.inputs[0] if node.inputs else None
    return node.op_type == "Shape" and x is not None and x.shape is not None


def _slice_of_shape(root: OpBuilder, node: ir.Node) -> None:
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    op = OpBuilder(graph, root.prefix, before=node, parent=root)
    parts = apply(shape, op, node)
    assert parts is not None
    part = parts[0]
    assert part is not None
    y = node.outputs[0]
    replace_value(y, part, list(y.uses()))
    graph.remove(node, safe=True)
