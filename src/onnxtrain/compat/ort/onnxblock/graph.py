"""Nodes that the library's builder makes, put into a live ModelProto under names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.compat.ort.errors import OrtError, OrtLookupError, as_ort_errors
from onnxtrain.compat.ort.onnxblock.accessor import ModelAccessor, opset_of
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.prepare.versions import OPSET
from onnxtrain.lowering.restate import restate


def type_of(model: onnx.ModelProto, name: str) -> onnx.TypeProto:
    """Return the type of a value of the graph, inferred if it is not written down."""
    declared = _declared(model.graph, name)
    if declared is None:
        try:
            inferred = onnx.shape_inference.infer_shapes(model)
        except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
            inferred = model
        declared = _declared(inferred.graph, name)
    if declared is None:
        raise OrtLookupError(
            f"The provided name {name} is not a graph value info or a graph output."
        )
    return declared


def _declared(graph: onnx.GraphProto, name: str) -> onnx.TypeProto | None:
    for values in (graph.output, graph.input, graph.value_info):
        for value in values:
            if value.name == name and value.HasField("type"):
                return value.type
    for tensor in graph.initializer:
        if tensor.name == name:
            kind = onnx.TypeProto()
            kind.tensor_type.elem_type = tensor.data_type
            kind.tensor_type.shape.SetInParent()
            for size in tensor.dims:
                kind.tensor_type.shape.dim.add(dim_value=size)
            return kind
    return None


def exists(model: onnx.ModelProto, name: str) -> bool:
    """Return whether some value of the graph has this name."""
    graph = model.graph
    if any(x.name == name for x in (*graph.input, *graph.initializer)):
        return True
    return any(name in node.input or name in node.output for node in graph.node)


def add_input(model: onnx.ModelProto, name: str, kind: onnx.TypeProto) -> str:
    """Add a graph input; return its name."""
    value = model.graph.input.add(name=name)
    value.type.CopyFrom(kind)
    return name


def add_initializer(accessor: ModelAccessor, token: str, array: np.ndarray) -> str:
    """Add an initializer under a new name; return the name."""
    name = accessor.fresh(token)
    accessor.model.graph.initializer.append(
        ir.serde.serialize_tensor(ir.Tensor(np.ascontiguousarray(array), name=name))
    )
    return name


def splice(
    accessor: ModelAccessor,
    token: str,
    inputs: Sequence[str],
    build: Callable[..., Any],
    outputs: Sequence[str] = (),
) -> str | tuple[str, ...]:
    """Let ``build(op, *values)`` append nodes to the model; return the names of its results.

    Args:
        accessor: holds the model.
        token: what the nodes are about, for their names.
        inputs: names of the values that ``build`` gets.
        build: returns one value or several.
        outputs: names for the results; made up unless given.
    """
    model = accessor.model
    values = {name: _value(model, name) for name in inputs}
    graph = ir.Graph(list(values.values()), [], nodes=[], opset_imports={"": OPSET}, name=token)
    prefix = f"{accessor.fresh(token)}/"
    op = OpBuilder(graph, prefix=prefix)
    with as_ort_errors():
        built = build(op, *(values[name] for name in inputs))
    results = list(built) if isinstance(built, tuple) else [built]
    named = [op.Identity(v) if v.producer() is None else v for v in results]
    for value, name in zip(
        named, outputs or [accessor.fresh(f"{token}_output") for _ in named], strict=True
    ):
        value.name = name
    graph.outputs.extend(named)
    names = tuple(v.name or "" for v in named)
    fragment = ir.Model(graph, ir_version=10)
    stuck = restate(fragment, opset_of(model), prefix)
    if stuck:
        raise OrtError(
            f"{token} needs operators that opset {opset_of(model)} lacks: {', '.join(stuck)}\n"
            "hint: export the model with opset 14 or newer"
        )
    _append(model, ir.to_proto(fragment))
    return names if isinstance(built, tuple) else names[0]


def _value(model: onnx.ModelProto, name: str) -> ir.Value:
    kind = type_of(model, name)
    value = ir.Value(name=name, type=ir.serde.deserialize_type_proto_for_type(kind))
    value.shape = ir.serde.deserialize_type_proto_for_shape(kind)
    for tensor in model.graph.initializer:
        if tensor.name == name:
            value.const_value = ir.serde.deserialize_tensor(tensor)
    return value


def _append(model: onnx.ModelProto, fragment: onnx.ModelProto) -> None:
    graph = model.graph
    graph.node.extend(fragment.graph.node)
    graph.initializer.extend(fragment.graph.initializer)
    graph.value_info.extend(fragment.graph.output)
    known = {o.domain for o in model.opset_import}
    for node in fragment.graph.node:
        if node.domain not in known:
            known.add(node.domain)
            model.opset_import.add(domain=node.domain, version=_VERSIONS.get(node.domain, 1))


_VERSIONS = {"ai.onnx.ml": 3}
