"""Artifacts: what ``build`` returns, ``save`` writes to a directory and a trainer loads.

A directory contains the models, ``checkpoint`` with parameters, buffers and optimizer state,
``weights.bin`` with frozen weights that several models share, and ``manifest.json``, which
describes all of them. The file reads from the class to its parts:

- :class:`Artifacts`;
- loading: files are read and checked against the manifest;
- assembling: the bytes of all files, and where the inference model stores each weight;
- writing: an interrupted save leaves the old or the new artifacts, never a mixture.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from onnxtrain.artifacts.display import Row, SummaryRepr, format_names
from onnxtrain.artifacts.graphs import (
    dtype_name,
    is_model_name,
    model_key,
    plain_name,
)
from onnxtrain.artifacts.training_info import Content, read_training_info, to_proto
from onnxtrain.checkpoint import from_file, read_metadata, state_key, to_bytes
from onnxtrain.errors import CheckpointError, LoadError, SaveError, argument, by_caller
from onnxtrain.graph.io import external_data
from onnxtrain.graph.io.external_data import (
    DataFiles,
    ExternalDataError,
    SharedWeights,
    entries,
)
from onnxtrain.graph.io.limits import Limits, Problems, open_regular, quote, read_regular
from onnxtrain.graph.io.proto_checks import check_tensor
from onnxtrain.graph.io.protobuf import fields
from onnxtrain.graph.io.writer import (
    Writer,
    all_tensors,
    bytes_writer,
    remove_leftovers,
    save,
    write_files,
)
from onnxtrain.manifest import Location, Manifest, ModelSpec, WeightSpec
from onnxtrain.runtime.session import ModelWithWeightsFolder

MANIFEST = "manifest.json"
RUN = "run"
"""Folder of the run of ``onnxtrain train DIRECTORY``, inside that directory."""
_STAGING_PREFIX = ".saving-"  # of file names, until the final names are free
_METADATA_KEY = "onnxtrain"

_MIN_SHARED_BYTES = 1024  # larger constants move to the weights file that all models share
_ALIGNMENT = 64  # bytes, of each constant in the weights file
_COPY_CHUNK = 1 << 24  # bytes

# Field numbers of ModelProto.graph, GraphProto.initializer, TensorProto.name and .raw_data.
_MODEL_GRAPH, _GRAPH_INITIALIZER, _TENSOR_NAME, _TENSOR_RAW_DATA = 7, 5, 8, 9

FileContent = bytes | Writer
"""The bytes of a file, or a function that writes them."""

Assemble = Callable[[str], tuple[dict[str, FileContent], Manifest]]
"""Maps a prefix of file names to the files, the manifest last, and the manifest."""


@dataclasses.dataclass(repr=False)
class Artifacts(SummaryRepr):
    """Everything a training run needs: models, initial values and the manifest."""

    manifest: Manifest
    models: dict[str, onnx.ModelProto]
    """Models by role; variants by role and suffix, such as ``step.x8`` or ``step.webgpu``. Empty
    for artifacts that were loaded from a directory: sessions read the files."""
    values: dict[str, np.ndarray]
    """Parameters and buffers by name."""
    state: dict[str, np.ndarray]
    """Optimizer state by ``<parameter>.<slot>``."""
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Progress of a run: step, lr, schedule, seed, position in the data, properties."""
    directory: Path | None = None
    """Where the artifacts were loaded from; ``None`` for artifacts in memory."""
    shared: SharedWeights | None = None
    """External file of weights that are too large for a protobuf."""

    @classmethod
    def load(cls, directory: str | os.PathLike[str], prefix: str = "") -> Artifacts:
        """Load a directory and check every file against the manifest.

        Raises:
            CheckpointError: if a file is missing, damaged or of another version.
        """
        if not isinstance(directory, str | os.PathLike):
            raise CheckpointError(
                f"a {type(directory).__name__} is not a directory of artifacts\n"
                "hint: build them first: onnxtrain.build(model, loss=..., optimizer=...)"
            )
        folder = Path(directory)
        if folder.suffix == ".onnx" and not folder.is_dir():
            raise CheckpointError(
                f"{folder} is an ONNX model, not a directory of artifacts\nhint: build it first: "
                + by_caller(
                    "onnxtrain.build(path, loss=..., optimizer=...).save(directory)",
                    f"onnxtrain build {folder} --loss LOSS --optimizer adamw -o DIRECTORY",
                )
            )
        manifest = Manifest.from_json(
            _read_file(folder / f"{prefix}{MANIFEST}"), f"{prefix}{MANIFEST}"
        )
        _check_files(folder, manifest)
        path = folder / manifest.checkpoint
        try:
            with open_regular(path) as file:
                tensors, meta = from_file(file, manifest.checkpoint)
        except OSError as error:
            raise _unreadable_error(path, error) from error
        values, state = split_tensors(manifest, tensors, manifest.checkpoint)
        if meta.pop("manifest", None) != manifest.to_dict(hashes=False):
            raise CheckpointError(
                f"{prefix}{MANIFEST} and {manifest.checkpoint} belong to different artifacts\n"
                "hint: one of them was damaged or copied from another directory"
            )
        return cls(manifest, {}, values, state, meta, folder)

    def save(
        self, directory: str | os.PathLike[str], prefix: str = "", *, force: bool = False
    ) -> Manifest:
        """Write the artifacts to a directory; return the manifest as written.

        If the process is killed, the directory has the old or the new artifacts, complete.

        Args:
            directory: created if it does not exist.
            prefix: prefix of all file names.
            force: replace the trained weights of other artifacts in this directory.

        Raises:
            SaveError: if the file system refuses, or the directory has trained weights.
        """
        folder = Path(directory)
        if self.directory is None or self.directory.resolve() != folder.resolve():
            check_replaceable(folder, prefix, force=force)
        large_weights = self._large_weights()
        models = self.models or self._read_models(with_weights=large_weights is None)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SaveError(f"{folder}: cannot be created: {error.strerror}") from error
        with ExitStack() as stack:
            # Stays open during the save, which may replace this file.
            weights = (
                None if large_weights is None else stack.enter_context(_open_weights(large_weights))
            )
            manifest = _write_directory(
                folder, prefix, lambda p: _assemble(self, models, p, weights)
            )
        if self.directory is not None and self.directory.resolve() == folder.resolve():
            self.manifest = manifest  # the prefix, and with it file names, may differ
        return manifest

    def to_training_info(self, path: str | os.PathLike[str]) -> None:
        """Write one ONNX file: the inference model, with training as the standard describes it.

        ``training_info[0]`` of the file is a training step, ``training_info[1]`` the evaluation.

        Args:
            path: of the file.

        Raises:
            SaveError: the artifacts accumulate gradients, or are too large for one file.
        """
        models = self.models or self._read_models(with_weights=True)
        content = Content(self.manifest, models, self.values, self.state, self.meta)
        save(to_proto(content), path)

    @classmethod
    def from_training_info(
        cls,
        path: str | os.PathLike[str],
        *,
        loss: str | None = None,
        initialize: bool = False,
    ) -> Artifacts:
        """Return artifacts that train as the ``training_info`` of an ONNX file describes.

        Args:
            path: of the file, from :meth:`to_training_info` or another program.
            loss: name of the loss; by default the ``y`` of the first Gradient node, else the only
                scalar output of the algorithm.
            initialize: run the initialization graphs; by default training starts from the values
                in the file.

        Raises:
            PrepareError: the training info is not valid, or has no training step.
        """
        content = read_training_info(os.fspath(path), loss=loss, initialize=initialize)
        return cls(content.manifest, content.models, content.values, content.state, content.meta)

    def checkpoint_bytes(self, manifest: Manifest | None = None) -> bytes:
        """Return the content of the checkpoint file."""
        manifest = manifest or self.manifest
        keys = {s.name: state_key(s.parameter, s.slot) for s in self.manifest.state}
        tensors = {**self.values, **{keys[n]: a for n, a in self.state.items()}}
        return to_bytes(tensors, {**self.meta, "manifest": manifest.to_dict(hashes=False)})

    def source(self, role: str, target: str | None = None, steps: int = 1) -> bytes | str:
        """Return the model of a role as a session loads it: its path, or its bytes."""
        spec = self.manifest.model(role, target, steps)
        if spec is None:
            raise CheckpointError(f"these artifacts have no {role} model")
        return self.source_of(spec)

    def source_of(self, spec: ModelSpec) -> bytes | str:
        """Return the model of a manifest entry as a session loads it: its path, or its bytes."""
        if self.directory is not None:
            return str(self.directory / spec.file)
        data = self.models[model_key(spec)].SerializeToString(deterministic=True)
        if self.shared is None or self.shared.path is None:
            return data
        self.shared.check()
        return ModelWithWeightsFolder.of(data, str(self.shared.path.parent))

    def with_arrays(self, array_of: Callable[[str], np.ndarray]) -> Artifacts:
        """Return a copy whose values and state are ``array_of(name)``, of unchanged shapes."""
        values, state = ({n: array_of(n) for n in part} for part in (self.values, self.state))
        return dataclasses.replace(self, values=values, state=state)

    def release_arrays(self) -> None:
        """Free the memory of values and state once a trainer has copied them; names stay."""
        for part in (self.values, self.state):
            part.update(dict.fromkeys(part, np.empty(0)))

    def summary(self) -> tuple[str, list[Row]]:
        """Return what a shell displays: models, parameters, loss and optimizer."""
        m = self.manifest
        elements = sum(math.prod(p.shape) for p in m.parameters)
        parameters = format_names([p.name for p in m.parameters])
        rows = [
            ("models", format_names([spec.file for spec in m.models])),
            ("parameters", f"{parameters} ({elements:,} elements)"),
            ("buffers", format_names([b.name for b in m.buffers])),
            ("loss", str(m.loss.get("name", ""))),
            ("optimizer", f"{m.optimizer.get('name', '')}, lr {m.optimizer.get('lr', '')}"),
            ("directory", "in memory" if self.directory is None else str(self.directory)),
        ]
        return "Artifacts", rows

    def _large_weights(self) -> Path | None:
        """Return the weights file if it is too large to read into memory.

        Raises:
            LoadError: if it was changed since the build.
        """
        if self.shared is not None:
            self.shared.check()
            return self.shared.path
        if self.directory is None or self.manifest.weights is None:
            return None
        path = self.directory / self.manifest.weights
        return path if path.stat().st_size > external_data.MAPPED_MODEL_BYTES else None

    def _read_models(self, *, with_weights: bool) -> dict[str, onnx.ModelProto]:
        assert self.directory is not None
        return {
            model_key(m): onnx.load(self.directory / m.file, load_external_data=with_weights)
            for m in self.manifest.models
        }


def check_replaceable(folder: Path, prefix: str = "", *, force: bool = False) -> None:
    """Check that writing new artifacts to a directory loses no trained weights.

    Raises:
        SaveError: if its checkpoint is trained, or a run in it has checkpoints.
    """
    trained = None if force else _trained_weights(folder, prefix)
    if trained is not None:
        raise SaveError(
            f"{folder} has trained weights: {trained}\n"
            f"hint: {argument('force')} replaces them; "
            + by_caller("otherwise save to another directory", "otherwise choose another --output")
        )


def _trained_weights(folder: Path, prefix: str) -> str | None:
    """Return which trained weights a directory of artifacts has, or ``None``."""
    try:
        manifest = Manifest.from_json(read_regular(folder / f"{prefix}{MANIFEST}"))
        step = read_metadata(folder / manifest.checkpoint).get("step", 0)
    except (OSError, CheckpointError):
        return None  # no artifacts, or damaged ones
    if step:
        return f"{manifest.checkpoint} is of step {step}"
    runs = next((folder / RUN).glob("checkpoints/*.safetensors"), None)
    return None if runs is None else f"{RUN} has checkpoints"


def split_tensors(
    manifest: Manifest, tensors: Mapping[str, np.ndarray], label: str
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Split a checkpoint into (parameters and buffers, optimizer state).

    Raises:
        CheckpointError: if tensors are missing, or differ from the manifest in shape or type.
    """
    problems: list[str] = []

    def tensor(key: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        array = tensors.get(key)
        if array is None:
            problems.append(f"{key!r} is missing")
        elif tuple(array.shape) != tuple(shape):
            problems.append(f"{key!r} has shape {list(array.shape)}, expected {list(shape)}")
        elif array.dtype.name != dtype:
            problems.append(f"{key!r} is {array.dtype}, expected {dtype}")
        else:
            return array
        return np.empty(0)

    values = {
        w.name: tensor(w.name, w.shape, w.dtype) for w in (*manifest.parameters, *manifest.buffers)
    }
    state = {
        s.name: tensor(state_key(s.parameter, s.slot), s.shape, s.dtype) for s in manifest.state
    }
    if problems:
        more = f"\n  ... and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"{label} does not fit these artifacts:\n  " + "\n  ".join(problems[:5]) + more
        )
    return values, state


def _check_files(folder: Path, manifest: Manifest) -> None:
    """Check the digests of all files, and that models reference no file but the shared weights.

    Directories come from downloads and other clients: a changed model must not read other files.

    Raises:
        CheckpointError: with the name of the file.
    """
    if manifest.weights is not None and manifest.weights not in manifest.files:
        raise CheckpointError(
            f"{manifest.weights}: the manifest has no sha256 for this file\n"
            "hint: the manifest was damaged or changed; build the artifacts again"
        )
    models = {m.file: m.sha256 for m in manifest.models}
    digests = {**models, **manifest.files}
    for name, digest in digests.items():
        if _file_digest(folder / name) != digest:
            raise CheckpointError(
                f"{name}: sha256 differs from the one in the manifest\n"
                "hint: the file was damaged or changed; build the artifacts again"
            )
    data_files = DataFiles(os.path.abspath(folder), Limits())
    for name in digests:
        if name in models or name != manifest.weights:
            _check_model(_read_file(folder / name), name, manifest.weights, data_files)


def _check_model(data: bytes, name: str, weights: str | None, files: DataFiles) -> None:
    """Check that a file is a model whose external data is within the shared weights file."""
    try:
        proto = onnx.load_from_string(data)
    except DecodeError as error:
        raise CheckpointError(f"{name}: not an ONNX model") from error
    limits, problems = Limits(), Problems(name)
    for tensor in all_tensors(proto):
        external = tensor.data_location == onnx.TensorProto.EXTERNAL
        if not external and not tensor.external_data:
            continue
        label = f"tensor {quote(tensor.name)}"
        for entry in tensor.external_data:
            if entry.key == "location" and entry.value != weights:
                raise CheckpointError(
                    f"{name}: {label} is in the file {quote(entry.value)}, which is "
                    "not part of these artifacts\n"
                    "hint: the model was changed; build the artifacts again"
                )
        try:
            entries(tensor)
        except ExternalDataError as error:
            problems.add(error.kind, f"{label}: {error.detail}")
            continue
        if external:
            check_tensor(tensor, label, limits, problems, files)
    try:
        problems.check()
    except LoadError as error:
        raise CheckpointError(str(error)) from error


def _read_file(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise _unreadable_error(path, error) from error


def _file_digest(path: Path) -> str:
    """Return the sha256 of a file without reading it into memory at once."""
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable_error(path, error) from error


def _unreadable_error(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path.name}: cannot be read: {error.strerror}\n"
        f"hint: is {path.parent} a directory of artifacts?"
    )


def _assemble(
    artifacts: Artifacts,
    models: Mapping[str, onnx.ModelProto],
    prefix: str,
    weights: BinaryIO | None,
) -> tuple[dict[str, FileContent], Manifest]:
    """Return the files of a directory by name, the manifest last, and the manifest.

    Args:
        artifacts: what to save.
        models: its models, by key.
        prefix: prefix of all file names.
        weights: external weights file of large models, open.
    """
    shared = _SharedWeightsFile(f"{prefix}weights.bin")
    protos: dict[str, onnx.ModelProto] = {}
    for spec in artifacts.manifest.models:
        proto = protos[prefix + plain_name(spec.file)] = onnx.ModelProto()
        proto.CopyFrom(models[model_key(spec)])
        del proto.metadata_props[:]
        if weights is not None:
            _set_external_file(proto, shared.file)
        elif spec.role != "infer":
            shared.move_constants(proto)
        elif artifacts.manifest.options.keys() >= {"adapters", "memory"}:
            # Browsers download the base model of adapters once, for training and inference.
            # Parameters stay in the inference model, where exporting overwrites their bytes.
            shared.move_constants(proto, exclude={w.name for w in artifacts.manifest.parameters})
    has_weights_file = weights is not None or shared.data
    manifest = _with_file_names(
        artifacts.manifest, prefix, shared.file if has_weights_file else None
    )
    manifest = _with_locations(manifest, protos)
    # The checkpoint contains its own digest: training may replace it without a new manifest.
    files: dict[str, FileContent] = {manifest.checkpoint: artifacts.checkpoint_bytes(manifest)}
    if manifest.weights is not None:
        files[manifest.weights] = bytes(shared.data) if weights is None else _copy_writer(weights)
    for name, proto in protos.items():
        # Metadata follows the graph in a serialized model, so the weight locations stay valid.
        proto.metadata_props.add(key=_METADATA_KEY, value=manifest.to_text(name))
        files[name] = proto.SerializeToString(deterministic=True)
    manifest = dataclasses.replace(
        manifest,
        models=tuple(
            dataclasses.replace(m, sha256=_content_digest(files[m.file])) for m in manifest.models
        ),
        files={
            n: _content_digest(files[n] if weights is None else weights)
            for n in (manifest.weights,)
            if n is not None
        },
    )
    files[f"{prefix}{MANIFEST}"] = manifest.to_json().encode()
    return files, manifest


def _with_file_names(manifest: Manifest, prefix: str, weights: str | None) -> Manifest:
    models = tuple(
        dataclasses.replace(m, file=prefix + plain_name(m.file), sha256="") for m in manifest.models
    )
    return dataclasses.replace(
        manifest, models=models, checkpoint=f"{prefix}checkpoint", weights=weights, files={}
    )


def _with_locations(manifest: Manifest, protos: Mapping[str, onnx.ModelProto]) -> Manifest:
    """Return the manifest with the location of each weight in the inference model."""
    infer = next((m.file for m in manifest.models if m.role == "infer"), None)
    locations: dict[str, Location] = {}
    if infer is not None:
        locations = _weight_locations(protos[infer], infer, manifest.weights)

    def with_location(weight: WeightSpec) -> WeightSpec:
        location = locations.get(weight.name)
        if location is None:
            return dataclasses.replace(weight, locations=())
        if location.dtype == weight.dtype:
            location = dataclasses.replace(location, dtype="")
        return dataclasses.replace(weight, locations=(location,))

    return dataclasses.replace(
        manifest,
        parameters=tuple(map(with_location, manifest.parameters)),
        buffers=tuple(map(with_location, manifest.buffers)),
    )


def _weight_locations(
    model: onnx.ModelProto, file: str, weights: str | None
) -> dict[str, Location]:
    """Return the location of each initializer, in the model file or in the weights file."""
    locations = _initializer_locations(model.SerializeToString(deterministic=True), file)
    dtypes = {t.name: dtype_name(ir.DataType(t.data_type)) for t in model.graph.initializer}
    for tensor in model.graph.initializer if weights is not None else ():
        if tensor.external_data:
            _, offset, length = entries(tensor)
            locations[tensor.name] = Location(weights or "", offset or 0, length or 0)
    return {n: dataclasses.replace(x, dtype=dtypes[n]) for n, x in locations.items()}


def _initializer_locations(data: bytes, file: str) -> dict[str, Location]:
    """Return the location of the raw bytes of each initializer of a serialized model.

    The protobuf library does not report offsets, so this reads the wire format.
    """
    locations: dict[str, Location] = {}
    for graph_start, graph_end in _submessages(data, 0, len(data), _MODEL_GRAPH):
        for start, end in _submessages(data, graph_start, graph_end, _GRAPH_INITIALIZER):
            spans = {number: (first, last) for number, _, first, last in fields(data, start, end)}
            if _TENSOR_RAW_DATA in spans:
                name_start, name_end = spans.get(_TENSOR_NAME, (0, 0))
                offset, stop = spans[_TENSOR_RAW_DATA]
                name = data[name_start:name_end].decode()
                locations[name] = Location(file, offset, stop - offset)
    return locations


def _submessages(data: bytes, start: int, end: int, number: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each submessage with this field number."""
    for field_number, _, first, last in fields(data, start, end):
        if field_number == number:
            yield first, last


class _SharedWeightsFile:
    """The file of constants that several models share, each stored once."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.data = bytearray()
        self._offsets: dict[bytes, int] = {}  # by sha256

    def move_constants(self, proto: onnx.ModelProto, exclude: Collection[str] = ()) -> None:
        """Move large initializers of a model to this file, except for those excluded by name."""
        for tensor in proto.graph.initializer:
            raw = tensor.raw_data
            if len(raw) < _MIN_SHARED_BYTES or tensor.name in exclude:
                continue
            digest = hashlib.sha256(raw).digest()
            if digest not in self._offsets:
                self.data += bytes(-len(self.data) % _ALIGNMENT)
                self._offsets[digest] = len(self.data)
                self.data += raw
            tensor.ClearField("raw_data")
            tensor.data_location = onnx.TensorProto.EXTERNAL
            del tensor.external_data[:]
            for key, value in (
                ("location", self.file),
                ("offset", str(self._offsets[digest])),
                ("length", str(len(raw))),
            ):
                tensor.external_data.add(key=key, value=value)


def _open_weights(path: Path) -> BinaryIO:
    """Open the external weights file of a large model.

    Raises:
        SaveError: if the file was deleted since the build.
    """
    try:
        return open_regular(path)
    except OSError as error:
        raise SaveError(
            f"{path}: cannot read the external weights of the model: {error.strerror}\n"
            "hint: do not move or delete this file between build and save"
        ) from error


def _set_external_file(model: onnx.ModelProto, file: str) -> None:
    """Set the file name of all external data of a model, in place."""
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = file


def _copy_writer(source: BinaryIO) -> Writer:
    """Return a writer that copies an open file."""

    def write(target: BinaryIO) -> None:
        source.seek(0)
        shutil.copyfileobj(source, target, _COPY_CHUNK)

    return write


def _content_digest(content: FileContent | BinaryIO) -> str:
    """Return the sha256 of bytes or of an open file."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    assert not callable(content)
    content.seek(0)
    return hashlib.file_digest(content, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]


def _write_directory(folder: Path, prefix: str, assemble: Assemble) -> Manifest:
    """Write artifacts to a directory, in place of any that are there; return the manifest.

    Renaming a manifest over another is atomic, but the old manifest owns the final file names until
    then. Hence two rounds: write the files under staging names and rename a manifest that refers
    to those; then write them under their final names and rename the final manifest.

    Raises:
        SaveError: if the file system refuses; the directory has the old or the new artifacts.
    """
    path = folder / f"{prefix}{MANIFEST}"
    old = _files_in_manifest(path)
    if old is None or any(not name.startswith(_STAGING_PREFIX) for name in old):
        _write_staged(path, assemble(f"{_STAGING_PREFIX}{prefix}")[0])
        unused = old or set()
    else:
        # Without a manifest, final names are free. A manifest of staging names only is that of a
        # save that was killed between the rounds: the folder has final names of older artifacts.
        unused = _list_files(folder) if old else set()
    _remove(folder, (name for name in unused if _is_artifact_file(name, prefix)))
    files, manifest = assemble(prefix)
    _write(path, files)
    staged = {f"{_STAGING_PREFIX}{name}" for name in files}
    _remove(folder, staged.union(name for name in old or () if name.startswith(_STAGING_PREFIX)))
    return manifest


def _write_staged(path: Path, files: dict[str, FileContent]) -> None:
    try:
        _write(path, files)
    except BaseException:
        # If the error came after the rename of the manifest, the staged files are the artifacts.
        _remove(path.parent, files.keys() - (_files_in_manifest(path) or set()))
        raise


def _write(path: Path, files: dict[str, FileContent]) -> None:
    *data, (_, manifest) = files.items()
    remove_leftovers(path.parent, [path.name, *files])
    label = str(path.parent)
    write_files(label, {str(path.parent / n): _as_writer(c) for n, c in data}, guard=False)
    write_files(label, {str(path): _as_writer(manifest)})


def _as_writer(content: FileContent) -> Writer:
    return bytes_writer(content) if isinstance(content, bytes) else content


def _files_in_manifest(path: Path) -> set[str] | None:
    """Return the files that a manifest lists; empty without a manifest, ``None`` if damaged."""
    try:
        manifest = Manifest.from_json(read_regular(path))
    except FileNotFoundError:
        return set()
    except (OSError, CheckpointError):
        return None
    return {*(m.file for m in manifest.models), *manifest.files, manifest.checkpoint}


def _list_files(folder: Path) -> set[str]:
    with suppress(OSError):
        return set(os.listdir(folder))
    return set()


def _is_artifact_file(name: str, prefix: str) -> bool:
    """Return whether ``save`` writes files of this name, so that it may remove them."""
    return name == f"{prefix}weights.bin" or is_model_name(name, prefix)


def _remove(folder: Path, names: Iterable[str]) -> None:
    for name in sorted(names):
        with suppress(OSError):
            os.unlink(folder / name)
