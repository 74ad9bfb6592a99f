"""External data: the files beside a model, opened only if nothing about them is suspicious.

The file is opened once, component by component and without following links, checked on the open
descriptor and mapped read-only from it. Nobody opens it by name again, so it cannot be exchanged
between the check and the use.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.graph.io.limits import Kind, Limits, quote
from onnxtrain.graph.io.regular_file import NO_WAIT

_COPY = "copy the model and its data into one directory and load that (`cp -L` follows links)"
_BROKEN = "the file is damaged or was made by hand; export the model again"

IN_MEMORY = Kind("tensors that refer to memory of another process", _BROKEN)
NO_DIRECTORY = Kind(
    "external data in a model that did not come from a path",
    "give load() the path of the model file instead",
)
BAD_KEYS = Kind("external data entries that are not understood", _BROKEN)
ABSOLUTE = Kind("external data with an absolute path", _COPY)
OUTSIDE = Kind("external data outside the model's directory", _COPY)
SYMLINK = Kind("external data behind a symbolic link", _COPY)
HARD_LINK = Kind("external data in a file with several hard links", _COPY)
NOT_A_FILE = Kind("external data that is not a regular file")
MISSING = Kind(
    "external data files that are missing",
    "put the data files back beside the model, under the names it was exported with",
)
UNREADABLE = Kind("external data files that cannot be read")
TOO_LARGE = Kind(
    "external data files over the size limit",
    "if you trust the file: load(..., limits=Limits(file_bytes=...))",
)
RANGE = Kind("external data that does not fit its file", _BROKEN)
LENGTH = Kind("external data whose length does not match dtype and shape", _BROKEN)

# ONNX Runtime marks tensors that live in its own process so; the offset is then an address.
_ORT_MEMORY = "_ORT_MEM_ADDR_"
_KEYS = {"location", "offset", "length", "checksum", "basepath"}
_AT = os.open in os.supports_dir_fd and os.stat in os.supports_dir_fd
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


class Refused(Exception):  # noqa: N818  (never leaves graph/: turned into a LoadError)
    """A region of external data that we do not touch, and why."""

    def __init__(self, kind: Kind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


STORED = "onnxtrain.stored"  # key in the meta of tensors: where they lie


@dataclass(frozen=True)
class Stored:
    """Where the bytes of a tensor lie."""

    file: str
    offset: int


@dataclass(frozen=True)
class Region:
    """A checked stretch of bytes in a data file."""

    location: str
    offset: int
    length: int


@dataclass(frozen=True)
class _Mapped:
    size: int
    data: mmap.mmap | None  # None for an empty file, which cannot be mapped


class DataFiles:
    """The data files in one model directory, each opened at most once."""

    def __init__(self, directory: str | None, limits: Limits) -> None:
        self._directory = directory
        self._limits = limits
        self._files: dict[str, _Mapped | Refused] = {}

    def region(self, location: str, offset: int | None, length: int | None, nbytes: int) -> Region:
        """The bytes of one tensor, after all checks; raises `Refused`."""
        parts = _parts(location)
        if self._directory is None:
            raise Refused(NO_DIRECTORY, f"location {quote(location)}")
        if length is not None and length != nbytes:
            raise Refused(LENGTH, f"needs {nbytes} bytes, length is {length}")
        start = offset or 0
        if start < 0:
            raise Refused(RANGE, f"offset {start} is negative")
        size = self._open(parts).size
        if start + nbytes > size:
            raise Refused(
                RANGE,
                f"bytes {start} to {start + nbytes} of {quote(location)}, which has {size}",
            )
        return Region("/".join(parts), start, nbytes)

    def place(self, region: Region) -> Stored:
        """The file and the place in it of a checked region."""
        assert self._directory is not None
        return Stored(os.path.join(self._directory, *region.location.split("/")), region.offset)

    def array(self, region: Region, dtype: np.dtype) -> np.ndarray:
        """A flat read-only view of ``region``."""
        file = self._files[region.location]
        assert isinstance(file, _Mapped)
        if not region.length or file.data is None:
            return np.empty(0, dtype)
        count = region.length // dtype.itemsize
        return np.frombuffer(file.data, dtype, count=count, offset=region.offset)

    def _open(self, parts: list[str]) -> _Mapped:
        key = "/".join(parts)
        if key not in self._files:
            assert self._directory is not None
            try:
                self._files[key] = _map(self._directory, parts, self._limits)
            except Refused as refused:
                self._files[key] = refused
            except FileNotFoundError:
                self._files[key] = Refused(MISSING, quote(key))
            except (OSError, ValueError) as error:
                self._files[key] = Refused(UNREADABLE, f"{quote(key)}: {error}")
        file = self._files[key]
        if isinstance(file, Refused):
            raise file
        return file


def entries(tensor: onnx.TensorProto) -> tuple[str, int | None, int | None]:
    """Location, offset and length of an external tensor; raises `Refused`."""
    fields: dict[str, str] = {}
    for entry in tensor.external_data:
        if entry.key not in _KEYS:
            raise Refused(BAD_KEYS, f"unknown key {quote(entry.key)}")
        if entry.key in fields:
            raise Refused(BAD_KEYS, f"key {quote(entry.key)} is there twice")
        if not isinstance(entry.value, str):
            raise Refused(BAD_KEYS, f"{entry.key} is not text")
        fields[entry.key] = entry.value
    if not fields.get("location"):
        raise Refused(BAD_KEYS, "no location")
    return fields["location"], _number(fields, "offset"), _number(fields, "length")


def to_tensor(external: ir.ExternalTensor, files: DataFiles) -> ir.TensorProtocol:
    """The same tensor on the mapped file; what must be unpacked or aligned is so on first use."""
    tensor, region = _mapped(external, files)
    tensor.meta[STORED] = files.place(region)
    return tensor


def _mapped(external: ir.ExternalTensor, files: DataFiles) -> tuple[ir.TensorProtocol, Region]:
    dtype, dims = external.dtype, list(external.shape.numpy())
    region = files.region(
        os.fspath(external.location), external.offset, external.length, external.nbytes
    )
    about = {
        "name": external.name,
        "doc_string": external.doc_string,
        "metadata_props": dict(external.metadata_props) or None,
    }
    shape = ir.Shape(dims)
    if dtype.bitwidth < 8:
        packed = files.array(region, np.dtype(np.uint8))
        return ir.PackedTensor(packed, dtype, shape=shape, **about), region
    flat = files.array(region, np.dtype(dtype.numpy()).newbyteorder("<"))
    if flat.flags.aligned:
        return ir.Tensor(flat.reshape(dims), dtype, shape=shape, **about), region

    def aligned() -> ir.TensorProtocol:
        return ir.Tensor(flat.copy().reshape(dims), dtype)

    return ir.LazyTensor(aligned, dtype, shape=shape, **about), region


def _number(fields: dict[str, str], key: str) -> int | None:
    text = fields.get(key)
    if text is None:
        return None
    # int() alone would also take "1_0", " 10" and digits of other scripts.
    if not re.fullmatch(r"[0-9]{1,19}", text):
        raise Refused(RANGE, f"{key} is {quote(text)}, not a number from 0 up")
    return int(text)


def _parts(location: str) -> list[str]:
    if _ORT_MEMORY in location:
        raise Refused(IN_MEMORY, f"location {quote(location)}")
    windows = PureWindowsPath(location)
    if PurePosixPath(location).is_absolute() or windows.drive or windows.root:
        raise Refused(ABSOLUTE, f"location {quote(location)}")
    if ".." in re.split(r"[/\\]", location):
        raise Refused(OUTSIDE, f"location {quote(location)}")
    parts = [part for part in location.split("/") if part not in ("", ".")]
    if not parts or "\0" in location:
        raise Refused(NOT_A_FILE, f"location {quote(location)}")
    return parts


def _map(directory: str, parts: list[str], limits: Limits) -> _Mapped:
    key = "/".join(parts)
    fd = _open_below(directory, parts)
    try:
        info = os.fstat(fd)
        _check_file(info, quote(key))
        if info.st_size > limits.file_bytes:
            detail = f"{quote(key)} has {info.st_size} bytes, the limit is {limits.file_bytes}"
            raise Refused(TOO_LARGE, detail)
        if info.st_size == 0:
            return _Mapped(0, None)
        return _Mapped(info.st_size, mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
    finally:
        os.close(fd)


def _open_below(directory: str, parts: Iterable[str]) -> int:
    """A descriptor of ``directory/parts``, reached without following a link below ``directory``."""
    *folders, name = parts
    path, folder = directory, os.open(directory, _FLAGS) if _AT else None
    try:
        for part in folders:
            path = os.path.join(path, part)
            mode = _info(part, path, folder).st_mode
            if stat.S_ISLNK(mode):
                raise Refused(SYMLINK, quote(part))
            if not stat.S_ISDIR(mode):
                raise FileNotFoundError(path)
            if folder is not None:
                below = os.open(part, _FLAGS | _NO_FOLLOW | os.O_DIRECTORY, dir_fd=folder)
                os.close(folder)
                folder = below
        path = os.path.join(path, name)
        info = _info(name, path, folder)
        if stat.S_ISLNK(info.st_mode):
            raise Refused(SYMLINK, quote(name))
        _check_file(info, quote(name))  # before it is opened, and again after
        if folder is None:
            return os.open(path, NO_WAIT | _NO_FOLLOW)
        return os.open(name, NO_WAIT | _NO_FOLLOW, dir_fd=folder)
    finally:
        if folder is not None:
            os.close(folder)


def _check_file(info: os.stat_result, label: str) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise Refused(NOT_A_FILE, label)
    if info.st_nlink > 1:
        raise Refused(HARD_LINK, f"{label} has {info.st_nlink}")


def _info(name: str, path: str, folder: int | None) -> os.stat_result:
    if folder is None:
        return os.lstat(path)
    return os.stat(name, dir_fd=folder, follow_symlinks=False)
