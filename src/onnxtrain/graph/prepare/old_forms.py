"""Older forms of operators that onnx's version converter raises to something else.

Limits of Clip and the filler of Pad come out as float32 whatever the type; Upsample and Resize lose
their coordinates; Hardmax keeps its axis though the meaning changed; GroupNormalization gets scales
that do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.graph.nodes import is_op, is_standard

_INPUTS_SINCE = 11  # Clip and Pad take their numbers as inputs, Resize has coordinate modes
_ONE_AXIS_SINCE = 13  # Softmax and its kin work along one axis, not on a flattened matrix
_PER_CHANNEL_SINCE = 21  # GroupNormalization has a scale per channel, not per group


def convert_with_care(
    model: onnx.ModelProto, convert: Callable[[onnx.ModelProto], onnx.ModelProto]
) -> onnx.ModelProto:
    """Return the converted model with those operators meaning what they did."""
    opset = max((o.version for o in model.opset_import if is_standard(o)), default=0)
    wrong: dict[str, Callable[..., list[onnx.NodeProto]]] = {}
    if opset < _INPUTS_SINCE:
        wrong.update(Clip=_like_first, Pad=_like_first, Upsample=_old_coordinates)
        wrong.update(Resize=_old_coordinates)  # or as _resize_repair says
    if opset < _PER_CHANNEL_SINCE:
        wrong.update(GroupNormalization=_per_channel)
    if opset < _ONE_AXIS_SINCE:
        for graph in _graphs(model.graph):
            _flatten_hardmax(graph)
    marked = {
        (_RENAMED.get(n.op_type, n.op_type), n.output[0]): (
            _resize_repair(model.graph, n) if n.op_type == "Resize" else wrong[n.op_type],
            list(n.input),
        )
        for graph in _graphs(model.graph)
        for n in graph.node
        if n.op_type in wrong and is_standard(n)
    }
    converted = convert(model)
    if marked:
        for graph in _graphs(converted.graph):
            _repair(graph, marked)
    return converted


_RENAMED = {"Upsample": "Resize"}


def _repair(graph: onnx.GraphProto, marked: dict) -> None:
    nodes = []
    for node in graph.node:
        mark = marked.get((node.op_type, node.output[0])) if node.output else None
        if mark is not None:
            repair, inputs = mark
            nodes += repair(node, inputs)
        nodes.append(node)
    if len(nodes) > len(graph.node):
        copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
        del graph.node[:]
        graph.node.extend(copies)


def _like_first(node: onnx.NodeProto, inputs: list[str]) -> list[onnx.NodeProto]:
    """Cast the numbers that became inputs to the type of the first input."""
    casts = []
    for i in (1, 2) if node.op_type == "Clip" else (2,):
        if i < len(node.input) and node.input[i]:
            name = f"{node.output[0]}.raised.{i}"
            casts.append(_node("CastLike", [node.input[i], node.input[0]], name))
            node.input[i] = name
    return casts


def _old_coordinates(node: onnx.NodeProto, inputs: list[str]) -> list[onnx.NodeProto]:
    """Sample at ``i / scale``; the nearest is to the left."""
    return _sample(node, "floor")


def _old_coordinates_smaller(node: onnx.NodeProto, inputs: list[str]) -> list[onnx.NodeProto]:
    """Sample at ``i / scale``; the nearest is to the right, as onnxruntime has it."""
    return _sample(node, "ceil")


def _sample(node: onnx.NodeProto, nearest: str) -> list[onnx.NodeProto]:
    modes = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": nearest}
    kept = [a for a in node.attribute if a.name not in modes]
    del node.attribute[:]
    node.attribute.extend([*kept, *(ir.to_proto(ir.AttrString(*mode)) for mode in modes.items())])
    return []


def _resize_repair(
    graph: onnx.GraphProto, node: onnx.NodeProto
) -> Callable[..., list[onnx.NodeProto]]:
    """Return the repair for a Resize of opset 10, which rounds by direction."""
    if any(a.name == "mode" and a.s != b"nearest" for a in node.attribute):
        return _old_coordinates
    scales = _array(graph, node.input[1])
    if scales is not None and (scales >= 1).all():
        return _old_coordinates
    if scales is not None and (scales <= 1).all():
        return _old_coordinates_smaller
    raise RuntimeError(
        f"Resize of opset 10 at {node.output[0]!r} may shrink one axis and grow another"
    )


def _array(graph: onnx.GraphProto, name: str) -> np.ndarray | None:
    for tensor in graph.initializer:
        if tensor.name == name:
            return ir.from_proto(tensor).numpy()
    for node in graph.node:
        if (
            node.op_type == "Constant"
            and node.output[0] == name
            and node.attribute[0].name == "value"
        ):
            return ir.from_proto(node.attribute[0].t).numpy()
    return None


def _per_channel(node: onnx.NodeProto, inputs: list[str]) -> list[onnx.NodeProto]:
    """Repeat the scale and bias of a group for each of its channels."""
    y = node.output[0]
    (groups,) = (a.i for a in node.attribute if a.name == "num_groups")
    nodes = [
        _node(
            "Shape", [inputs[0]], f"{y}.channels", ir.AttrInt64("start", 1), ir.AttrInt64("end", 2)
        ),
        _node("Constant", [], f"{y}.groups", ir.AttrInt64s("value_ints", [groups])),
        _node("Div", [f"{y}.channels", f"{y}.groups"], f"{y}.size"),
        _node("Concat", [f"{y}.groups", f"{y}.size"], f"{y}.table", ir.AttrInt64("axis", 0)),
        _node("Constant", [], f"{y}.column", ir.AttrInt64s("value_ints", [-1, 1])),
        _node("Constant", [], f"{y}.row", ir.AttrInt64s("value_ints", [-1])),
    ]
    for i in (1, 2):
        name = f"{y}.raised.{i}"
        nodes += [
            _node("Reshape", [inputs[i], f"{y}.column"], f"{name}.column"),
            _node("Expand", [f"{name}.column", f"{y}.table"], f"{name}.table"),
            _node("Reshape", [f"{name}.table", f"{y}.row"], name),
        ]
        node.input[i] = name
    return nodes


def _flatten_hardmax(graph: onnx.GraphProto) -> None:
    """Write out that Hardmax looks at a matrix: all axes before ``axis`` by all from it on."""
    nodes = []
    for node in graph.node:
        if not is_op(node, "Hardmax"):
            nodes.append(node)
            continue
        axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
        (x,), (y,) = node.input, node.output
        nodes += [
            _node("Shape", [x], f"{y}.shape"),
            _node("Flatten", [x], f"{y}.flat", ir.AttrInt64("axis", axis)),
            _node("Hardmax", [f"{y}.flat"], f"{y}.picked", ir.AttrInt64("axis", 1)),
            _node("Reshape", [f"{y}.picked", f"{y}.shape"], y),
        ]
    if len(nodes) > len(graph.node):
        copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
        del graph.node[:]
        graph.node.extend(copies)


def _node(op_type: str, inputs: list[str], output: str, *attributes: ir.Attr) -> onnx.NodeProto:
    return onnx.NodeProto(
        op_type=op_type,
        input=inputs,
        output=[output],
        attribute=[ir.to_proto(a) for a in attributes],
    )


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _graphs(attribute.g)
