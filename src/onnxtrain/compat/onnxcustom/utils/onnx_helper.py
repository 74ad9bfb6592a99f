"""Names of weights, graphs on disk."""

from __future__ import annotations

import os
import warnings
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.graph import shapes as S


def onnx_rename_weights(onx: onnx.ModelProto) -> onnx.ModelProto:
    """Rename initializers to ``I0_x``, ``I1_y`` ... in place, in their order; return the model.

    The old classes wanted sorted names; these do not, but programs may expect the new ones.
    """
    names = [tensor.name for tensor in onx.graph.initializer]
    width = len(str(max(len(names) - 1, 0)))
    new = {name: f"I{i:0{width}d}_{name}" for i, name in enumerate(names)}
    for tensor in onx.graph.initializer:
        tensor.name = new[tensor.name]
    for x in onx.graph.input:
        x.name = new.get(x.name, x.name)
    _rename(onx.graph, new)
    return onx


def _rename(graph: onnx.GraphProto, new: dict[str, str]) -> None:
    for node in graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = new.get(name, name)
        for attribute in node.attribute:
            for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                _rename(inner, new)
    for y in graph.output:
        y.name = new.get(y.name, y.name)


def replace_initializers(onx: onnx.ModelProto, values: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Return a copy of a model with other values of initializers."""
    copy = onnx.ModelProto()
    copy.CopyFrom(onx)
    for tensor in copy.graph.initializer:
        if tensor.name in values:
            array = np.ascontiguousarray(values[tensor.name])
            tensor.CopyFrom(ir.to_proto(ir.Tensor(array, name=tensor.name)))
    return copy


def weights_as_inputs(onx: onnx.ModelProto, names: list[str]) -> onnx.ModelProto:
    """Return the model with some initializers as inputs, after its own."""
    work = ir.from_proto(onx)
    for name in names:
        value = work.graph.initializers.pop(name)
        tensor = value.const_value
        assert tensor is not None
        value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
        value.const_value = None
        if value not in list(work.graph.inputs):
            work.graph.inputs.append(value)
    return ir.to_proto(work)


def float_initializers(onx: onnx.ModelProto) -> list[str]:
    """Return the names of all float initializers."""
    known = ir.from_proto(onx).graph.initializers
    return [n for n, x in known.items() if S.is_float(x)]


def save_onnx_graph(
    obj: Any, folder: Any, prefix: str | None = None, suffix: str | None = None
) -> dict[str, Any]:
    """Write every ONNX graph that an object and its parts hold; return the files by attribute.

    Args:
        obj: has ONNX models among its attributes.
        folder: where files go; ``bytes`` gives the content instead.
        prefix: of file names; the name of the class unless given.
        suffix: of file names.
    """
    if folder is not bytes and not os.path.isdir(folder):
        raise FileNotFoundError(f"folder {folder!r} does not exist")
    prefix = f"{type(obj).__name__}." if prefix is None else prefix
    suffix = suffix or ""
    files: dict[str, Any] = {}
    for name, value in sorted(vars(obj).items()):
        if isinstance(value, onnx.ModelProto):
            files[name] = _store(value, folder, f"{prefix}{name}{suffix}.onnx")
        elif hasattr(value, "save_onnx_graph") and not isinstance(value, type):
            inner = value.save_onnx_graph(folder, prefix=f"{prefix}{name}.", suffix=suffix)
            if inner:
                files[name] = inner
    return files


def _store(model: onnx.ModelProto, folder: Any, file: str) -> Any:
    data = model.SerializeToString(deterministic=True)
    if folder is bytes:
        return data
    path = os.path.join(folder, file)
    if os.path.exists(path):
        warnings.warn(f"{path!r} already exists and is overwritten", UserWarning, stacklevel=4)
    with open(path, "wb") as f:
        f.write(data)
    return path
