"""The inference model, and where its weights lie in the file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.artifacts.signature import FILES, describe, dtype_name
from onnxtrain.graph import shapes as S
from onnxtrain.graph.io.external_data import STORED, entries
from onnxtrain.graph.io.shared_weights import copy_with_weights, detach
from onnxtrain.graph.io.strip import strip_traces
from onnxtrain.graph.modes import to_evaluation
from onnxtrain.graph.prepare.versions import NEWEST_IR, NEWEST_OPSET
from onnxtrain.graph.simplify import remove_dead
from onnxtrain.manifest import Location, ModelSpec

_OLDEST_IR = 4


def inference_model(source: ir.Model) -> tuple[onnx.ModelProto, ModelSpec]:
    """Return the plain model in evaluation mode, its weights as raw bytes under their own names."""
    model = copy_with_weights(source)
    strip_traces(model)
    if to_evaluation(model):
        remove_dead(model)
    for x in model.graph.initializers.values():
        if S.is_float(x) and x.const_value is not None and STORED not in x.const_value.meta:
            array = np.ascontiguousarray(x.const_value.numpy()).reshape(x.const_value.shape.numpy())
            x.const_value = ir.Tensor(array, dtype=x.const_value.dtype, name=x.name)
    # Below version 4 every initializer is an input too, which ours are not.
    model.ir_version = max(_OLDEST_IR, min(model.ir_version, NEWEST_IR))
    if model.opset_imports.get("", 0) > NEWEST_OPSET:
        model.opset_imports[""] = NEWEST_OPSET
    detach(model)
    proto = ir.to_proto(model)
    spec = ModelSpec(
        role="infer",
        file=FILES["infer"],
        inputs=tuple(describe(x, "input") for x in model.graph.inputs),
        outputs=tuple(describe(y, "output") for y in model.graph.outputs),
    )
    return proto, spec


def places(model: onnx.ModelProto, file: str, weights: str | None) -> dict[str, Location]:
    """Return where the bytes of each initializer lie, in a model's file or in that of weights."""
    located = locate(model.SerializeToString(deterministic=True), file)
    types = {t.name: dtype_name(ir.DataType(t.data_type)) for t in model.graph.initializer}
    for tensor in model.graph.initializer if weights is not None else ():
        if tensor.external_data:
            _, offset, length = entries(tensor)
            located[tensor.name] = Location(weights or "", offset or 0, length or 0)
    return {n: dataclasses.replace(place, dtype=types[n]) for n, place in located.items()}


def locate(data: bytes, file: str) -> dict[str, Location]:
    """Return where the raw bytes of each initializer lie in a serialised model."""
    locations: dict[str, Location] = {}
    for field, start, end in _fields(data, 0, len(data)):
        if field != 7:  # ModelProto.graph
            continue
        for inner, a, b in _fields(data, start, end):
            if inner != 5:  # GraphProto.initializer
                continue
            name, raw = "", None
            for tensor, c, d in _fields(data, a, b):
                if tensor == 8:  # TensorProto.name
                    name = data[c:d].decode()
                elif tensor == 9:  # TensorProto.raw_data
                    raw = (c, d)
            if raw is not None:
                locations[name] = Location(file, raw[0], raw[1] - raw[0])
    return locations


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Return (number, start, end) of each length-delimited field of a message."""
    while at < end:
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 2:
            size, at = _varint(data, at)
            yield key >> 3, at, at + size
            at += size
        elif kind == 0:
            _, at = _varint(data, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError(f"unknown wire type {kind}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if not byte & 128:
            return value, at
        shift += 7
