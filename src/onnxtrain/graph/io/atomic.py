"""Files written whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

from onnxtrain.errors import SaveError

Writer = Callable[[BinaryIO], object]
"""Writes the content of one file."""


def content(data: bytes) -> Writer:
    """Return a writer of known bytes."""
    return lambda file: file.write(data)


def write_files(label: str, files: dict[str, Writer]) -> None:
    """Write all files under other names, flush them, and only then rename them, in order."""
    temporary: dict[str, str] = {}
    try:
        for path, write in files.items():
            name = f".{os.path.basename(path)}.{secrets.token_hex(8)}.tmp"
            # O_EXCL: never through a link that somebody put there.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            temporary[path] = os.path.join(os.path.dirname(path), name)
            with open(os.open(temporary[path], flags, 0o666), "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
        _replace(temporary)
    except OSError as error:
        raise SaveError(f"{label}: cannot be written\n  {error}") from error
    finally:
        for path in temporary.values():
            with suppress(FileNotFoundError):
                os.unlink(path)


def _replace(temporary: dict[str, str]) -> None:
    *data, (model, _) = temporary.items()
    if any(os.path.exists(path) for path, _ in data):
        # Between two renames the old model would read the new data: better no model than that.
        with suppress(FileNotFoundError):
            os.unlink(model)
    for path, written in temporary.items():
        os.replace(written, path)
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(os.path.dirname(model), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
