"""Files written whole or not at all."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from onnxtrain.errors import SaveError

Writer = Callable[[BinaryIO], object]
"""Writes the content of one file."""
_CLIP = 48  # characters of a name: what is added to it must not make it too long


def content(data: bytes) -> Writer:
    """Return a writer of known bytes."""
    return lambda file: file.write(data)


@contextmanager
def named_refusal(label: str) -> Iterator[None]:
    """Turn an error of the file system into one that says what could not be written.

    Raises:
        SaveError: with the reason.
    """
    try:
        yield
    except OSError as error:
        raise SaveError(f"{label}: cannot be written\n  {error}") from error


def write_files(label: str, files: dict[str, Writer], *, guard: bool = True) -> None:
    """Write all files under other names, flush them, and only then rename them, in order.

    Args:
        label: what the error calls them.
        files: writers by path; all in one directory.
        guard: the last file refers to the others, so it is away while they are replaced.

    Raises:
        SaveError: the file system refuses; it says why.
    """
    temporary: dict[str, str] = {}
    try:
        with named_refusal(label):
            _write(files, temporary)
            _replace(temporary, guard)
    finally:
        for path in temporary.values():
            # The reason why nothing was written counts, not why nothing could be cleaned up.
            with suppress(OSError):
                os.unlink(path)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write one file of text, whole or not at all; raises as `write_files` does."""
    write_files(repr(os.fsdecode(path)), {os.path.abspath(path): content(text.encode())})


def _write(files: dict[str, Writer], temporary: dict[str, str]) -> None:
    for path, write in files.items():
        name = f".{os.path.basename(path)[:_CLIP]}.{secrets.token_hex(8)}.tmp"
        # O_EXCL: never through a link that somebody put there.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        temporary[path] = os.path.join(os.path.dirname(path), name)
        with open(os.open(temporary[path], flags, 0o666), "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())


def sweep(folder: str | os.PathLike[str], names: Iterable[str]) -> None:
    """Remove what killed calls of `write_files` have left of files of these names."""
    clipped = {name[:_CLIP] for name in names}
    with suppress(OSError):
        for name in sorted(os.listdir(folder)):
            match = re.fullmatch(r"\.(.+)\.[0-9a-f]{16}\.tmp", name, re.DOTALL)
            if match and match[1] in clipped:
                with suppress(OSError):
                    os.unlink(os.path.join(folder, name))


def _replace(temporary: dict[str, str], guard: bool) -> None:
    *data, (model, _) = temporary.items()
    if guard and any(os.path.exists(path) for path, _ in data):
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
