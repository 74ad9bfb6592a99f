"""The model that blocks build on, one at a time in each context.

Nodes that the library's builder makes, put into a live ModelProto under names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.compat.ort.errors import OrtError, OrtLookupError, as_ort_errors
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_standard
from onnxtrain.importer.opset import IR_VERSION, NEWEST_IR, NEWEST_OPSET, OPSET
from onnxtrain.lowering.lower import downgrade_opset

_TOKEN = re.compile(r"onnx::.+::(\d+)$")


class ModelAccessor:
    """A model under construction.

    Names of new values are counted here, so that they depend on this model alone.
    """

    def __init__(self, model: onnx.ModelProto | None, model_path: str | None = None) -> None:
        self._model, self._path = model, model_path
        graph = model.graph if model is not None else onnx.GraphProto()
        self.given = [x.name for x in graph.input]
        """Inputs the model came with; those that blocks add are targets."""
        self.unreduced: set[str] = set()
        """Losses with ``reduction="none"``, which may be differentiated as their sum."""
        self.updates: list[str] = []
        """New values of sequences, which come after a block's own outputs."""
        taken = [_TOKEN.match(y) for node in graph.node for y in node.output]
        taken += [_TOKEN.match(x.name) for x in (*graph.input, *graph.initializer)]
        self._count = max((int(m.group(1)) for m in taken if m), default=0)

    @property
    def model(self) -> onnx.ModelProto:
        """The live ModelProto."""
        if self._model is None:
            raise OrtError(
                "The onnx model was not set. Please use the context manager onnxblock.base or "
                "onnxblock.empty_base to create the model."
            )
        return self._model

    @property
    def path(self) -> str:
        """The path that was given with the model."""
        if self._path is None:
            raise OrtError(
                "The path to the onnx model was not set. Please pass model_path to onnxblock.base."
            )
        return self._path

    @property
    def has_path(self) -> bool:
        """Whether a path was given with the model."""
        return self._path is not None

    def fresh(self, token: str) -> str:
        """Return a name that the model does not have: ``onnx::<token>::<number>``."""
        self._count += 1
        return f"onnx::{token}::{self._count}"


_ACTIVE: ContextVar[ModelAccessor | None] = ContextVar("onnxtrain.onnxblock.base", default=None)
_LIBRARY: ContextVar[str | None] = ContextVar("onnxtrain.onnxblock.library", default=None)


def active() -> ModelAccessor:
    """Return the accessor of the innermost ``base`` or ``empty_base``."""
    return _ACTIVE.get() or _NONE


def active_library() -> str | None:
    """Return the library of custom operators, if one is set."""
    return _LIBRARY.get()


_NONE = ModelAccessor(None)


@contextmanager
def base(model: onnx.ModelProto, model_path: str | None = None) -> Iterator[ModelAccessor]:
    """Build on a copy of ``model`` inside the context.

    Versions newer than any stock onnxruntime takes are lowered in the copy.
    """
    if _ACTIVE.get() is not None:
        raise OrtError("Base onnx model already exists. Cannot create multiple ModelAccessors.")
    if model is None:
        raise OrtError(
            "Base onnx model cannot be None. Please use onnxblock.empty_base if you would like to "
            "build a model from scratch."
        )
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    _lower_stamps(copy)
    with _activated(ModelAccessor(copy, model_path)) as accessor:
        yield accessor


@contextmanager
def empty_base(opset_version: int | None = None) -> Iterator[ModelAccessor]:
    """Build on an empty model inside the context."""
    if _ACTIVE.get() is not None:
        raise OrtError("Base onnx model already exists. Cannot create multiple ModelAccessors.")
    model = onnx.ModelProto(ir_version=IR_VERSION, producer_name="orttraining")
    model.graph.name = "graph"
    model.opset_import.add(domain="com.microsoft", version=1)
    model.opset_import.add(domain="", version=opset_version or OPSET)
    _lower_stamps(model)
    with _activated(ModelAccessor(model)) as accessor:
        yield accessor


@contextmanager
def custom_op_library(custom_op_library_path: str | os.PathLike[str]) -> Iterator[str]:
    """Let models have operators of a library of the user's inside the context."""
    if _LIBRARY.get() is not None:
        raise OrtError("CustomOp library already set. Cannot set multiple custom op libraries.")
    path = os.fspath(custom_op_library_path)
    if not os.path.exists(path):
        raise OrtError(f"Custom op library path {path} does not exist.")
    token = _LIBRARY.set(path)
    try:
        yield path
    finally:
        _LIBRARY.reset(token)


@contextmanager
def _activated(accessor: ModelAccessor) -> Iterator[ModelAccessor]:
    token = _ACTIVE.set(accessor)
    try:
        yield accessor
    finally:
        _ACTIVE.reset(token)


def opset_of(model: onnx.ModelProto) -> int:
    """Return the version of the standard operators that a model imports."""
    versions = [o.version for o in model.opset_import if is_standard(o)]
    return max(versions, default=OPSET)


def _lower_stamps(model: onnx.ModelProto) -> None:
    model.ir_version = min(model.ir_version or IR_VERSION, NEWEST_IR)
    limit = NEWEST_OPSET if model.graph.node else OPSET
    for entry in model.opset_import:
        if is_standard(entry):
            entry.version = min(entry.version, limit)
    if opset_of(model) <= OPSET:
        model.ir_version = min(model.ir_version, IR_VERSION)


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
    stuck = downgrade_opset(fragment, opset_of(model), prefix)
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
