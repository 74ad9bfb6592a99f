"""Artifacts in memory and on disk.

Files of a directory of artifacts: read through one door, and refused if they reach elsewhere.

A directory of artifacts is replaced such that a whole one is there at any moment.

The manifest names all other files, so renaming one manifest over another is the moment at which new
artifacts take the place of old ones. The names they should have are taken until then. Hence the new
files first get names of their own, with a manifest that says so. Once that one is in place, the
proper names are free, and are written the same way.

What a shell and a notebook show of an object: a few lines, a table, a curve.

The forms of one training run for browsers, side by side.

Files of artifacts that are too large to be held as bytes.

The inference model, and where its weights lie in the file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import html
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from onnxtrain.artifacts.graphs import (
    dtype_name,
    is_model_name,
    model_key,
    plain_name,
)
from onnxtrain.checkpoint import from_file, state_key, to_bytes
from onnxtrain.errors import CheckpointError, LoadError, SaveError
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
    write_files,
)
from onnxtrain.manifest import Location, Manifest, ModelSpec, WeightSpec
from onnxtrain.runtime.session import ModelWithWeightsFolder


def check_files(folder: Path, manifest: Manifest) -> None:
    """Refuse files that are not those of the manifest, and models that reach for other files.

    Raises:
        CheckpointError: naming the file.
    """
    if manifest.weights is not None and manifest.weights not in manifest.files:
        raise CheckpointError(
            f"{manifest.weights}: the manifest has no sha256 of it\n"
            "hint: it was damaged or changed; build the artifacts again"
        )
    models = {m.file: m.sha256 for m in manifest.models}
    for name, digest in {**models, **manifest.files}.items():
        if _file_digest(folder / name) != digest:
            raise CheckpointError(
                f"{name}: not the file that the manifest names (sha256 differs)\n"
                "hint: it was damaged or changed; build the artifacts again"
            )
    data_files = DataFiles(os.path.abspath(folder), Limits())
    for name in {**models, **manifest.files}:
        if name in models or name != manifest.weights:
            _check_model(read_artifact_file(folder / name), name, manifest.weights, data_files)


def _check_model(data: bytes, name: str, weights: str | None, files: DataFiles) -> None:
    """Refuse what is no model, or refers to files other than the shared weights."""
    try:
        proto = onnx.load_from_string(data)
    except DecodeError as error:
        raise CheckpointError(f"{name}: not an ONNX model") from error
    limits, problems = Limits(), Problems(name)
    for tensor in all_tensors(proto):
        external = tensor.data_location == onnx.TensorProto.EXTERNAL
        if not external and not tensor.external_data:
            continue
        where = f"tensor {quote(tensor.name)}"
        for entry in tensor.external_data:
            if entry.key == "location" and entry.value != weights:
                raise CheckpointError(
                    f"{name}: {where} is in the file {quote(entry.value)}, which is "
                    "none of these artifacts\n"
                    "hint: it was changed; build the artifacts again"
                )
        try:
            entries(tensor)
        except ExternalDataError as refused:
            problems.add(refused.kind, f"{where}: {refused.detail}")
            continue
        if external:
            check_tensor(tensor, where, limits, problems, files)
    try:
        problems.check()
    except LoadError as error:
        raise CheckpointError(str(error)) from error


def read_artifact_file(path: Path) -> bytes:
    """Return the content of a file of the directory."""
    try:
        return read_regular(path)
    except OSError as error:
        raise unreadable_error(path, error) from error


def _file_digest(path: Path) -> str:
    """Return the sha256 of a file, which may be larger than memory should be."""
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable_error(path, error) from error


def unreadable_error(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a file that cannot be read."""
    return CheckpointError(
        f"{path.name}: cannot be read: {error.strerror}\n"
        f"hint: is {path.parent} a directory of artifacts?"
    )


Row = tuple[str, str]
_WIDTH, _HEIGHT, _POINTS = 480, 120, 240
_MAX_CELL_LENGTH = 70  # characters of a cell


class SummaryRepr:
    """Shows itself by the rows that a subclass gives: what it is, and in words how it is."""

    def summary(self) -> tuple[str, list[Row]]:
        """Return a heading, and rows of (what, how)."""
        raise NotImplementedError

    def __repr__(self) -> str:
        heading, rows = self.summary()
        wide = max((len(name) for name, _ in rows), default=0)
        return "\n".join([heading, *(f"  {n:<{wide}}  {truncate(text)}" for n, text in rows)])

    def _repr_html_(self) -> str:
        heading, rows = self.summary()
        return html_table(heading, rows)


def truncate(text: str) -> str:
    """Return the text, or its beginning if it is long."""
    return text if len(text) <= _MAX_CELL_LENGTH else text[: _MAX_CELL_LENGTH - 4] + " ..."


def format_record(record: Mapping[str, object]) -> str:
    """Return a record in one line."""
    return ", ".join(
        f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items()
    )


def format_names(names: Sequence[str]) -> str:
    """Return how many there are, and the first of them."""
    more = ", ..." if len(names) > 4 else ""
    return f"{len(names)}: {', '.join(names[:4])}{more}" if names else "none"


def html_table(heading: str, rows: Iterable[Row]) -> str:
    """Return a table as HTML."""
    lines = [
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(truncate(text))}</td></tr>"
        for name, text in rows
    ]
    return f"<table><caption>{html.escape(heading)}</caption>{''.join(lines)}</table>"


def svg_curve(values: Sequence[float], label: str) -> str:
    """Return a line over the values as SVG; of many, the means of neighbours."""
    size = -(-len(values) // _POINTS) or 1
    parts = [values[i : i + size] for i in range(0, len(values), size)]
    means = [sum(p) / len(p) for p in parts]
    points = [(i, v) for i, v in enumerate(means) if math.isfinite(v)]
    if len(points) < 2:
        return ""
    low, high = min(v for _, v in points), max(v for _, v in points)
    across, up = _WIDTH / (len(means) - 1), _HEIGHT / ((high - low) or 1.0)
    places = " ".join(f"{i * across:.1f},{_HEIGHT - (v - low) * up:.1f}" for i, v in points)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='-4 -16 {_WIDTH + 8} {_HEIGHT + 32}' "
        f"width='{_WIDTH}' role='img' aria-label='{html.escape(label, quote=True)}'>"
        f"<polyline fill='none' stroke='#1f77b4' stroke-width='1.5' points='{places}'/>"
        f"<text x='0' y='-4' font-size='11'>{html.escape(label)}: {high:.4g}</text>"
        f"<text x='0' y='{_HEIGHT + 13}' font-size='11'>{low:.4g}</text></svg>"
    )


FileContent = bytes | Writer
"""What a file holds: bytes, or what writes them."""
_CHUNK = 1 << 24


def open_weights(path: Path) -> BinaryIO:
    """Return the file of weights, open.

    Raises:
        SaveError: if it is not there any more.
    """
    try:
        return open_regular(path)
    except OSError as error:
        raise SaveError(
            f"{path}: the weights that the models refer to cannot be read: {error.strerror}\n"
            "hint: the file that was built from has to stay until the artifacts are saved"
        ) from error


def copy_writer(source: BinaryIO) -> Writer:
    """Return a writer that copies an open file."""

    def write(target: BinaryIO) -> None:
        source.seek(0)
        shutil.copyfileobj(source, target, _CHUNK)

    return write


def content_digest(content: FileContent | BinaryIO) -> str:
    """Return the sha256 of bytes or of an open file."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    assert not callable(content)
    content.seek(0)
    return hashlib.file_digest(content, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]


def set_external_file(model: onnx.ModelProto, file: str) -> None:
    """Let all external data of a model be in a file of this name, in place."""
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = file


MANIFEST = "manifest.json"
STAGING_PREFIX = ".saving-"
"""In front of the names that files have until their proper names are free."""

Assemble = Callable[[str], tuple[dict[str, FileContent], Manifest]]
"""From the prefix of file names to the files, the manifest last, and the manifest."""


def write_directory(folder: Path, prefix: str, assembled: Assemble) -> Manifest:
    """Write artifacts over those that may be there; return the manifest.

    Raises:
        SaveError: the file system refuses; the directory has the old or the new artifacts.
    """
    path = folder / f"{prefix}{MANIFEST}"
    old = _files_in_manifest(path)
    if old is None or any(not name.startswith(STAGING_PREFIX) for name in old):
        _write_staged(path, assembled(f"{STAGING_PREFIX}{prefix}")[0])
        unused = old or set()
    else:
        unused = _list_files(folder) if old else set()  # a killed save came as far as this
    _remove(folder, (name for name in unused if _is_artifact_file(name, prefix)))
    files, manifest = assembled(prefix)
    _write(path, files)
    spare = {f"{STAGING_PREFIX}{name}" for name in files}
    _remove(folder, spare.union(name for name in old or () if name.startswith(STAGING_PREFIX)))
    return manifest


def _write_staged(path: Path, files: dict[str, FileContent]) -> None:
    try:
        _write(path, files)
    except BaseException:
        # The manifest may have been renamed, and only what came after it went wrong.
        _remove(path.parent, files.keys() - (_files_in_manifest(path) or set()))
        raise


def _write(path: Path, files: dict[str, FileContent]) -> None:
    *data, (_, manifest) = files.items()
    remove_leftovers(path.parent, [path.name, *files])
    label = str(path.parent)
    write_files(label, {str(path.parent / n): _as_writer(raw) for n, raw in data}, guard=False)
    write_files(label, {str(path): _as_writer(manifest)})


def _as_writer(what: FileContent) -> Writer:
    return bytes_writer(what) if isinstance(what, bytes) else what


def _files_in_manifest(path: Path) -> set[str] | None:
    """Return the files that a manifest names: none if there is none, ``None`` if nobody knows."""
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
    """Return whether a name is one that `save` gives, so that it may be removed."""
    return name == f"{prefix}weights.bin" or is_model_name(name, prefix)


def _remove(folder: Path, names: Iterable[str]) -> None:
    for name in sorted(names):
        with suppress(OSError):
            os.unlink(folder / name)


# Field numbers of ModelProto.graph, GraphProto.initializer, TensorProto.name and .raw_data.
_MODEL_GRAPH, _GRAPH_INITIALIZER, _TENSOR_NAME, _TENSOR_RAW_DATA = 7, 5, 8, 9


def weight_locations(model: onnx.ModelProto, file: str, weights: str | None) -> dict[str, Location]:
    """Return where the bytes of each initializer lie, in a model's file or in that of weights."""
    located = initializer_locations(model.SerializeToString(deterministic=True), file)
    types = {t.name: dtype_name(ir.DataType(t.data_type)) for t in model.graph.initializer}
    for tensor in model.graph.initializer if weights is not None else ():
        if tensor.external_data:
            _, offset, length = entries(tensor)
            located[tensor.name] = Location(weights or "", offset or 0, length or 0)
    return {n: dataclasses.replace(place, dtype=types[n]) for n, place in located.items()}


def initializer_locations(data: bytes, file: str) -> dict[str, Location]:
    """Return where the raw bytes of each initializer are in a serialized model."""
    locations: dict[str, Location] = {}
    for graph_start, graph_end in _submessages(data, 0, len(data), _MODEL_GRAPH):
        for start, end in _submessages(data, graph_start, graph_end, _GRAPH_INITIALIZER):
            found = {number: (first, last) for number, _, first, last in fields(data, start, end)}
            if _TENSOR_RAW_DATA in found:
                first, last = found.get(_TENSOR_NAME, (0, 0))
                offset, stop = found[_TENSOR_RAW_DATA]
                locations[data[first:last].decode()] = Location(file, offset, stop - offset)
    return locations


def _submessages(data: bytes, start: int, end: int, number: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each message that a message holds under a field number."""
    for found, _, first, last in fields(data, start, end):
        if found == number:
            yield first, last


_MIN_SHARED_BYTES = 1024  # bytes: larger constants go to the file that all models share
_ALIGNMENT = 64
_METADATA_KEY = "onnxtrain"


@dataclasses.dataclass(repr=False)
class Artifacts(SummaryRepr):
    """Everything a training run needs: models, initial values and the manifest."""

    manifest: Manifest
    models: dict[str, onnx.ModelProto]
    """By role, and ``step.x8`` or ``step.webgpu`` for other forms of one; empty if they were loaded
    from a directory and stay there."""
    values: dict[str, np.ndarray]
    """Parameters and buffers by name."""
    state: dict[str, np.ndarray]
    """Optimizer state by ``<parameter>.<slot>``."""
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Progress of a run: step, lr, schedule, seed, position in the data, properties."""
    directory: Path | None = None
    shared: SharedWeights | None = None
    """Weights too large for protobufs, in a file to which the models refer."""

    def summary(self) -> tuple[str, list[Row]]:
        """Return what a shell shows: the models, what is trained, and by what."""
        m = self.manifest
        trained = sum(math.prod(p.shape) for p in m.parameters)
        rows = [
            ("models", format_names([spec.file for spec in m.models])),
            ("parameters", f"{format_names([p.name for p in m.parameters])} ({trained:,} numbers)"),
            ("buffers", format_names([b.name for b in m.buffers])),
            ("loss", str(m.loss.get("name", ""))),
            ("optimizer", f"{m.optimizer.get('name', '')}, lr {m.optimizer.get('lr', '')}"),
            ("directory", "in memory" if self.directory is None else str(self.directory)),
        ]
        return "Artifacts", rows

    def source(self, role: str, target: str | None = None, steps: int = 1) -> bytes | str:
        """Return a model as a runtime takes it: its path on disk, or its bytes."""
        spec = self.manifest.model(role, target, steps)
        if spec is None:
            raise CheckpointError(f"these artifacts have no {role} model")
        return self.source_of(spec)

    def source_of(self, spec: ModelSpec) -> bytes | str:
        """Return the model that an entry of the manifest describes, as a runtime takes it."""
        if self.directory is not None:
            return str(self.directory / spec.file)
        data = self.models[model_key(spec)].SerializeToString(deterministic=True)
        if self.shared is None or self.shared.path is None:
            return data
        return ModelWithWeightsFolder.of(data, str(self.shared.path.parent))

    def over(self, view: Callable[[str], np.ndarray]) -> Artifacts:
        """Return the same with other arrays for all values, of the same shapes."""
        values, state = ({n: view(n) for n in part} for part in (self.values, self.state))
        return dataclasses.replace(self, values=values, state=state)

    def forget(self) -> None:
        """Let go of all values, which somebody else has by now; their names stay."""
        for part in (self.values, self.state):
            part.update(dict.fromkeys(part, np.empty(0)))

    def checkpoint_bytes(self, manifest: Manifest | None = None) -> bytes:
        """Return the content of the checkpoint file."""
        manifest = manifest or self.manifest
        slots = {s.name: state_key(s.parameter, s.slot) for s in self.manifest.state}
        tensors = {**self.values, **{slots[n]: a for n, a in self.state.items()}}
        return to_bytes(tensors, {**self.meta, "manifest": manifest.to_dict(hashes=False)})

    def save(self, directory: str | os.PathLike[str], prefix: str = "") -> Manifest:
        """Write the directory, whole or not at all; return the manifest as written.

        Whenever the process is killed, either the artifacts that were there or the new ones can be
        loaded.

        Args:
            directory: made if it is not there.
            prefix: in front of every file name.

        Raises:
            SaveError: the file system refuses.
        """
        folder = Path(directory)
        path = self._large_weights()
        models = self.models or self._read_models(with_weights=path is None)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SaveError(f"{folder}: cannot be made: {error.strerror}") from error
        with ExitStack() as stack:
            # Opened once: the file may be one of those that are replaced.
            weights = None if path is None else stack.enter_context(open_weights(path))
            manifest = write_directory(folder, prefix, lambda p: assemble(self, models, p, weights))
        if self.directory is not None and self.directory.resolve() == folder.resolve():
            self.manifest = manifest  # the files may have had other names
        return manifest

    @classmethod
    def load(cls, directory: str | os.PathLike[str], prefix: str = "") -> Artifacts:
        """Read a directory; every file is checked against the manifest.

        Raises:
            CheckpointError: naming the file that is missing, damaged or of another version.
        """
        folder = Path(directory)
        manifest = Manifest.from_json(
            read_artifact_file(folder / f"{prefix}{MANIFEST}"), f"{prefix}{MANIFEST}"
        )
        check_files(folder, manifest)
        path = folder / manifest.checkpoint
        try:
            with open_regular(path) as file:
                tensors, meta = from_file(file, manifest.checkpoint)
        except OSError as error:
            raise unreadable_error(path, error) from error
        values, state = split_tensors(manifest, tensors, manifest.checkpoint)
        if meta.pop("manifest", None) != manifest.to_dict(hashes=False):
            raise CheckpointError(
                f"{prefix}{MANIFEST} and {manifest.checkpoint} do not belong together\n"
                "hint: one of them was damaged or comes from other artifacts"
            )
        return cls(manifest, {}, values, state, meta, folder)

    def _large_weights(self) -> Path | None:
        """Return the file of weights that are too large to be read, if there is one."""
        if self.shared is not None:
            return self.shared.path
        if self.directory is None or self.manifest.weights is None:
            return None
        path = self.directory / self.manifest.weights
        return path if path.stat().st_size > external_data.LARGE_MODEL_BYTES else None

    def _read_models(self, *, with_weights: bool) -> dict[str, onnx.ModelProto]:
        assert self.directory is not None
        return {
            model_key(m): onnx.load(self.directory / m.file, load_external_data=with_weights)
            for m in self.manifest.models
        }


def split_tensors(
    manifest: Manifest, tensors: Mapping[str, np.ndarray], label: str
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return (parameters and buffers, optimizer state) of a checkpoint that fits the manifest."""
    problems: list[str] = []

    def take(key: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
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
        w.name: take(w.name, w.shape, w.dtype) for w in (*manifest.parameters, *manifest.buffers)
    }
    state = {s.name: take(state_key(s.parameter, s.slot), s.shape, s.dtype) for s in manifest.state}
    if problems:
        more = f"\n  ... and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"{label} does not fit these artifacts:\n  " + "\n  ".join(problems[:5]) + more
        )
    return values, state


def assemble(
    artifacts: Artifacts,
    models: Mapping[str, onnx.ModelProto],
    prefix: str,
    weights: BinaryIO | None = None,
) -> tuple[dict[str, FileContent], Manifest]:
    """Return the files of a directory by name, and the manifest; the manifest comes last.

    Args:
        artifacts: whose models.
        models: as protobufs.
        prefix: in front of every file name.
        weights: the file that the models refer to, if they do.
    """
    shared = _SharedWeightsFile(f"{prefix}weights.bin")
    protos: dict[str, onnx.ModelProto] = {}
    for spec in artifacts.manifest.models:
        proto = protos[prefix + plain_name(spec.file)] = onnx.ModelProto()
        proto.CopyFrom(models[model_key(spec)])
        del proto.metadata_props[:]
        if weights is not None:
            set_external_file(proto, shared.file)
        elif spec.role != "infer":
            shared.move(proto)
        elif artifacts.manifest.options.keys() >= {"adapters", "memory"}:
            # For tabs: what adapters stand beside is fetched once.
            shared.move(proto, {w.name for w in artifacts.manifest.parameters})
    apart = weights is not None or shared.data
    manifest = _with_file_names(artifacts.manifest, prefix, shared.file if apart else None)
    manifest = _with_locations(manifest, protos)
    # The checkpoint has a digest of its own, so that training may replace it.
    files: dict[str, FileContent] = {manifest.checkpoint: artifacts.checkpoint_bytes(manifest)}
    if manifest.weights is not None:
        files[manifest.weights] = bytes(shared.data) if weights is None else copy_writer(weights)
    for name, proto in protos.items():
        # Comes after the graph: places stay.
        proto.metadata_props.add(key=_METADATA_KEY, value=manifest.to_text(name))
        files[name] = proto.SerializeToString(deterministic=True)
    manifest = dataclasses.replace(
        manifest,
        models=tuple(
            dataclasses.replace(m, sha256=content_digest(files[m.file])) for m in manifest.models
        ),
        files={
            n: content_digest(files[n] if weights is None else weights)
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
    """Return the manifest with the places of weights in the inference model."""
    infer = next((m.file for m in manifest.models if m.role == "infer"), None)
    located: dict[str, Location] = {}
    if infer is not None:
        located = weight_locations(protos[infer], infer, manifest.weights)

    def own(weight: WeightSpec) -> Location:
        place = located[weight.name]
        return dataclasses.replace(place, dtype="") if place.dtype == weight.dtype else place

    def placed(weights: tuple[WeightSpec, ...]) -> tuple[WeightSpec, ...]:
        return tuple(
            dataclasses.replace(w, locations=(own(w),) if w.name in located else ())
            for w in weights
        )

    return dataclasses.replace(
        manifest, parameters=placed(manifest.parameters), buffers=placed(manifest.buffers)
    )


class _SharedWeightsFile:
    """Constants that several models have in common, each stored once."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.data = bytearray()
        self.places: dict[bytes, int] = {}

    def move(self, proto: onnx.ModelProto, but: Collection[str] = ()) -> None:
        for tensor in proto.graph.initializer:
            raw = tensor.raw_data
            if len(raw) < _MIN_SHARED_BYTES or tensor.name in but:
                continue
            digest = hashlib.sha256(raw).digest()
            if digest not in self.places:
                self.data += bytes(-len(self.data) % _ALIGNMENT)
                self.places[digest] = len(self.data)
                self.data += raw
            tensor.ClearField("raw_data")
            tensor.data_location = onnx.TensorProto.EXTERNAL
            del tensor.external_data[:]
            for key, value in (
                ("location", self.file),
                ("offset", str(self.places[digest])),
                ("length", str(len(raw))),
            ):
                tensor.external_data.add(key=key, value=value)
