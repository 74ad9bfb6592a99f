"""The one door for files that are read: what is no plain file is refused before anything waits."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader

_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
# Opening a pipe for reading would wait for a writer.
NO_WAIT = _FLAGS | getattr(os, "O_NONBLOCK", 0)


class NotRegularError(OSError):
    """A pipe, a device or a socket, which may wait or go on for ever."""


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Return an open file, after a look at what it is; links to files are followed.

    Raises:
        OSError: it cannot be opened, or is a directory, a pipe, a device or a socket; ``strerror``
            says which.
    """
    try:
        descriptor = os.open(path, NO_WAIT)
    except ValueError as error:  # a NUL in the path
        raise OSError(errno.EINVAL, f"not a file name: {error}") from error
    try:
        _check_kind(os.fstat(descriptor).st_mode, os.fsdecode(path))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_kind(mode: int, path: str) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "this is a directory", path)
    if not stat.S_ISREG(mode):
        what = "not a regular file but a pipe, a device or a socket"
        raise NotRegularError(errno.EINVAL, what, path)


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a regular file; raises as :func:`open_regular` does."""
    with open_regular(path) as file:
        return file.read()
