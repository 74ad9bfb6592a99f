"""Files of a directory of artifacts: read through one door, and refused if they reach elsewhere."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from onnxtrain.errors import CheckpointError, LoadError
from onnxtrain.graph.io.external_data import DataFiles, Refused, entries
from onnxtrain.graph.io.limits import Limits, Problems, quote
from onnxtrain.graph.io.proto_tensors import all_tensors
from onnxtrain.graph.io.regular_file import open_regular, read_regular
from onnxtrain.graph.io.tensor_data import check_tensor
from onnxtrain.manifest import Manifest


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
        if _digest(folder / name) != digest:
            raise CheckpointError(
                f"{name}: not the file that the manifest names (sha256 differs)\n"
                "hint: it was damaged or changed; build the artifacts again"
            )
    data_files = DataFiles(os.path.abspath(folder), Limits())
    for name in {**models, **manifest.files}:
        if name in models or name != manifest.weights:
            _check_model(read(folder / name), name, manifest.weights, data_files)


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
        except Refused as refused:
            problems.add(refused.kind, f"{where}: {refused.detail}")
            continue
        if external:
            check_tensor(tensor, where, limits, problems, files)
    try:
        problems.check()
    except LoadError as error:
        raise CheckpointError(str(error)) from error


def read(path: Path) -> bytes:
    """Return the content of a file of the directory."""
    try:
        return read_regular(path)
    except OSError as error:
        raise unreadable(path, error) from error


def _digest(path: Path) -> str:
    """Return the sha256 of a file, which may be larger than memory should be."""
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a file that cannot be read."""
    return CheckpointError(
        f"{path.name}: cannot be read: {error.strerror}\n"
        f"hint: is {path.parent} a directory of artifacts?"
    )
