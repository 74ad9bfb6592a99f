"""Passes that work on protobufs, without copying the weights."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx.shape_inference
import onnx.version_converter
import onnx_ir as ir

_LARGE = 1024  # elements: smaller initializers may be shapes, axes or scales that a pass must see
REFUSALS = (
    RuntimeError,
    onnx.shape_inference.InferenceError,
    onnx.version_converter.ConvertError,
)
"""How onnx's converter of versions says no."""


def through_proto(
    model: ir.Model, transform: Callable[[onnx.ModelProto], onnx.ModelProto]
) -> ir.Model:
    """Return the transformed model; large initializers stay out of the protobuf meanwhile."""
    graph = model.graph
    order = list(graph.initializers)
    large = {
        name: x
        for name, x in graph.initializers.items()
        if x.const_value is not None and x.const_value.size > _LARGE
    }
    for name, x in large.items():
        if x.shape is None and x.const_value is not None:
            x.shape = ir.Shape(x.const_value.shape.numpy())
            x.type = ir.TensorType(x.const_value.dtype)
        del graph.initializers[name]
        graph.inputs.append(x)
    result = ir.from_proto(transform(ir.to_proto(model)))
    by_name = {x.name: x for x in result.graph.inputs}
    for name, x in large.items():
        stand_in = by_name.get(name)
        if stand_in is None:
            continue
        result.graph.inputs.remove(stand_in)
        stand_in.const_value = x.const_value
        result.graph.register_initializer(stand_in)
    _reorder(result.graph, order)
    result.meta.update(model.meta)
    return result


def _reorder(graph: ir.Graph, names: list[str]) -> None:
    """Put initializers back in the order of the file."""
    values = dict(graph.initializers)
    graph.initializers.clear()
    for name in [*(n for n in names if n in values), *(n for n in values if n not in names)]:
        graph.initializers[name] = values[name]
