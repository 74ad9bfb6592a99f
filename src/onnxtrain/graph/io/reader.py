"""Load models: from a path or bytes to a checked and normalized `onnx_ir` model.

:func:`load` is at the end of this file. It reads the bytes (:func:`read_file`), parses them
(:func:`parse`), checks the protobuf before onnx_ir sees it
(:mod:`onnxtrain.graph.io.proto_checks`), converts it, and normalizes and checks the result
(:mod:`onnxtrain.graph.io.ir_checks`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from typing import Protocol, runtime_checkable

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from onnxtrain.errors import LoadError
from onnxtrain.graph.io import ir_checks, proto_checks
from onnxtrain.graph.io.external_data import DataFiles
from onnxtrain.graph.io.ir_checks import check_nodes
from onnxtrain.graph.io.limits import (
    PROTOBUF_BYTES,
    Limits,
    NotRegularError,
    ProblemKind,
    Problems,
    open_regular,
    quote,
)
from onnxtrain.graph.io.proto_checks import TOO_DEEP, ProtoReader
from onnxtrain.graph.io.protobuf import LENGTH_DELIMITED, read_field
from onnxtrain.graph.opset_imports import import_runtime_domain, record_load_repair

NO_FILE = ProblemKind("no such file")
DIRECTORY = ProblemKind("this is a directory, not a model", "pass the .onnx file in it")
NOT_REGULAR = ProblemKind("not a regular file", "save the model to a file first")
CANNOT_READ = ProblemKind("the file cannot be read")
EMPTY = ProblemKind("the file is empty", "copy or download it again")
TOO_LARGE = ProblemKind(
    "the file is over the size limit",
    "if you trust the file: load(..., limits=Limits(file_bytes=...))",
)
OVER_2_GIB = ProblemKind(
    "the file is over 2 GiB, the limit of protobuf",
    "store the weights as external data: onnx.save(..., save_as_external_data=True)",
)
NOT_ONNX = ProblemKind("not an ONNX model", "the file is corrupt, truncated or of another format")

_KNOWN_FORMATS = [
    (0, b"version https://git-lfs", "a git-lfs pointer", "fetch the file itself: git lfs pull"),
    (0, b"PK\x03\x04", "a zip archive", "export a torch checkpoint with torch.onnx.export"),
    (0, b"\x1f\x8b", "a gzip archive", "unpack it first"),
    (0, b"\x89HDF", "an HDF5 file", "convert it with tf2onnx"),
    (4, b"ORTM", "an ONNX Runtime .ort file", "load the .onnx file that it was converted from"),
    (4, b"TFL3", "a TensorFlow Lite file", "convert it with tf2onnx"),
    (0, b"<!DOCTYPE", "a web page", "download the file again, from its direct link"),
    (0, b"<html", "a web page", "download the file again, from its direct link"),
]
"""Other formats by the bytes at an offset: what the file is, and a hint."""


def read_file(path: str, limits: Limits, problems: Problems) -> bytes:
    """Return the bytes of a regular file within the limits."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            _check_size(size, limits, problems)
            return file.read(size)
    except (FileNotFoundError, NotADirectoryError):
        raise problems.refusal(NO_FILE) from None
    except NotRegularError:
        raise problems.refusal(NOT_REGULAR) from None
    except OSError as error:
        if os.path.isdir(path):
            raise problems.refusal(DIRECTORY) from None
        raise problems.refusal(CANNOT_READ, str(error)) from error


def parse(data: bytes, limits: Limits, problems: Problems) -> onnx.ModelProto:
    """Parse a serialized ModelProto."""
    _check_size(len(data), limits, problems)
    if not data:
        raise problems.refusal(EMPTY)
    for offset, magic, file_format, hint in _KNOWN_FORMATS:
        if data.startswith(magic, offset):
            raise problems.refusal(ProblemKind(NOT_ONNX.headline, hint), f"this is {file_format}")
    try:
        return onnx.ModelProto.FromString(data)
    except DecodeError as error:
        if _nested_deeper(data, limits.depth):
            raise problems.refusal(TOO_DEEP, f"more than {limits.depth} levels") from None
        raise problems.refusal(NOT_ONNX, "it is not a complete protobuf") from error


def _check_size(size: int, limits: Limits, problems: Problems) -> None:
    if size > limits.file_bytes:
        raise problems.refusal(TOO_LARGE, f"{size} bytes, the limit is {limits.file_bytes}")
    if size > PROTOBUF_BYTES:
        raise problems.refusal(OVER_2_GIB, f"{size} bytes")


# Message -> {field number: nested message}, for the messages that can contain subgraphs.
_NESTED_FIELDS = {
    "model": {7: "graph", 25: "function"},
    "function": {7: "node"},
    "graph": {1: "node"},
    "node": {5: "attribute"},
    "attribute": {6: "graph", 11: "graph"},
}


def _nested_deeper(data: bytes, limit: int, steps: int = 50_000) -> bool:
    """Return whether subgraphs are nested deeper than ``limit`` in a file that protobuf rejected.

    Reads the wire format iteratively and stops after a fixed number of fields.
    """
    pending = [(0, len(data), "model", -1)]
    while pending and steps:
        steps -= 1
        position, end, message, depth = pending.pop()
        if depth > limit:
            return True
        field = read_field(data, position, end)
        if field is None:
            continue
        number, wire_type, start, stop = field
        if stop < end:
            pending.append((stop, end, message, depth))
        nested = _NESTED_FIELDS[message].get(number)
        if nested and wire_type == LENGTH_DELIMITED and start < stop:
            pending.append((start, min(stop, end), nested, depth + (nested == "graph")))
    return False


@runtime_checkable
class HoldsModel(Protocol):
    """An object that wraps a model."""

    def as_ir(self) -> ir.Model:
        """Return the model."""
        ...


@dataclasses.dataclass(frozen=True)
class CheckedModel:
    """A model that `load` has checked, or that was derived from one; `load` only copies it.

    Pass it between functions that accept a ``Source``, so that the file is checked only once.
    """

    model: ir.Model
    path: str | None = None
    """The file that the model was loaded from unchanged, if any."""

    def as_ir(self) -> ir.Model:
        """Return the model itself, not a copy."""
        return self.model


Source = str | os.PathLike[str] | bytes | onnx.ModelProto | ir.Model | HoldsModel
"""Everything that `load` accepts as a model."""
_MIN_OPSET = 7  # the oldest opset that onnxruntime supports completely
_DEFAULT_IR_VERSION = 10
# Key in Graph.meta, which Model.clone() copies: the domains that the caller allowed. Loading the
# result again then allows them too.
_ALLOWED = "onnxtrain.domains"

NO_OUTPUTS = ProblemKind("the graph has no outputs", "add the values to compute to graph.output")
NEW_IR = ProblemKind("unsupported IR version", "newer models need a newer onnx package")
UNREADABLE = ProblemKind("onnx_ir cannot represent the model", "export the model again")


def load(
    source: Source,
    *,
    limits: Limits | None = None,
    allow_domains: Collection[str] = (),
) -> ir.Model:
    """Load and check a model from a path, bytes, a ModelProto or an ir.Model; return a copy.

    The source is never changed, and the result shares only immutable data with it. External data is
    mapped into memory, read-only. The result is normalized: initializers that are also listed as
    inputs become plain initializers, nodes are in topological order, and subgraph values that
    shadow an outer value are renamed.

    Args:
        source: the model. External data requires a path. A `CheckedModel` is copied without a
            second check.
        limits: sizes above which to reject the model; by default `Limits()`.
        allow_domains: operator domains to accept in addition to the standard ones,
            ``com.microsoft`` and those of the model's own functions.

    Raises:
        LoadError: the file is missing, corrupt, hostile, over a limit, or not a valid model.

    >>> load(b"not a model")
    Traceback (most recent call last):
        ...
    onnxtrain.errors.LoadError: bytes: not an ONNX model
      it is not a complete protobuf
    hint: the file is corrupt, truncated or of another format
    """
    limits = limits or Limits()
    if isinstance(source, CheckedModel):
        copy = source.model.clone()
        copy.meta.update(source.model.meta)
        return copy
    if isinstance(source, HoldsModel):
        source = source.as_ir()
    allowed = {allow_domains} if isinstance(allow_domains, str) else set(allow_domains)
    if isinstance(source, ir.Model):
        allowed |= source.graph.meta.get(_ALLOWED, frozenset())
        model = _from_ir(source, limits, allowed)
    elif isinstance(source, onnx.ModelProto):
        model = _from_proto(source, limits, allowed, Problems("ModelProto"), None, owned=False)
    else:
        model = _from_file(source, limits, allowed)
    model.graph.meta[_ALLOWED] = frozenset(allowed)
    return model


def _from_file(
    origin: str | os.PathLike[str] | bytes, limits: Limits, allowed: set[str]
) -> ir.Model:
    directory = None
    if isinstance(origin, bytes | bytearray | memoryview):
        problems, data = Problems("bytes"), bytes(origin)
    elif isinstance(origin, str | os.PathLike):
        path = os.fsdecode(origin)
        problems = Problems(repr(path))
        data = read_file(path, limits, problems)
        directory = os.path.dirname(os.path.abspath(path))
    elif any(kind.__module__.partition(".")[0] == "torch" for kind in type(origin).__mro__):
        raise LoadError(
            f"{type(origin).__name__} is a module of torch, not an ONNX model\n"
            "hint: export it: onnxtrain.torch.from_torch(module, example_inputs)"
        )
    else:
        raise LoadError(
            f"cannot load a model from {type(origin).__name__}\n"
            "hint: pass a path, the bytes of a file, an onnx.ModelProto or an onnx_ir.Model"
        )
    proto = parse(data, limits, problems)
    del data, origin
    return _from_proto(proto, limits, allowed, problems, directory, owned=True)


def _from_proto(
    proto: onnx.ModelProto,
    limits: Limits,
    allowed: set[str],
    problems: Problems,
    directory: str | None,
    *,
    owned: bool,
) -> ir.Model:
    if not proto.HasField("graph"):
        raise problems.refusal(NOT_ONNX, "it has no graph")
    if not proto.graph.output:
        raise problems.refusal(NO_OUTPUTS)
    files = DataFiles(directory, limits)
    proto, converted_outputs = _without_zipmaps(proto, owned)
    reader = ProtoReader(limits, problems, files)
    structure = reader.read(proto)
    problems.check()
    is_sorted = proto_checks.check_structure(structure, limits, problems, allowed)
    problems.check()
    if reader.has_device_configurations:
        proto = _without_devices(proto, owned)
    try:
        model = ir.from_proto(proto)
        if not is_sorted:
            _sort(model)
        for name in converted_outputs:
            record_load_repair(model, f"ZipMap left out: output {quote(name)} is a tensor now")
        if proto.training_info:
            line = "training_info left out: Artifacts.from_training_info reads it"
            record_load_repair(model, line)
        return _finish_load(model, problems, {"": files})
    except LoadError:
        raise
    except (RuntimeError, ValueError, TypeError) as error:  # SerdeError and RecursionError too
        raise problems.refusal(UNREADABLE, _root_cause(error)) from error


def _from_ir(original: ir.Model, limits: Limits, allowed: set[str]) -> ir.Model:
    problems = Problems("ir.Model")
    if not original.graph.outputs:
        raise problems.refusal(NO_OUTPUTS)
    files = ir_checks.DirectoryFiles(limits)
    structure = ir_checks.read_structure(original, limits, problems, files)
    problems.check()
    is_sorted = proto_checks.check_structure(structure, limits, problems, allowed)
    problems.check()
    try:
        if is_sorted:
            model = original.clone()
        else:  # clone() requires sorted nodes, and the caller's model must not change
            model = ir.from_proto(ir.to_proto(original))
            _sort(model)
            model.graph.meta.update(original.graph.meta)
        model.meta.update(original.meta)
        return _finish_load(model, problems, files)
    except LoadError:
        raise
    except (RuntimeError, ValueError, TypeError) as error:
        raise problems.refusal(UNREADABLE, _root_cause(error)) from error


def _finish_load(model: ir.Model, problems: Problems, files: ir_checks.Files) -> ir.Model:
    if not model.ir_version:
        model.ir_version = _DEFAULT_IR_VERSION
    if not 0 < model.ir_version <= onnx.IR_VERSION:
        supported = f"onnx {onnx.__version__} supports 1 to {onnx.IR_VERSION}"
        raise problems.refusal(NEW_IR, f"IR version {model.ir_version}, {supported}")
    import_runtime_domain(model)
    ir_checks.repair_nodes(model)
    ir_checks.normalize_loaded(model, problems, files)
    problems.check()
    check_nodes(model, problems)
    problems.check()
    return model


def _sort(model: ir.Model) -> None:
    model.graph.sort()
    for function in model.functions.values():
        function.sort()


def _without_zipmaps(proto: onnx.ModelProto, owned: bool) -> tuple[onnx.ModelProto, list[str]]:
    """Replace ZipMap nodes before graph outputs by Identity; return the model and these outputs.

    skl2onnx appends them to classifiers, to label the columns of the probabilities. Without them
    the outputs are tensors.
    """
    if all(node.op_type != "ZipMap" for node in proto.graph.node):
        return proto, []
    outputs = {y.name for y in proto.graph.output}
    outputs -= {x for node in proto.graph.node for x in node.input}
    last = [
        i
        for i, node in enumerate(proto.graph.node)
        if node.op_type == "ZipMap"
        and node.domain == "ai.onnx.ml"
        and len(node.input) == len(node.output) == 1
        and node.output[0] in outputs
    ]
    if not last:
        return proto, []
    proto = proto if owned else _copy(proto)
    changed: list[str] = []
    for node in (proto.graph.node[i] for i in last):
        node.op_type, node.domain = "Identity", ""
        del node.attribute[:]
        changed.append(node.output[0])
    if not any(o.domain in ("", "ai.onnx") for o in proto.opset_import):
        proto.opset_import.add(domain="", version=_MIN_OPSET)
    for info in [*proto.graph.output, *proto.graph.value_info]:
        if info.name in changed:
            info.ClearField("type")
            info.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return proto, changed


def _without_devices(proto: onnx.ModelProto, owned: bool) -> onnx.ModelProto:
    """Return the model without multi-device annotations, which onnx_ir is slow to read."""
    proto = proto if owned else _copy(proto)
    pending = [proto.graph, *proto.functions]
    while pending:
        for node in pending.pop().node:
            node.ClearField("device_configurations")
            for attribute in node.attribute:
                pending += [attribute.g] if attribute.HasField("g") else attribute.graphs
    return proto


def _copy(proto: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    return copy


def _root_cause(error: BaseException) -> str:
    """Return the message of the innermost cause; the outer messages repeat whole graphs."""
    while error.__cause__ is not None:
        error = error.__cause__
    return quote(str(error) or type(error).__name__)[1:-1]
