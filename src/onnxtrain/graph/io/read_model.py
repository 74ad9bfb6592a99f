"""The entry point of model files: `load` refuses the broken and the hostile, `save` is atomic."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Protocol, runtime_checkable

import onnx
import onnx_ir as ir

from onnxtrain.errors import LoadError
from onnxtrain.graph.io import ir_check, structure
from onnxtrain.graph.io.external_data import DataFiles
from onnxtrain.graph.io.imports import import_runtime_domain, note_load_repair
from onnxtrain.graph.io.limits import Kind, Limits, Problems, quote
from onnxtrain.graph.io.proto_check import ProtoReader
from onnxtrain.graph.io.schema_check import check_nodes
from onnxtrain.graph.io.source import parse, read_file
from onnxtrain.graph.io.write_model import save

__all__ = ["Limits", "load", "save"]


@runtime_checkable
class HoldsModel(Protocol):
    """Something that is a model with more around it."""

    def as_ir(self) -> ir.Model:
        """Return the model."""
        ...


Source = str | os.PathLike[str] | bytes | onnx.ModelProto | ir.Model | HoldsModel
"""What stands for a model."""
_OLDEST_OPSET = 7  # of those that onnxruntime has all operators of
_DEFAULT_IR_VERSION = 10
_ALLOWED = "onnxtrain.domains"  # key in Model.meta: what the caller admitted, for the next load

NO_GRAPH = Kind("not an ONNX model", "the file is damaged, incomplete or of another format")
NO_OUTPUTS = Kind("the graph has no outputs", "there is nothing to compute in this model")
NEW_IR = Kind("an IR version that is not known", "newer models need a newer onnx package")
UNREADABLE = Kind("the model cannot be represented", "export the model again")


def load(
    source: Source,
    *,
    limits: Limits | None = None,
    allow_domains: Collection[str] = (),
) -> ir.Model:
    """A model of its own, checked, from a path, bytes, a ModelProto or an ir.Model.

    The argument and its files are never changed, and the result shares nothing with them that can
    be renamed or rewired. Weights in external data are mapped into memory, read-only. Initializers
    that are also listed as inputs become plain initializers; nodes are in topological order; a
    subgraph value that hides an outer one is renamed.

    Args:
        source: where the model is. Only a path may have external data beside it.
        limits: what is too large; `Limits()` unless given.
        allow_domains: operator domains to admit besides the standard ones, ``com.microsoft`` and
            those of the model's own functions.

    Raises:
        LoadError: the file is missing, broken, hostile, over a limit, or not a valid model.

    >>> load(b"not a model")
    Traceback (most recent call last):
        ...
    onnxtrain.errors.LoadError: bytes: not an ONNX model
      it is not a complete protobuf
    hint: the file is damaged, incomplete or of another format
    """
    limits = limits or Limits()
    if isinstance(source, HoldsModel):
        source = source.as_ir()
    allowed = {allow_domains} if isinstance(allow_domains, str) else set(allow_domains)
    if isinstance(source, ir.Model):
        allowed |= source.meta.get(_ALLOWED, frozenset())
        model = _from_ir(source, limits, allowed)
    elif isinstance(source, onnx.ModelProto):
        model = _from_proto(source, limits, allowed, Problems("ModelProto"), None, owned=False)
    else:
        model = _from_file(source, limits, allowed)
    model.meta[_ALLOWED] = frozenset(allowed)
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
    else:
        raise LoadError(
            f"cannot load a {type(origin).__name__}\n"
            "hint: give a path, the bytes of a file, an onnx.ModelProto or an onnx_ir.Model"
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
        raise problems.refusal(NO_GRAPH, "it has no graph")
    if not proto.graph.output:
        raise problems.refusal(NO_OUTPUTS)
    files = DataFiles(directory, limits)
    proto, tensors = _without_maps(proto, owned)
    reader = ProtoReader(limits, problems, files)
    wiring = reader.read(proto)
    problems.check()
    in_order = structure.check(wiring, limits, problems, allowed)
    problems.check()
    if reader.has_device_configurations:
        proto = _without_devices(proto, owned)
    try:
        model = ir.from_proto(proto)
        if not in_order:
            _sort(model)
        for name in tensors:
            note_load_repair(model, f"ZipMap left out: output {quote(name)} is a tensor now")
        return _finished(model, problems, {"": files})
    except LoadError:
        raise
    except (RuntimeError, ValueError, TypeError) as error:  # SerdeError and RecursionError too
        raise problems.refusal(UNREADABLE, _last_words(error)) from error


def _from_ir(original: ir.Model, limits: Limits, allowed: set[str]) -> ir.Model:
    problems = Problems("ir.Model")
    if not original.graph.outputs:
        raise problems.refusal(NO_OUTPUTS)
    files = ir_check.DirectoryFiles(limits)
    wiring = ir_check.read(original, limits, problems, files)
    problems.check()
    in_order = structure.check(wiring, limits, problems, allowed)
    problems.check()
    try:
        if in_order:
            model = original.clone()
        else:  # clone() wants sorted nodes, and the original is not ours to sort
            model = ir.from_proto(ir.to_proto(original))
            _sort(model)
        model.meta.update(original.meta)
        return _finished(model, problems, files)
    except LoadError:
        raise
    except (RuntimeError, ValueError, TypeError) as error:
        raise problems.refusal(UNREADABLE, _last_words(error)) from error


def _finished(model: ir.Model, problems: Problems, files: ir_check.Files) -> ir.Model:
    if not model.ir_version:
        model.ir_version = _DEFAULT_IR_VERSION
    if not 0 < model.ir_version <= onnx.IR_VERSION:
        known = f"onnx {onnx.__version__} knows 1 to {onnx.IR_VERSION}"
        raise problems.refusal(NEW_IR, f"IR version {model.ir_version}, {known}")
    import_runtime_domain(model)
    ir_check.tidy(model, problems, files)
    problems.check()
    check_nodes(model, problems)
    problems.check()
    return model


def _sort(model: ir.Model) -> None:
    model.graph.sort()
    for function in model.functions.values():
        function.sort()


def _without_maps(proto: onnx.ModelProto, owned: bool) -> tuple[onnx.ModelProto, list[str]]:
    """Return the model without ZipMap nodes at its end, and the outputs that are tensors instead.

    Converters of scikit-learn put them there: they only write classes beside the columns.
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
    if not owned:
        copy = onnx.ModelProto()
        copy.CopyFrom(proto)
        proto = copy
    changed: list[str] = []
    for node in (proto.graph.node[i] for i in last):
        node.op_type, node.domain = "Identity", ""
        del node.attribute[:]
        changed.append(node.output[0])
    if not any(o.domain in ("", "ai.onnx") for o in proto.opset_import):
        proto.opset_import.add(domain="", version=_OLDEST_OPSET)
    for info in [*proto.graph.output, *proto.graph.value_info]:
        if info.name in changed:
            info.ClearField("type")
            info.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return proto, changed


def _without_devices(proto: onnx.ModelProto, owned: bool) -> onnx.ModelProto:
    """The model without multi-device annotations: they mean nothing here and are slow to read."""
    if not owned:
        copy = onnx.ModelProto()
        copy.CopyFrom(proto)
        proto = copy
    pending = [proto.graph, *proto.functions]
    while pending:
        for node in pending.pop().node:
            node.ClearField("device_configurations")
            for attribute in node.attribute:
                pending += [attribute.g] if attribute.HasField("g") else attribute.graphs
    return proto


def _last_words(error: BaseException) -> str:
    """The innermost reason: the outer ones repeat whole graphs."""
    while error.__cause__ is not None:
        error = error.__cause__
    return quote(str(error) or type(error).__name__)[1:-1]
