"""External data: map the weight files of untrusted models, and share one weight file in a run.

:class:`DataFiles` opens a file once, one path component at a time and without following links. It
checks the open descriptor and maps the file read-only from it. The file is never opened by name
again, so nobody can replace it between the check and the use.

:class:`SharedWeights` keeps large weights in one file, to which all models of a run refer. A model
loaded with external data has such a file already: its tensors are referenced in place. Otherwise
the tensors are written once to a temporary file, which is deleted with the last reference to it;
:func:`move_to_file` does so for a loaded model. :func:`release_memory` gives the memory of mapped
files back to the system.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import re
import shutil
import stat
import sys
import tempfile
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import BinaryIO

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import LoadError
from onnxtrain.graph.io.limits import CORRUPT, OPEN_NONBLOCKING, Limits, ProblemKind, quote

_HINT_COPY = "copy the model and its data into one directory and load that (`cp -L` follows links)"

IN_MEMORY = ProblemKind("tensors that refer to memory of another process", CORRUPT)
NO_DIRECTORY = ProblemKind(
    "external data in a model that was not loaded from a path",
    "pass the path of the model file to load()",
)
BAD_KEYS = ProblemKind("invalid external data entries", CORRUPT)
ABSOLUTE = ProblemKind("external data with an absolute path", _HINT_COPY)
OUTSIDE = ProblemKind("external data outside the model's directory", _HINT_COPY)
SYMLINK = ProblemKind("external data behind a symbolic link", _HINT_COPY)
HARD_LINK = ProblemKind("external data in a file with several hard links", _HINT_COPY)
NOT_A_FILE = ProblemKind("external data that is not a regular file")
MISSING = ProblemKind(
    "external data files that are missing",
    "put the data files into the directory of the model, under their original names",
)
UNREADABLE = ProblemKind("external data files that cannot be read")
TOO_LARGE = ProblemKind(
    "external data files over the size limit",
    "if you trust the file: load(..., limits=Limits(file_bytes=...))",
)
RANGE = ProblemKind("external data that does not fit its file", CORRUPT)
LENGTH = ProblemKind("external data whose length does not match dtype and shape", CORRUPT)

# onnxruntime marks tensors in its own process with this location; their offset is an address.
_ORT_MEMORY = "_ORT_MEM_ADDR_"
_KEYS = {"location", "offset", "length", "checksum", "basepath"}
_HAS_DIR_FD = os.open in os.supports_dir_fd and os.stat in os.supports_dir_fd
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


class ExternalDataError(Exception):
    """External data was rejected; `load` turns this into a LoadError."""

    def __init__(self, kind: ProblemKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


STORED_TENSOR = "onnxtrain.stored"  # key in the meta of tensors: their StoredTensor


@dataclass(frozen=True)
class StoredTensor:
    """The file and offset of a tensor's bytes."""

    file: str
    offset: int


@dataclass(frozen=True)
class Region:
    """A checked range of bytes in a data file."""

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
        self._files: dict[str, _Mapped | ExternalDataError] = {}

    def region(self, location: str, offset: int | None, length: int | None, nbytes: int) -> Region:
        """Check the range of bytes of one tensor; return it or raise `ExternalDataError`."""
        parts = _path_parts(location)
        if self._directory is None:
            raise ExternalDataError(NO_DIRECTORY, f"location {quote(location)}")
        if length is not None and length != nbytes:
            raise ExternalDataError(LENGTH, f"needs {nbytes} bytes, length is {length}")
        start = offset or 0
        if start < 0:
            raise ExternalDataError(RANGE, f"offset {start} is negative")
        size = self._open(parts).size
        if start + nbytes > size:
            raise ExternalDataError(
                RANGE,
                f"bytes {start} to {start + nbytes} of {quote(location)}, which has {size} bytes",
            )
        return Region("/".join(parts), start, nbytes)

    def stored_tensor(self, region: Region) -> StoredTensor:
        """Return the path and offset of a checked region."""
        assert self._directory is not None
        return StoredTensor(
            os.path.join(self._directory, *region.location.split("/")), region.offset
        )

    def array(self, region: Region, dtype: np.dtype) -> np.ndarray:
        """Return a flat read-only view of a checked region."""
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
            except ExternalDataError as error:
                self._files[key] = error
            except FileNotFoundError:
                self._files[key] = ExternalDataError(MISSING, quote(key))
            except (OSError, ValueError) as error:
                self._files[key] = ExternalDataError(UNREADABLE, f"{quote(key)}: {error}")
        file = self._files[key]
        if isinstance(file, ExternalDataError):
            raise file
        return file


def entries(tensor: onnx.TensorProto) -> tuple[str, int | None, int | None]:
    """Return location, offset and length of an external tensor, or raise `ExternalDataError`."""
    fields: dict[str, str] = {}
    for entry in tensor.external_data:
        if entry.key not in _KEYS:
            raise ExternalDataError(BAD_KEYS, f"unknown key {quote(entry.key)}")
        if entry.key in fields:
            raise ExternalDataError(BAD_KEYS, f"duplicate key {quote(entry.key)}")
        if not isinstance(entry.value, str):
            raise ExternalDataError(BAD_KEYS, f"{entry.key} is not text")
        fields[entry.key] = entry.value
    if not fields.get("location"):
        raise ExternalDataError(BAD_KEYS, "no location")
    return fields["location"], _integer_field(fields, "offset"), _integer_field(fields, "length")


def to_tensor(external: ir.ExternalTensor, files: DataFiles) -> ir.TensorProtocol:
    """Return the tensor as a view of the mapped file; unaligned data is copied on first use."""
    tensor, region = _mapped_tensor(external, files)
    tensor.meta[STORED_TENSOR] = files.stored_tensor(region)
    return tensor


def _mapped_tensor(
    external: ir.ExternalTensor, files: DataFiles
) -> tuple[ir.TensorProtocol, Region]:
    dtype, dims = external.dtype, list(external.shape.numpy())
    region = files.region(
        os.fspath(external.location), external.offset, external.length, external.nbytes
    )
    metadata = {
        "name": external.name,
        "doc_string": external.doc_string,
        "metadata_props": dict(external.metadata_props) or None,
    }
    shape = ir.Shape(dims)
    if dtype.bitwidth < 8:
        packed = files.array(region, np.dtype(np.uint8))
        return ir.PackedTensor(packed, dtype, shape=shape, **metadata), region
    flat = files.array(region, np.dtype(dtype.numpy()).newbyteorder("<"))
    if flat.flags.aligned:
        return ir.Tensor(flat.reshape(dims), dtype, shape=shape, **metadata), region

    def aligned() -> ir.TensorProtocol:
        return ir.Tensor(flat.copy().reshape(dims), dtype)

    return ir.LazyTensor(aligned, dtype, shape=shape, **metadata), region


def _integer_field(fields: dict[str, str], key: str) -> int | None:
    text = fields.get(key)
    if text is None:
        return None
    # int() also accepts "1_0", " 10" and digits of other scripts.
    if not re.fullmatch(r"[0-9]{1,19}", text):
        raise ExternalDataError(RANGE, f"{key} is {quote(text)}, expected a non-negative integer")
    return int(text)


def _path_parts(location: str) -> list[str]:
    if _ORT_MEMORY in location:
        raise ExternalDataError(IN_MEMORY, f"location {quote(location)}")
    windows = PureWindowsPath(location)
    if PurePosixPath(location).is_absolute() or windows.drive or windows.root:
        raise ExternalDataError(ABSOLUTE, f"location {quote(location)}")
    if ".." in re.split(r"[/\\]", location):
        raise ExternalDataError(OUTSIDE, f"location {quote(location)}")
    parts = [part for part in location.split("/") if part not in ("", ".")]
    if not parts or "\0" in location:
        raise ExternalDataError(NOT_A_FILE, f"location {quote(location)}")
    return parts


def _map(directory: str, parts: list[str], limits: Limits) -> _Mapped:
    key = "/".join(parts)
    fd = _open_below(directory, parts)
    try:
        info = os.fstat(fd)
        _check_file(info, quote(key))
        if info.st_size > limits.file_bytes:
            detail = f"{quote(key)} has {info.st_size} bytes, the limit is {limits.file_bytes}"
            raise ExternalDataError(TOO_LARGE, detail)
        if info.st_size == 0:
            return _Mapped(0, None)
        data = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        _MAPS.add(data)
        return _Mapped(info.st_size, data)
    finally:
        os.close(fd)


_MAPS: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def release_memory() -> None:
    """Give unused memory back to the system: pages of mapped weight files, and freed blocks.

    Pages that were touched count as memory of the process, beside those that onnxruntime maps; they
    are read again when they are used. glibc keeps what was freed between blocks in use.
    """
    if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
        for data in list(_MAPS):
            data.madvise(mmap.MADV_DONTNEED)
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def write_tensor(file: BinaryIO, tensor: ir.TensorProtocol) -> None:
    """Write the bytes of a tensor; those of a mapped one are not copied into memory first."""
    array = tensor.numpy() if isinstance(tensor, ir.Tensor) else None
    if array is None or not array.flags.c_contiguous or sys.byteorder != "little":
        file.write(tensor.tobytes())
    else:
        file.write(array.reshape(-1).view(np.uint8).data)


def _open_below(directory: str, parts: Iterable[str]) -> int:
    """Open ``directory/parts`` without following links below ``directory``; return a descriptor."""
    *folders, name = parts
    path, folder = directory, os.open(directory, _FLAGS) if _HAS_DIR_FD else None
    try:
        for part in folders:
            path = os.path.join(path, part)
            mode = _info(part, path, folder).st_mode
            if stat.S_ISLNK(mode):
                raise ExternalDataError(SYMLINK, quote(part))
            if not stat.S_ISDIR(mode):
                raise FileNotFoundError(path)
            if folder is not None:
                below = os.open(part, _FLAGS | _NO_FOLLOW | os.O_DIRECTORY, dir_fd=folder)
                os.close(folder)
                folder = below
        path = os.path.join(path, name)
        info = _info(name, path, folder)
        if stat.S_ISLNK(info.st_mode):
            raise ExternalDataError(SYMLINK, quote(name))
        _check_file(info, quote(name))  # before opening a device; _map checks the descriptor again
        if folder is None:
            return os.open(path, OPEN_NONBLOCKING | _NO_FOLLOW)
        return os.open(name, OPEN_NONBLOCKING | _NO_FOLLOW, dir_fd=folder)
    finally:
        if folder is not None:
            os.close(folder)


def _check_file(info: os.stat_result, label: str) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise ExternalDataError(NOT_A_FILE, label)
    if info.st_nlink > 1:
        raise ExternalDataError(HARD_LINK, f"{label} has {info.st_nlink}")


def _info(name: str, path: str, folder: int | None) -> os.stat_result:
    if folder is None:
        return os.lstat(path)
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


LARGE_MODEL_BYTES = 1 << 29
"""Models with more bytes of weights keep them out of protobufs."""
MAPPED_MODEL_BYTES = 1 << 26
"""The same for models whose weights are in one file of external data."""
WEIGHTS_FILE = "weights.bin"
_MIN_TENSOR_BYTES = 1024  # smaller tensors stay in the protobuf
_ALIGNMENT = 4096  # of tensors in the weight file: a memory page
_META = "onnxtrain.shared_weights"  # key in Graph.meta, which Model.clone() copies
_MOVED = "onnxtrain.moved_weights"  # the same: the _TemporaryFile of `move_to_file`


class _TemporaryFile:
    """A weight file that is deleted with the last reference to it."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="onnxtrain-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path = Path(folder) / WEIGHTS_FILE

    def append(self, tensor: ir.TensorProtocol) -> int:
        """Write a tensor to the end of the file; return its offset."""
        with self.path.open("ab") as file:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            offset = file.tell()
            write_tensor(file, tensor)
        return offset


def move_to_file(model: ir.Model) -> None:
    """Move the weights of a model from memory to a temporary file, and map it, in place.

    Only if there are more than `MAPPED_MODEL_BYTES`. The file lasts as long as the model and its
    copies.
    """
    values = {
        n: (x, t)
        for n, x in model.graph.initializers.items()
        if (t := x.const_value) is not None
        and _stored(t) is None
        and t.nbytes >= _MIN_TENSOR_BYTES
        and t.dtype != ir.DataType.STRING
    }
    if sum(t.nbytes for _, t in values.values()) <= MAPPED_MODEL_BYTES:
        return
    moved = _TemporaryFile()
    offsets = {n: moved.append(t) for n, (_, t) in values.items()}
    files = DataFiles(str(moved.path.parent), Limits())
    for name, (x, t) in values.items():
        shape = ir.Shape(t.shape.numpy())
        external = ir.ExternalTensor(
            WEIGHTS_FILE, offsets[name], t.nbytes, t.dtype, shape=shape, name=name
        )
        x.const_value = to_tensor(external, files)
    model.graph.meta[_MOVED] = moved


class SharedWeights:
    """A file of weights that several models refer to."""

    def __init__(self) -> None:
        self.path: Path | None = None
        """Path of the file; ``None`` until a model needs one."""
        self._temporary: _TemporaryFile | None = None
        self._own = False
        self._identity: tuple[int, ...] = ()
        # Offset by the id of the data; holding the data keeps Python from reusing its id.
        self._offsets: dict[int, tuple[int, object]] = {}

    def take(self, model: ir.Model, *, mapped: bool = False) -> bool:
        """Manage the weights of a model if they are large; return whether they are.

        Args:
            model: the model.
            mapped: whether to refer to a file of external data from `MAPPED_MODEL_BYTES` on.
        """
        tensors = [t for x in model.graph.initializers.values() if (t := x.const_value) is not None]
        stored = {id(t): _stored(t) for t in tensors if t.nbytes >= _MIN_TENSOR_BYTES}
        files = {s.file for s in stored.values() if s is not None}
        # Tensors that are in no file, such as adapters of a large model, stay in the protobuf.
        in_memory = sum(t.nbytes for t in tensors if stored.get(id(t)) is None)
        in_one_file = len(files) == 1 and in_memory <= LARGE_MODEL_BYTES
        limit = MAPPED_MODEL_BYTES if mapped and in_one_file else LARGE_MODEL_BYTES
        if sum(t.nbytes for t in tensors) <= min(limit, LARGE_MODEL_BYTES):
            return False
        self.keep(model)
        if self.path is None:
            (file,) = files if in_one_file else (None,)
            if file is None:
                self._temporary, self._own = _TemporaryFile(), True
                self.path = self._temporary.path
            else:
                self._temporary = model.graph.meta.get(_MOVED)
                self.path = Path(file)
                self._identity = self._read_identity()
        return True

    def check(self) -> None:
        """Check that nobody replaced the file since the models refer to it.

        Raises:
            LoadError: if it was changed; a file that was removed is named where it is opened.
        """
        if self.path is None or self._own:
            return
        if self._read_identity() not in ((), self._identity):
            raise LoadError(
                f"{str(self.path)!r}: this file was changed after `build`, whose models refer to "
                "it\nhint: build again, or save the artifacts before the file changes"
            )

    def _read_identity(self) -> tuple[int, ...]:
        assert self.path is not None
        try:
            info = self.path.stat()
        except OSError:
            return ()
        return info.st_ino, info.st_size, info.st_mtime_ns

    def keep(self, model: ir.Model) -> None:
        """Record in a model that :func:`detach_weights` should use this file for its weights."""
        model.graph.meta[_META] = self

    def detach(self, model: ir.Model) -> None:
        """Replace the larger weights of a model by references to the file, in place."""
        for name, x in model.graph.initializers.items():
            tensor = x.const_value
            if tensor is None or isinstance(tensor, ir.ExternalTensor):
                continue
            if tensor.nbytes < _MIN_TENSOR_BYTES or tensor.dtype == ir.DataType.STRING:
                continue
            offset = self._offset(tensor)
            if offset is None:
                continue
            assert self.path is not None
            x.const_value = ir.ExternalTensor(
                self.path.name,
                offset,
                tensor.nbytes,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=name,
                base_dir=str(self.path.parent),
            )

    def _offset(self, tensor: ir.TensorProtocol) -> int | None:
        """Return a tensor's offset in the file, ``None`` if it is in another file or in memory.

        Append the tensor if the file is our own.
        """
        if not self._own:
            stored = _stored(tensor)
            return None if stored is None or Path(stored.file) != self.path else stored.offset
        data = getattr(tensor, "raw", tensor)
        key = id(data)
        if key not in self._offsets:
            assert self._temporary is not None
            self._offsets[key] = self._temporary.append(tensor), data
        return self._offsets[key][0]


def detach_weights(model: ir.Model) -> bool:
    """Replace larger weights by references if a model has a weight file; return whether it has."""
    shared: SharedWeights | None = model.graph.meta.get(_META)
    if shared is not None:
        shared.detach(model)
    return shared is not None


def share_weights(source: ir.Model, target: ir.Model) -> None:
    """Let a model use the weight file of another one, if that has one."""
    shared: SharedWeights | None = source.graph.meta.get(_META)
    if shared is not None:
        shared.keep(target)


def weights_folder(model: ir.Model) -> str | None:
    """Return the folder of the file that has a model's larger weights, if there is one."""
    shared: SharedWeights | None = model.graph.meta.get(_META)
    return None if shared is None or shared.path is None else str(shared.path.parent)


def _stored(tensor: ir.TensorProtocol) -> StoredTensor | None:
    return tensor.meta.get(STORED_TENSOR)
