"""Files of artifacts that are too large to be held as bytes."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import BinaryIO

import onnx

from onnxtrain.errors import SaveError
from onnxtrain.graph.io.atomic import Writer
from onnxtrain.graph.io.regular_file import open_regular

Content = bytes | Writer
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


def copier(source: BinaryIO) -> Writer:
    """Return a writer that copies an open file."""

    def write(target: BinaryIO) -> None:
        source.seek(0)
        shutil.copyfileobj(source, target, _CHUNK)

    return write


def digest(content: Content | BinaryIO) -> str:
    """Return the sha256 of bytes or of an open file."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    assert not callable(content)
    content.seek(0)
    return hashlib.file_digest(content, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]


def refer(model: onnx.ModelProto, file: str) -> None:
    """Let all external data of a model be in a file of this name, in place."""
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = file
