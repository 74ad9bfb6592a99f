"""What `load` is willing to open, and how it says no.

The one door for files that are read: what is no plain file is refused before anything waits.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from io import BufferedReader
from typing import NamedTuple

from onnxtrain.errors import LoadError

INVALID = "the model is not valid ONNX; export it again, or mend it with onnx_ir"
"""The way out for most problems."""

_MAX_DETAILS = 5
_MAX_NAME_LENGTH = 80


@dataclass(frozen=True)
class Limits:
    """The sizes above which a file is refused; raise one only for a file you trust.

    Attributes:
        file_bytes: size of the model file and of each external data file. A model file is also
            bound by protobuf's own 2 GiB.
        nodes: nodes in all graphs and local functions together, also once those are inlined.
        depth: nesting of subgraphs, of function calls and of sequence types. Protobuf parsers give
            up at 33 nested subgraphs, so a larger value only matters for models made in memory.
        rank: number of dimensions of a tensor or of a declared shape.
        elements: number of elements of one tensor.
        name_length: characters of a name of a value, node, operator, attribute or dimension.
    """

    file_bytes: int = 64 << 30
    nodes: int = 2_000_000
    depth: int = 32
    rank: int = 32
    elements: int = 1 << 40
    name_length: int = 4096


class ProblemKind(NamedTuple):
    """A kind of problem: the first line of its message and the way out."""

    headline: str
    hint: str = ""


def quote(name: object) -> str:
    """``name`` in quotes, escaped, and clipped so that a hostile name cannot flood a message."""
    text = name if isinstance(name, str) else repr(name)
    return repr(text if len(text) <= _MAX_NAME_LENGTH else text[:_MAX_NAME_LENGTH] + "...")


class Problems:
    """Collects what is wrong with one source, so that all of a kind are reported at once."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._found: dict[ProblemKind, list[str]] = {}
        self._count: dict[ProblemKind, int] = {}

    def add(self, kind: ProblemKind, detail: str) -> None:
        """Note one problem; `check` raises it."""
        details = self._found.setdefault(kind, [])
        self._count[kind] = self._count.get(kind, 0) + 1
        if len(details) < _MAX_DETAILS:
            details.append(detail)

    def refusal(self, kind: ProblemKind, *details: str) -> LoadError:
        """The error for a problem that ends the reading at once."""
        return self._error(kind, list(details), len(details))

    def check(self) -> None:
        """Raise the first kind of problem found, if there is one."""
        for kind, details in self._found.items():
            raise self._error(kind, details, self._count[kind])

    def _error(self, kind: ProblemKind, details: list[str], count: int) -> LoadError:
        lines = [f"{self.source}: {kind.headline}"]
        lines += [f"  {detail}" for detail in details]
        if count > len(details):
            lines.append(f"  and {count - len(details)} more")
        if kind.hint:
            lines.append(f"hint: {kind.hint}")
        return LoadError("\n".join(lines))


_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
# Opening a pipe for reading would wait for a writer.
OPEN_NONBLOCKING = _OPEN_FLAGS | getattr(os, "O_NONBLOCK", 0)


class NotRegularError(OSError):
    """A pipe, a device or a socket, which may wait or go on for ever."""


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Return an open file, after a look at what it is; links to files are followed.

    Raises:
        OSError: it cannot be opened, or is a directory, a pipe, a device or a socket; ``strerror``
            says which.
    """
    try:
        descriptor = os.open(path, OPEN_NONBLOCKING)
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
