"""Artifacts in memory and on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx

from onnxtrain.artifacts.directory_check import check_files, read, unreadable
from onnxtrain.artifacts.inference import places
from onnxtrain.artifacts.large_files import Content, copier, digest, open_weights, refer
from onnxtrain.artifacts.signature import key_of, plain_name
from onnxtrain.artifacts.summary import Row, Shown, listed
from onnxtrain.artifacts.write_directory import MANIFEST, write_directory
from onnxtrain.checkpoint import from_file, state_key, to_bytes
from onnxtrain.errors import CheckpointError, SaveError
from onnxtrain.graph.io import shared_weights
from onnxtrain.graph.io.regular_file import open_regular
from onnxtrain.graph.io.shared_weights import SharedWeights
from onnxtrain.manifest import Location, Manifest, ModelSpec, WeightSpec
from onnxtrain.runtime.session import BesideWeights

_SHARED = 1024  # bytes: larger constants go to the file that all models share
_ALIGNMENT = 64
_KEY = "onnxtrain"


@dataclasses.dataclass(repr=False)
class Artifacts(Shown):
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
            ("models", listed([spec.file for spec in m.models])),
            ("parameters", f"{listed([p.name for p in m.parameters])} ({trained:,} numbers)"),
            ("buffers", listed([b.name for b in m.buffers])),
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
        data = self.models[key_of(spec)].SerializeToString(deterministic=True)
        if self.shared is None or self.shared.path is None:
            return data
        return BesideWeights.of(data, str(self.shared.path.parent))

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
        manifest = Manifest.from_json(read(folder / f"{prefix}{MANIFEST}"), f"{prefix}{MANIFEST}")
        check_files(folder, manifest)
        path = folder / manifest.checkpoint
        try:
            with open_regular(path) as file:
                tensors, meta = from_file(file, manifest.checkpoint)
        except OSError as error:
            raise unreadable(path, error) from error
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
        return path if path.stat().st_size > shared_weights.LARGE else None

    def _read_models(self, *, with_weights: bool) -> dict[str, onnx.ModelProto]:
        assert self.directory is not None
        return {
            key_of(m): onnx.load(self.directory / m.file, load_external_data=with_weights)
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
) -> tuple[dict[str, Content], Manifest]:
    """Return the files of a directory by name, and the manifest; the manifest comes last.

    Args:
        artifacts: whose models.
        models: as protobufs.
        prefix: in front of every file name.
        weights: the file that the models refer to, if they do.
    """
    shared = _Shared(f"{prefix}weights.bin")
    protos: dict[str, onnx.ModelProto] = {}
    for spec in artifacts.manifest.models:
        proto = protos[prefix + plain_name(spec.file)] = onnx.ModelProto()
        proto.CopyFrom(models[key_of(spec)])
        del proto.metadata_props[:]
        if weights is not None:
            refer(proto, shared.file)
        elif spec.role != "infer":
            shared.move(proto)
        elif artifacts.manifest.options.keys() >= {"adapters", "memory"}:
            # For tabs: what adapters stand beside is fetched once.
            shared.move(proto, {w.name for w in artifacts.manifest.parameters})
    apart = weights is not None or shared.data
    manifest = _renamed(artifacts.manifest, prefix, shared.file if apart else None)
    manifest = _with_places(manifest, protos)
    # The checkpoint has a digest of its own, so that training may replace it.
    files: dict[str, Content] = {manifest.checkpoint: artifacts.checkpoint_bytes(manifest)}
    if manifest.weights is not None:
        files[manifest.weights] = bytes(shared.data) if weights is None else copier(weights)
    for name, proto in protos.items():
        # Comes after the graph: places stay.
        proto.metadata_props.add(key=_KEY, value=manifest.to_text(name))
        files[name] = proto.SerializeToString(deterministic=True)
    manifest = dataclasses.replace(
        manifest,
        models=tuple(dataclasses.replace(m, sha256=digest(files[m.file])) for m in manifest.models),
        files={
            n: digest(files[n] if weights is None else weights)
            for n in (manifest.weights,)
            if n is not None
        },
    )
    files[f"{prefix}{MANIFEST}"] = manifest.to_json().encode()
    return files, manifest


def _renamed(manifest: Manifest, prefix: str, weights: str | None) -> Manifest:
    models = tuple(
        dataclasses.replace(m, file=prefix + plain_name(m.file), sha256="") for m in manifest.models
    )
    return dataclasses.replace(
        manifest, models=models, checkpoint=f"{prefix}checkpoint", weights=weights, files={}
    )


def _with_places(manifest: Manifest, protos: Mapping[str, onnx.ModelProto]) -> Manifest:
    """Return the manifest with the places of weights in the inference model."""
    infer = next((m.file for m in manifest.models if m.role == "infer"), None)
    located: dict[str, Location] = {}
    if infer is not None:
        located = places(protos[infer], infer, manifest.weights)

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


class _Shared:
    """Constants that several models have in common, each stored once."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.data = bytearray()
        self.places: dict[bytes, int] = {}

    def move(self, proto: onnx.ModelProto, but: Collection[str] = ()) -> None:
        for tensor in proto.graph.initializer:
            raw = tensor.raw_data
            if len(raw) < _SHARED or tensor.name in but:
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
