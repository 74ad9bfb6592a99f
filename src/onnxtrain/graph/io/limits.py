"""Limits of what onnxtrain reads, the problems that `load` reports, and safe opening of files.

:class:`Limits` and the constants below it are all size limits of files that users pass.
:class:`Problems` collects what is wrong with a model, so that one error lists all problems of a
kind. :func:`open_regular` and :func:`read_regular` open every file that onnxtrain reads: they
reject pipes and devices before a read can block, links that lead out of a folder, and files over a
limit before their bytes are in memory.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from dataclasses import dataclass
from io import BufferedReader
from typing import Any, BinaryIO, NamedTuple

from onnxtrain.errors import LoadError

INVALID = "the model is not valid ONNX; export it again, or repair it with onnx_ir"
CORRUPT = "the file is corrupt or was edited by hand; export the model again"
"""Hints that several kinds of problems share."""

PROTOBUF_BYTES = (1 << 31) - 1
"""Largest size of a protobuf message."""

_MAX_DETAILS = 5  # lines per kind of problem in a message
_MAX_NAME_LENGTH = 80  # characters of a quoted name in a message


@dataclass(frozen=True)
class Limits:
    """The sizes above which `load` rejects a model; raise one only for a file you trust.

    Attributes:
        file_bytes: size of the model file and of each external data file. Protobuf limits a model
            file to 2 GiB in any case.
        nodes: nodes in all graphs and local functions together, before and after inlining.
        depth: nesting of subgraphs, of function calls and of sequence types. Protobuf parsers fail
            at 33 nested subgraphs, so a larger value only matters for models built in memory.
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


MIB = 1 << 20

JSON_BYTES = 128 * MIB
"""Largest JSON file: manifests, configurations, tokenizers.

The largest tokenizers have 40 MB. Python objects take about 10 times the size of their JSON text.
"""

TABLE_BYTES = 2048 * MIB
"""Largest table of text (CSV, TSV, JSON lines). A cell takes about 60 bytes once it is parsed."""

STACKED_BYTES = 4096 * MIB
"""Largest array of images that are read from single files; larger sets train as batches."""

ARCHIVE_BYTES = 1024 * MIB
ARCHIVE_RATIO = 100
"""Largest archive (.npz) once unpacked: 1 GiB, or 100 times its size.

DEFLATE packs up to 1,032 zeros into a byte, so 6 MB become 6.4 GB. Training data packs about 10 to
1; labels and masks pack better, and are small.
"""


class ProblemKind(NamedTuple):
    """A kind of problem: the first line of its message, and a hint."""

    headline: str
    hint: str = ""


def quote(name: object) -> str:
    """Return a name in quotes, escaped and truncated, so that it cannot flood a message."""
    text = name if isinstance(name, str) else repr(name)
    return repr(text if len(text) <= _MAX_NAME_LENGTH else text[:_MAX_NAME_LENGTH] + "...")


class Problems:
    """The problems of one model; an error reports all problems of a kind at once."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._found: dict[ProblemKind, list[str]] = {}
        self._count: dict[ProblemKind, int] = {}

    def add(self, kind: ProblemKind, detail: str) -> None:
        """Record a problem for `check` to raise."""
        details = self._found.setdefault(kind, [])
        self._count[kind] = self._count.get(kind, 0) + 1
        if len(details) < _MAX_DETAILS:
            details.append(detail)

    def refusal(self, kind: ProblemKind, *details: str) -> LoadError:
        """Return the error for a problem after which reading cannot continue."""
        return self._error(kind, list(details), len(details))

    def check(self) -> None:
        """Raise an error for the first kind of problem recorded, if there is one."""
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
# Without O_NONBLOCK, opening a pipe for reading waits for a writer.
OPEN_NONBLOCKING = _OPEN_FLAGS | getattr(os, "O_NONBLOCK", 0)


class NotRegularError(OSError):
    """The path is a pipe, a device or a socket, which may block or never end."""


class OutsideError(OSError):
    """The path leads out of the folder that it must stay in, by ``..`` or a link."""


class TooLargeError(OSError):
    """The file is over a size limit."""


def open_regular(
    path: str | os.PathLike[str], *, within: str | os.PathLike[str] | None = None
) -> BufferedReader:
    """Open a regular file for reading; follow links to files.

    Args:
        path: the file.
        within: the folder that the file must be in once links and ``..`` are resolved.

    Raises:
        OSError: the path cannot be opened, leads out of the folder, or is a directory, a pipe, a
            device or a socket; ``strerror`` says which.
    """
    try:
        flags = OPEN_NONBLOCKING
        if within is not None:
            path = resolve_within(path, within)
            flags |= getattr(os, "O_NOFOLLOW", 0)  # it is resolved; a link is newer than the check
        descriptor = os.open(path, flags)
    except ValueError as error:  # a NUL in the path
        raise OSError(errno.EINVAL, f"not a file name: {error}") from error
    try:
        _check_kind(os.fstat(descriptor).st_mode, os.fsdecode(path))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def resolve_within(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> str:
    """Return the path with its links resolved; raise `OutsideError` if it leaves the folder."""
    try:
        real, root = os.path.realpath(os.fsdecode(path)), os.path.realpath(os.fsdecode(folder))
    except ValueError as error:
        raise OSError(errno.EINVAL, f"not a file name: {error}") from error
    if not real.startswith(os.path.join(root, "")):
        message = f"it leads out of the folder {os.fsdecode(folder)!r}"
        raise OutsideError(errno.EINVAL, message, os.fsdecode(path))
    return real


def read_json(path: str | os.PathLike[str], *, within: str | os.PathLike[str] | None = None) -> Any:
    """Return the content of a JSON file of up to `JSON_BYTES`.

    Args:
        path: the file.
        within: as for :func:`open_regular`.

    Raises:
        OSError: as :func:`read_regular`.
        ValueError: it is not JSON in UTF-8, or nested too deeply to parse.
    """
    try:
        return json.loads(read_regular(path, JSON_BYTES, within=within).decode("utf-8-sig"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _check_kind(mode: int, path: str) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "this is a directory", path)
    if not stat.S_ISREG(mode):
        message = "not a regular file but a pipe, a device or a socket"
        raise NotRegularError(errno.EINVAL, message, path)


def read_regular(
    path: str | os.PathLike[str],
    max_bytes: int = PROTOBUF_BYTES,
    *,
    within: str | os.PathLike[str] | None = None,
) -> bytes:
    """Return the content of a regular file; raise the errors of :func:`open_regular`.

    Args:
        path: the file.
        max_bytes: the size above which the file is not read.
        within: the folder that the file must be in once links and ``..`` are resolved.

    Raises:
        OSError: as :func:`open_regular`, or the file is over the limit.
    """
    with open_regular(path, within=within) as file:
        return read_limited(file, max_bytes, path)


def read_limited(file: BinaryIO, max_bytes: int, path: str | os.PathLike[str]) -> bytes:
    """Return the content of an open file, or raise `TooLargeError`."""
    size = os.fstat(file.fileno()).st_size
    if size > max_bytes:
        message = f"the file has {size:,} bytes, the limit is {max_bytes:,}"
        raise TooLargeError(errno.EFBIG, message, os.fsdecode(path))
    return file.read(size)  # not more, should the file grow
