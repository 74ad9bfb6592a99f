"""Tensors of a file: whether their bytes are what dtype and shape say, and how to own them."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import onnx
import onnx_ir as ir

from onnxtrain.graph.io import external_data
from onnxtrain.graph.io.external_data import DataFiles, Refused
from onnxtrain.graph.io.limits import Kind, Limits, Problems

_BROKEN = "the file is damaged or was made by hand; export the model again"

UNKNOWN_DTYPE = Kind("unknown data types", "the model may need a newer onnx package")
BAD_DIMS = Kind("tensors with impossible dimensions", _BROKEN)
RANK = Kind("tensors over the rank limit", "load(..., limits=Limits(rank=...))")
ELEMENTS = Kind("tensors over the size limit", "load(..., limits=Limits(elements=...))")
MISMATCH = Kind("tensor data that does not match dtype and shape", _BROKEN)
SEGMENTED = Kind("tensors in segments, which no version of ONNX defines", _BROKEN)

_DTYPES = {int(dtype): dtype for dtype in ir.DataType if dtype != ir.DataType.UNDEFINED}
_TYPED = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
# Every dtype that is not named here is kept in int32_data.
_FIELD = {
    ir.DataType.FLOAT: "float_data",
    ir.DataType.COMPLEX64: "float_data",
    ir.DataType.DOUBLE: "double_data",
    ir.DataType.COMPLEX128: "double_data",
    ir.DataType.INT64: "int64_data",
    ir.DataType.UINT32: "uint64_data",
    ir.DataType.UINT64: "uint64_data",
    ir.DataType.STRING: "string_data",
}
_ITEMS_PER_ELEMENT = {ir.DataType.COMPLEX64: 2, ir.DataType.COMPLEX128: 2}
_ELEMENTS_PER_ITEM = {4: 2, 2: 4}  # by bit width: several elements share an int32


def known_dtype(number: int) -> bool:
    """Whether ``number`` is a data type that can hold values."""
    return number in _DTYPES


def check_dims(dims: Sequence[int], where: str, limits: Limits, problems: Problems) -> int | None:
    """The number of elements, or None after noting why there is none."""
    if len(dims) > limits.rank:
        problems.add(RANK, f"{where}: rank {len(dims)}, the limit is {limits.rank}")
        return None
    if any(dim < 0 for dim in dims):
        problems.add(BAD_DIMS, f"{where}: {list(dims)}")
        return None
    # Python integers do not overflow. A zero must not hide the other dimensions: arrays of
    # shape [0, 2**62] do not exist either.
    if math.prod(max(dim, 1) for dim in dims) > limits.elements:
        problems.add(ELEMENTS, f"{where}: {list(dims)}, the limit is {limits.elements} elements")
        return None
    return math.prod(dims)


def check_tensor(
    tensor: onnx.TensorProto, where: str, limits: Limits, problems: Problems, files: DataFiles
) -> None:
    """Note everything that makes ``tensor`` unsafe to read."""
    if tensor.data_type not in _DTYPES:
        problems.add(UNKNOWN_DTYPE, f"{where}: data type {tensor.data_type}")
        return
    dtype = _DTYPES[tensor.data_type]
    size = check_dims(tensor.dims, where, limits, problems)
    if size is None:
        return
    where = f"{where}: {dtype.name}{list(tensor.dims)}"
    if tensor.HasField("segment"):
        problems.add(SEGMENTED, where)
        return
    used = [field for field in _TYPED if len(getattr(tensor, field))]
    if tensor.HasField("raw_data"):
        used.append("raw_data")
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        if used or dtype == ir.DataType.STRING:
            problems.add(MISMATCH, f"{where} cannot be external and in {', '.join(used) or 'text'}")
            return
        _check_external(tensor, where, byte_count(dtype, size), problems, files)
        return
    detail = _mismatch(tensor, dtype, size, used)
    if detail:
        problems.add(MISMATCH, f"{where} {detail}")


def byte_count(dtype: ir.DataType, size: int) -> int:
    """The bytes that ``size`` elements take; types below a byte are packed."""
    return (size * dtype.bitwidth + 7) // 8


def _mismatch(
    tensor: onnx.TensorProto, dtype: ir.DataType, size: int, used: list[str]
) -> str | None:
    if len(used) > 1:
        return f"has data in {' and in '.join(used)}"
    if used == ["raw_data"]:
        if dtype == ir.DataType.STRING:
            return "cannot be in raw_data"
        need, have = byte_count(dtype, size), len(tensor.raw_data)
        return f"needs {need} bytes, raw_data has {have}" if need != have else None
    field = _FIELD.get(dtype, "int32_data")
    if used and used != [field]:
        return f"is kept in {field}, not in {used[0]}"
    need = size * _ITEMS_PER_ELEMENT.get(dtype, 1)
    if dtype != ir.DataType.STRING:
        need = -(-need // _ELEMENTS_PER_ITEM.get(dtype.bitwidth, 1))
    have = len(getattr(tensor, field))
    return f"needs {need} items, {field} has {have}" if need != have else None


def _check_external(
    tensor: onnx.TensorProto, where: str, nbytes: int, problems: Problems, files: DataFiles
) -> None:
    try:
        location, offset, length = external_data.entries(tensor)
        files.region(location, offset, length, nbytes)
    except Refused as refused:
        problems.add(refused.kind, f"{where}: {refused.detail}")


def owned(tensor: ir.TensorProtocol, files: DataFiles) -> ir.TensorProtocol:
    """The same tensor, free of the protobuf and the object it came from.

    The elements are shared where they cannot change; renaming the result renames nothing else.
    """
    if isinstance(tensor, ir.ExternalTensor):
        return external_data.to_tensor(tensor, files)
    if isinstance(tensor, ir.StringTensor):
        return ir.StringTensor(
            list(tensor.string_data()),
            shape=ir.Shape(tensor.shape),
            name=tensor.name,
            doc_string=tensor.doc_string,
            metadata_props=dict(tensor.metadata_props) or None,
        )
    if isinstance(tensor, ir.serde.TensorProtoTensor):
        return ir.Tensor(
            tensor.numpy(),
            tensor.dtype,
            shape=ir.Shape(tensor.shape),
            name=tensor.name,
            doc_string=tensor.doc_string or None,
            metadata_props=dict(tensor.metadata_props) or None,
        )
    return copy.copy(tensor)
