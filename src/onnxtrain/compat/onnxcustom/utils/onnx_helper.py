"""Names of weights, graphs on disk."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.graph import shapes as S


def onnx_rename_weights(onx: onnx.ModelProto) -> onnx.ModelProto:
    """Rename initializers to ``I0_x``, ``I1_y`` ... in place, in their order; return the model.

    The classes that train want names in alphabetical order.
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


def get_onnx_opset(onx: onnx.ModelProto, domain: str = "") -> int:
    """Return the opset of a domain."""
    for opset in onx.opset_import:
        if opset.domain == domain:
            return opset.version
    raise ValueError(f"the model does not import the domain {domain!r}")


def proto_type_to_dtype(proto_type: Any) -> type[np.generic]:
    """Return the numpy type of ``TensorProto.FLOAT`` or ``"tensor(float)"``; double likewise."""
    if proto_type in (onnx.TensorProto.FLOAT, "tensor(float)"):
        return np.float32
    if proto_type in (onnx.TensorProto.DOUBLE, "tensor(double)"):
        return np.float64
    raise ValueError(f"expected float or double, got {proto_type!r}")


def dtype_to_var_type(dtype: Any) -> type[Any]:
    """Return skl2onnx's type for a numpy type."""
    from skl2onnx.common import data_types

    names = {"float32": "Float", "float64": "Double", "int64": "Int64", "int32": "Int32"}
    name = np.dtype(dtype).name
    if name not in names:
        raise ValueError(f"unknown type: {name} (expected one of {', '.join(names)})")
    return getattr(data_types, f"{names[name]}TensorType")


def add_initializer(model: onnx.ModelProto, name: str, value: np.ndarray) -> onnx.ModelProto:
    """Return a copy of a model with one initializer more."""
    if name in {tensor.name for tensor in model.graph.initializer}:
        raise ValueError(f"the model already has an initializer {name!r}")
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    tensor = ir.Tensor(np.ascontiguousarray(value), name=name)
    copy.graph.initializer.append(ir.to_proto(tensor))
    return copy


def replace_initializers_into_onnx(
    model: onnx.ModelProto, results: Mapping[str, Any]
) -> onnx.ModelProto:
    """Return a copy of a model with other values of initializers: arrays or OrtValues.

    Raises:
        RuntimeError: if the model lacks one of the names.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    tensors = {tensor.name: tensor for tensor in copy.graph.initializer}
    unknown = [name for name in results if name not in tensors]
    if unknown:
        raise RuntimeError(f"unknown initializer: {', '.join(unknown)}")
    for name, value in results.items():
        array = np.ascontiguousarray(value if isinstance(value, np.ndarray) else value.numpy())
        tensors[name].CopyFrom(ir.to_proto(ir.Tensor(array, name=name)))
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
