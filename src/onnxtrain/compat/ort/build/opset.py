"""Nodes of the working opset restated at an older one, where that can say the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder

_OLDEST = 11
# The meaning changed at these versions, though a node may look the same before and after.
_CHANGED = {
    "AveragePool": 19, "BatchNormalization": 14, "DFT": 20, "GridSample": 20, "Hardmax": 13,
    "GroupNormalization": 21, "LogSoftmax": 13, "LpPool": 18, "Resize": 19, "RoiAlign": 16,
    "Softmax": 13, "Split": 13,
}  # fmt: skip

_SQUEEZES = ("Squeeze", "Unsqueeze")

Edit = Callable[[OpBuilder], None]


def bring_down(model: ir.Model, opset: int) -> list[str]:
    """Restate a model at an older opset, in place.

    Returns:
        The operators that cannot be restated; if there are any, nothing has changed.
    """
    current = model.opset_imports[""]
    if opset >= current:
        return []
    nodes = [n for n in model.graph.all_nodes() if n.domain in ("", "ai.onnx")]
    plans = {node: _plan(node, current, opset) for node in nodes}
    stuck = sorted({node.op_type for node, edits in plans.items() if edits is None})
    if stuck or opset < _OLDEST:
        return stuck or [f"opset {opset}"]
    outer = OpBuilder(model.graph, "shape/")
    for edits in plans.values():
        for edit in edits or ():
            edit(outer)
    model.opset_imports[""] = opset
    for node in model.graph.all_nodes():
        if node.domain in ("", "ai.onnx"):
            node.version = opset
    return []


def _plan(node: ir.Node, current: int, opset: int) -> list[Edit] | None:
    """Return the changes that a node needs, ``None`` if it cannot be restated."""
    new, old = S.schema_of(node.op_type, current), S.schema_of(node.op_type, opset)
    if new is None or old is None:
        return None
    if new.since_version == old.since_version:
        return []
    if opset < _CHANGED.get(node.op_type, 0):
        return None
    edits: list[Edit] = []
    extra = [n for n in node.attributes if n not in old.attributes]
    if node.op_type == "Shape" and extra:
        return [lambda outer: _slice_of_shape(outer, node)]
    for name in extra:
        default = new.attributes[name].default_value
        value = S.python_value(node.attributes[name])
        if not default.type or value != S.python_value(ir.serde.deserialize_attribute(default)):
            return None
        edits.append(lambda _, name=name: _drop(node, name))
    if len(node.inputs) > old.max_input:
        axes = S.constant_of(node.inputs[1])
        by_attribute = node.op_type.startswith("Reduce") or node.op_type in _SQUEEZES
        if not by_attribute or len(node.inputs) != 2 or (axes is None) != (node.inputs[1] is None):
            return None
        edits.append(lambda _: _axes_to_attribute(node, axes))
    mode = node.attributes.get("reduction")
    if node.op_type.startswith("Scatter") and opset < 18 and mode is not None:
        return edits if mode.as_string() in ("none", "add", "mul") and opset >= 16 else None
    return edits


def _drop(node: ir.Node, name: str) -> None:
    node.attributes.pop(name)


def _axes_to_attribute(node: ir.Node, axes: np.ndarray | None) -> None:
    node.resize_inputs(1)
    if axes is not None and axes.size:
        node.attributes["axes"] = ir.AttrInt64s("axes", [int(a) for a in axes.reshape(-1)])


def _slice_of_shape(outer: OpBuilder, node: ir.Node) -> None:
    """Take part of a shape with Slice: before opset 15, Shape gives all of it."""
    x, y, graph = node.inputs[0], node.outputs[0], node.graph
    assert isinstance(graph, ir.Graph)
    op = OpBuilder(graph, outer.prefix, before=node, parent=outer)
    start, end = node.attributes.get("start"), node.attributes.get("end")
    first = 0 if start is None else start.as_int()
    last = np.iinfo(np.int64).max if end is None else end.as_int()
    part = op.Slice(op.Shape(x), [first], [int(last)], [0])
    name = y.name
    y.name = op.names.fresh(f"{name}.old")
    y.replace_all_uses_with(part, replace_graph_outputs=True)
    part.name = name
    graph.remove(node, safe=True)
