"""Write models and files: atomically, and with the same bytes for the same model.

In this order: :func:`write_files` replaces several files atomically. :func:`save` writes a model,
with external data if it exceeds protobuf's 2 GiB. :func:`finalize` turns a generated graph into a
checked ModelProto, without the author's file paths (:func:`strip_traces`). :func:`transform_proto`
runs a transformation of protobufs on a model without copying its large weights.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

import onnx
import onnx.shape_inference
import onnx.version_converter
import onnx_ir as ir

from onnxtrain.errors import PrepareError, SaveError
from onnxtrain.graph.io.external_data import detach_weights, release_memory, write_tensor
from onnxtrain.graph.io.limits import PROTOBUF_BYTES, quote
from onnxtrain.graph.nodes import subgraphs_of
from onnxtrain.graph.shapes import first_line


def all_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield the tensors of all graphs, subgraphs, functions and attributes, including sparse."""
    pending: list[Any] = [model.graph, *model.functions]
    for info in model.training_info:
        pending += [info.initialization, info.algorithm]
    while pending:
        body = pending.pop()
        attributes = [a for node in body.node for a in node.attribute]
        if isinstance(body, onnx.GraphProto):
            yield from body.initializer
            yield from _dense_parts(body.sparse_initializer)
        else:
            attributes += body.attribute_proto
        for attribute in attributes:
            # Check the fields, not attribute.type: readers differ in which of the two they trust.
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            if attribute.HasField("sparse_tensor"):
                yield from _dense_parts([attribute.sparse_tensor])
            yield from _dense_parts(attribute.sparse_tensors)
            if attribute.HasField("g"):
                pending.append(attribute.g)
            pending += attribute.graphs


def _dense_parts(sparse: Iterable[onnx.SparseTensorProto]) -> Iterator[onnx.TensorProto]:
    for tensor in sparse:
        yield tensor.values
        yield tensor.indices


Writer = Callable[[BinaryIO], object]
"""Writes the content of one file."""
_MAX_NAME_LENGTH = 48  # of a file name in a temporary name: file systems limit names to 255 bytes


def bytes_writer(data: bytes) -> Writer:
    """Return a writer of known bytes."""
    return lambda file: file.write(data)


@contextmanager
def as_save_error(label: str) -> Iterator[None]:
    """Turn file system errors into a `SaveError` that names the file.

    Raises:
        SaveError: with the reason of the file system.
    """
    try:
        yield
    except OSError as error:
        raise SaveError(f"{label}: cannot be written\n  {error}") from error


def write_files(label: str, files: dict[str, Writer], *, guard: bool = True) -> None:
    """Replace files atomically: write all under temporary names, flush, then rename in order.

    Args:
        label: the name of the files in errors.
        files: writers by path; all paths are in one directory.
        guard: remove the last file, which refers to the others, while they are replaced.

    Raises:
        SaveError: with the reason of the file system, or a path is a device, a pipe or a socket.
    """
    temporary: dict[str, str] = {}
    try:
        with as_save_error(label):
            for path in files:
                _check_replaceable(path)
            _write(files, temporary)
            _replace(temporary, guard)
    finally:
        for path in temporary.values():
            # An error here must not replace the error that made the write fail.
            with suppress(OSError):
                os.unlink(path)


def _check_replaceable(path: str) -> None:
    """Raise OSError for ``/dev/null`` and the like: a rename would replace it for all programs."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise OSError("not a regular file but a pipe, a device or a socket")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write one text file atomically; raise the errors of `write_files`."""
    write_files(repr(os.fsdecode(path)), {os.path.abspath(path): bytes_writer(text.encode())})


def _write(files: dict[str, Writer], temporary: dict[str, str]) -> None:
    for path, write in files.items():
        name = f".{os.path.basename(path)[:_MAX_NAME_LENGTH]}.{secrets.token_hex(8)}.tmp"
        # O_EXCL: never follow a link that somebody placed at the temporary path.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        temporary[path] = os.path.join(os.path.dirname(path), name)
        with open(os.open(temporary[path], flags, 0o666), "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())


def remove_leftovers(folder: str | os.PathLike[str], names: Iterable[str]) -> None:
    """Remove temporary files that killed calls of `write_files` left for the given names."""
    clipped = {name[:_MAX_NAME_LENGTH] for name in names}
    with suppress(OSError):
        for name in sorted(os.listdir(folder)):
            match = re.fullmatch(r"\.(.+)\.[0-9a-f]{16}\.tmp", name, re.DOTALL)
            if match and match[1] in clipped:
                with suppress(OSError):
                    os.unlink(os.path.join(folder, name))


def _replace(temporary: dict[str, str], guard: bool) -> None:
    *data, (model, _) = temporary.items()
    if guard and any(os.path.exists(path) for path, _ in data):
        # Between two renames the old model would read the new data. A missing model is safer.
        with suppress(FileNotFoundError):
            os.unlink(model)
    for path, written in temporary.items():
        os.replace(written, path)
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(os.path.dirname(model) or os.curdir, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


_EXTERNAL_ABOVE = PROTOBUF_BYTES - (64 << 20)  # leaves room for the graph beside the weights
_MIN_EXTERNAL_BYTES = 1024  # smaller tensors stay in the protobuf, where shape inference sees them
_ALIGNMENT = 64


def save(
    model: ir.Model | onnx.ModelProto,
    path: str | os.PathLike[str],
    *,
    external_data_above: int = _EXTERNAL_ABOVE,
) -> None:
    """Write a model to a file atomically; the model is not changed.

    If the file would be larger than ``external_data_above`` bytes, weights go to ``<path>.data``
    beside it.

    Raises:
        SaveError: the model has no opset or IR version or refers to missing external data, or the
            file system fails.
    """
    target = os.path.abspath(os.fsdecode(path))
    label = repr(os.fsdecode(path))
    _check_versions(model, label)
    if isinstance(model, onnx.ModelProto):
        _check_complete(model, label)
        if _fits_in_protobuf(model, external_data_above):
            write_files(label, {target: bytes_writer(_serialize(model, label))})
            return
        _check_representable(model, label)
        model = ir.from_proto(model)
    try:
        standalone = _self_contained_copy(model)
    except (RuntimeError, ValueError, OSError) as error:
        raise SaveError(f"{label}: the model cannot be written\n  {error}") from error
    total = sum(v.const_value.nbytes for v in _weights(standalone) if v.const_value is not None)
    if total <= external_data_above:
        proto = ir.to_proto(standalone)
        if _fits_in_protobuf(proto, external_data_above):
            write_files(label, {target: bytes_writer(_serialize(proto, label))})
            return
        del proto
    tensors = _move_weights(standalone, os.path.basename(target) + ".data")
    proto = _serialize(ir.to_proto(standalone), label)
    files = {target: bytes_writer(proto)}
    if tensors:
        files = {target + ".data": _data_writer(tensors), **files}
    write_files(label, files)


def _fits_in_protobuf(model: onnx.ModelProto, limit: int) -> bool:
    """Return whether a model is small enough to write without external data."""
    # Sum the tensors first: beyond 2 GiB, ByteSize() raises an error.
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
            "hint: set ir_version and opset_imports; there is no default, because it would depend "
            "on the installed onnx"
        )


def _check_complete(model: onnx.ModelProto, label: str) -> None:
    """Raise an error for external data, whose directory a ModelProto does not record."""
    for tensor in all_tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise SaveError(
                f"{label}: the ModelProto refers to external data: {quote(tensor.name)}\n"
                "hint: load the model from its path and save what load() returns"
            )


def _check_representable(model: onnx.ModelProto, label: str) -> None:
    if model.training_info or model.graph.sparse_initializer:
        raise SaveError(
            f"{label}: a model with training_info or sparse initializers cannot be saved with "
            "external data\nhint: remove them, or save the parts separately"
        )


def _self_contained_copy(model: ir.Model) -> ir.Model:
    """Return a copy of a model whose tensors do not refer to files."""
    clone = model.clone()
    for value in _weights(clone):
        assert value.const_value is not None
        value.const_value = _in_memory_tensor(value.const_value)
    for graph in _graphs(clone):
        for node in graph:
            for name, attribute in list(node.attributes.items()):
                if attribute.is_ref() or attribute.value is None:
                    continue
                if attribute.type == ir.AttributeType.TENSOR:
                    tensor = _in_memory_tensor(attribute.as_tensor())
                    node.attributes[name] = ir.AttrTensor(name, tensor)
                elif attribute.type == ir.AttributeType.TENSORS:
                    tensors = [_in_memory_tensor(tensor) for tensor in attribute.as_tensors()]
                    node.attributes[name] = ir.AttrTensors(name, tensors)
    return clone


def _in_memory_tensor(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    if not isinstance(tensor, ir.ExternalTensor):
        return tensor
    # numpy() maps the file, so the data stays valid when `save` replaces a file of the same name.
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
    """Replace the larger weights by references to ``location``; return them with their offsets."""
    moved: list[tuple[int, ir.TensorProtocol]] = []
    end = 0
    for value in _weights(model):
        tensor = value.const_value
        assert tensor is not None
        if tensor.nbytes < _MIN_EXTERNAL_BYTES:
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


def _serialize(proto: onnx.ModelProto, label: str) -> bytes:
    if proto.ByteSize() > PROTOBUF_BYTES:
        raise SaveError(
            f"{label}: the model takes {proto.ByteSize()} bytes without external data, more than "
            "protobuf's 2 GiB\n"
            "hint: turn large Constant nodes into initializers, which can be external data"
        )
    return proto.SerializeToString(deterministic=True)


def _data_writer(tensors: list[tuple[int, ir.TensorProtocol]]) -> Writer:
    def write(file: BinaryIO) -> None:
        for offset, tensor in tensors:
            file.write(bytes(offset - file.tell()))
            write_tensor(file, tensor)
        release_memory()

    return write


_TRACE_KEYS = re.compile(r"stack_?trace|source_?(file|location)", re.IGNORECASE)
_FILES = re.compile(
    r"""File\ ["'][^"'\n]+["'],\ line\ \d+       # a line of a Python traceback
    |(?:^|[\s"'(=:])(?:/|[A-Za-z]:[\\/])[^\s"']*[\\/][^\s"']+\.(?:py|ipynb|cpp|cc|cu|h)\b""",
    re.VERBOSE,
)


def strip_traces(model: ir.Model) -> None:
    """Remove stack traces and source paths from metadata and doc strings, subgraphs included."""
    _strip(model)
    pending: list[Any] = [model.graph, *model.functions.values()]
    while pending:
        graph = pending.pop()
        _strip(graph)
        for value in (*graph.inputs, *graph.outputs, *getattr(graph, "initializers", {}).values()):
            _strip(value)
        for node in graph:
            _strip(node)
            for value in node.outputs:
                _strip(value)
            pending += subgraphs_of(node)


def _strip(part: Any) -> None:
    props = part.metadata_props
    for key in [k for k, text in props.items() if _TRACE_KEYS.search(k) or _FILES.search(text)]:
        del props[key]
    if part.doc_string and _FILES.search(part.doc_string):
        part.doc_string = None


PRODUCER = "onnxtrain"
_MAX_CHECKED_BYTES = 1 << 30  # onnx's checker needs a single protobuf below 2 GiB


def finalize(model: ir.Model) -> onnx.ModelProto:
    """Set the producer, serialize and check a generated model.

    Raises:
        PrepareError: the model is not valid ONNX.
    """
    model.producer_name = PRODUCER
    strip_traces(model)
    has_weight_file = detach_weights(model)
    proto = ir.to_proto(model)
    if proto.ByteSize() < _MAX_CHECKED_BYTES:
        try:
            onnx.checker.check_model(_weights_as_inputs(proto) if has_weight_file else proto)
        except onnx.checker.ValidationError as error:
            raise PrepareError(
                f"the result is not a valid ONNX model: {first_line(error)}\n"
                "hint: check your model with onnx.checker.check_model, and the rules you registered"
            ) from error
    return proto


def _weights_as_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with external initializers as inputs: the checker would open their files."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    external = [t for t in copy.graph.initializer if t.external_data]
    for tensor in external:
        tensor_type = copy.graph.input.add(name=tensor.name).type.tensor_type
        tensor_type.elem_type = tensor.data_type
        tensor_type.shape.SetInParent()
        for size in tensor.dims:
            tensor_type.shape.dim.add(dim_value=size)
        copy.graph.initializer.remove(tensor)
    return copy


_LARGE = 1024  # elements: smaller initializers may be shapes, axes or scales that a pass reads
ONNX_ERRORS = (
    RuntimeError,
    onnx.shape_inference.InferenceError,
    onnx.version_converter.ConvertError,
)
"""Errors that onnx's version converter raises."""


def transform_proto(
    model: ir.Model, transform: Callable[[onnx.ModelProto], onnx.ModelProto]
) -> ir.Model:
    """Return the model that a transformation of its protobuf gives.

    Large initializers are inputs during the transformation, so that they are not copied.
    """
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
        placeholder = by_name.get(name)
        if placeholder is None:
            continue
        result.graph.inputs.remove(placeholder)
        placeholder.const_value = x.const_value
        result.graph.register_initializer(placeholder)
    _reorder(result.graph, order)
    result.meta.update(model.meta)
    result.graph.meta.update(graph.meta)
    return result


def _reorder(graph: ir.Graph, names: list[str]) -> None:
    """Restore the order of initializers in the file."""
    values = dict(graph.initializers)
    graph.initializers.clear()
    for name in [*(n for n in names if n in values), *(n for n in values if n not in names)]:
        graph.initializers[name] = values[name]
