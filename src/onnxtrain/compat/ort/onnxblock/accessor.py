"""The model that blocks build on, one at a time in each context."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import onnx

from onnxtrain.compat.ort.errors import OrtError
from onnxtrain.graph.nodes import is_standard
from onnxtrain.graph.prepare.versions import IR_VERSION, NEWEST_IR, NEWEST_OPSET, OPSET

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
