"""Write models: explicit versions, the same bytes for the same model, all of a file or none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO

import onnx
import onnx_ir as ir

from onnxtrain.errors import SaveError
from onnxtrain.graph.captured_values import subgraphs_of
from onnxtrain.graph.io.atomic import Writer, content, write_files
from onnxtrain.graph.io.limits import quote
from onnxtrain.graph.io.proto_tensors import all_tensors

# Protobuf ends at 2 GiB; the margin is for the graph around the weights.
_PROTOBUF_BYTES = (1 << 31) - 1
_EXTERNAL_ABOVE = _PROTOBUF_BYTES - (64 << 20)
_SMALLEST = 1024  # bytes; what is smaller stays in the protobuf, where shape inference sees it
_ALIGNMENT = 64


def save(
    model: ir.Model | onnx.ModelProto,
    path: str | os.PathLike[str],
    *,
    external_data_above: int = _EXTERNAL_ABOVE,
) -> None:
    """Write ``model`` to ``path``, whole or not at all.

    Weights that would make the file larger than ``external_data_above`` bytes go to
    ``<path>.data`` beside it. The model is not changed.

    Raises:
        SaveError: the model does not say its opset or IR version, refers to data that is not at
            hand, or the file system refuses.
    """
    target = os.path.abspath(os.fsdecode(path))
    label = repr(os.fsdecode(path))
    _check_versions(model, label)
    if isinstance(model, onnx.ModelProto):
        _check_complete(model, label)
        if _fits(model, external_data_above):
            write_files(label, {target: content(_serialised(model, label))})
            return
        _check_representable(model, label)
        model = ir.from_proto(model)
    try:
        standalone = _standalone(model)
    except (RuntimeError, ValueError, OSError) as error:
        raise SaveError(f"{label}: the model cannot be written\n  {error}") from error
    total = sum(v.const_value.nbytes for v in _weights(standalone) if v.const_value is not None)
    if total <= external_data_above:
        proto = ir.to_proto(standalone)
        if _fits(proto, external_data_above):
            write_files(label, {target: content(_serialised(proto, label))})
            return
        del proto
    tensors = _move_weights(standalone, os.path.basename(target) + ".data")
    proto = _serialised(ir.to_proto(standalone), label)
    files = {target: content(proto)}
    if tensors:
        files = {target + ".data": _data_writer(tensors), **files}
    write_files(label, files)


def _fits(model: onnx.ModelProto, limit: int) -> bool:
    """Return whether a model is small enough; beyond 2 GiB protobuf does not even tell the size."""
    return sum(len(t.raw_data) for t in all_tensors(model)) <= limit and model.ByteSize() <= limit


def _check_versions(model: ir.Model | onnx.ModelProto, label: str) -> None:
    if isinstance(model, onnx.ModelProto):
        imports = {entry.domain: entry.version for entry in model.opset_import}
    else:
        imports = dict(model.opset_imports)
    missing = []
    if not model.ir_version:
        missing.append("IR version")
    if not imports or not all(imports.values()):
        missing.append("opset")
    if missing:
        raise SaveError(
            f"{label}: the model has no {' and no '.join(missing)}\n"
            "hint: set ir_version and opset_imports; a default would depend on the installed onnx"
        )


def _check_complete(model: onnx.ModelProto, label: str) -> None:
    """A ModelProto does not know where its external data is, so its copy would lose it."""
    for tensor in all_tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise SaveError(
                f"{label}: the ModelProto refers to external data: {quote(tensor.name)}\n"
                "hint: load the model from its path and save what load() returns"
            )


def _check_representable(model: onnx.ModelProto, label: str) -> None:
    if model.training_info or model.graph.sparse_initializer:
        raise SaveError(
            f"{label}: training_info and sparse initializers cannot go with external data\n"
            "hint: remove them, or save the parts separately"
        )


def _standalone(model: ir.Model) -> ir.Model:
    """A copy that refers to no other file."""
    clone = model.clone()
    for value in _weights(clone):
        assert value.const_value is not None
        value.const_value = _in_memory(value.const_value)
    for graph in _graphs(clone):
        for node in graph:
            for name, attribute in list(node.attributes.items()):
                if attribute.is_ref() or attribute.value is None:
                    continue
                if attribute.type == ir.AttributeType.TENSOR:
                    tensor = _in_memory(attribute.as_tensor())
                    node.attributes[name] = ir.AttrTensor(name, tensor)
                elif attribute.type == ir.AttributeType.TENSORS:
                    tensors = [_in_memory(tensor) for tensor in attribute.as_tensors()]
                    node.attributes[name] = ir.AttrTensors(name, tensors)
    return clone


def _in_memory(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    if not isinstance(tensor, ir.ExternalTensor):
        return tensor
    # numpy() maps the file, so the tensor survives when a file of the same name is replaced.
    return ir.Tensor(tensor.numpy(), tensor.dtype, name=tensor.name, doc_string=tensor.doc_string)


def _graphs(model: ir.Model) -> Iterator[ir.Graph]:
    pending = [model.graph, *(function.graph for function in model.functions.values())]
    while pending:
        graph = pending.pop()
        yield graph
        for node in graph:
            pending += subgraphs_of(node)


def _weights(model: ir.Model) -> Iterator[ir.Value]:
    for graph in _graphs(model):
        for value in graph.initializers.values():
            if value.const_value is not None and value.const_value.dtype != ir.DataType.STRING:
                yield value


def _move_weights(model: ir.Model, location: str) -> list[tuple[int, ir.TensorProtocol]]:
    """Replace the larger weights by references to ``location``; return back (offset, tensor)."""
    moved: list[tuple[int, ir.TensorProtocol]] = []
    end = 0
    for value in _weights(model):
        tensor = value.const_value
        assert tensor is not None
        if tensor.nbytes < _SMALLEST:
            continue
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = offset + tensor.nbytes
        moved.append((offset, tensor))
        value.const_value = ir.ExternalTensor(
            location,
            offset,
            tensor.nbytes,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=value.name or "",
            doc_string=tensor.doc_string,
        )
    return moved


def _serialised(proto: onnx.ModelProto, label: str) -> bytes:
    if proto.ByteSize() > _PROTOBUF_BYTES:
        raise SaveError(
            f"{label}: the model needs {proto.ByteSize()} bytes, over protobuf's 2 GiB\n"
            "hint: large constants can only be external data as initializers, not as attributes"
        )
    return proto.SerializeToString(deterministic=True)


def _data_writer(tensors: list[tuple[int, ir.TensorProtocol]]) -> Writer:
    def write(file: BinaryIO) -> None:
        for offset, tensor in tensors:
            file.write(bytes(offset - file.tell()))
            file.write(tensor.tobytes())

    return write
