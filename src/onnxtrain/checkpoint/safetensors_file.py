"""Checkpoints as one safetensors file that any tool can read.

Parameters and buffers are stored under their own names, optimizer state under
``optim/<slot>/<parameter>``. Everything else is in one metadata entry, ``onnxtrain``: a JSON object
with sorted keys. Its ``sha256`` covers the file without the leading length, with zeros in place of
the digest itself. The reader checks every size and offset against the file before it uses them, and
the writer replaces a file atomically.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from onnxtrain.checkpoint.ort_checkpoint import array_shape_problem, is_odtc, parse_odtc
from onnxtrain.errors import CheckpointError
from onnxtrain.graph.io.limits import open_regular
from onnxtrain.graph.io.writer import write_files

KEY = "onnxtrain"
_DIGEST = "sha256"
_NO_DIGEST = "0" * 64
_MMAP_MIN_BYTES = 1 << 16  # bytes
_HEADER_LIMIT = 100_000_000  # bytes, the limit of the format

_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def state_key(parameter: str, slot: str) -> str:
    """Return the name of an optimizer state tensor in the file.

    >>> state_key("fc.weight", "exp_avg")
    'optim/exp_avg/fc.weight'
    """
    return f"optim/{slot}/{parameter}"


def to_bytes(tensors: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> bytes:
    """Return the content of a checkpoint file; equal content gives equal bytes."""
    return b"".join(_checkpoint_parts(tensors, meta))


def safetensors_bytes(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """Return the content of a safetensors file with the metadata of another tool."""
    head, data = _head_and_data(tensors, metadata)
    return b"".join([len(head).to_bytes(8, "little"), head, *data])


def _checkpoint_parts(
    tensors: Mapping[str, np.ndarray], meta: Mapping[str, Any]
) -> list[bytes | memoryview]:
    head, data = _head_and_data(tensors, {KEY: _text({**meta, _DIGEST: _NO_DIGEST})})
    digest = _digest([head, *data])
    head = head.replace(_NO_DIGEST.encode(), digest.encode(), 1)
    return [len(head).to_bytes(8, "little"), head, *data]


def _head_and_data(
    tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> tuple[bytes, list[memoryview]]:
    """Return the header of a file and the bytes of its tensors, in order."""
    arrays = {name: np.asarray(a) for name, a in tensors.items()}
    unsupported = [f"{name} ({a.dtype})" for name, a in arrays.items() if a.dtype not in _NAMES]
    if unsupported:
        raise CheckpointError(f"safetensors does not support the type of {', '.join(unsupported)}")
    # Wide types first, so that every tensor is aligned; then by name.
    order = sorted(arrays, key=lambda n: (-arrays[n].dtype.itemsize, n))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name in order:
        end = at + arrays[name].nbytes
        header[name] = {
            "dtype": _NAMES[arrays[name].dtype],
            "shape": list(arrays[name].shape),
            "data_offsets": [at, end],
        }
        at = end
    head = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)
    return head, [np.ascontiguousarray(arrays[n]).reshape(-1).view(np.uint8).data for n in order]


def _digest(parts: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def from_bytes(
    data: bytes, label: str = "checkpoint"
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return tensors and metadata of a checkpoint.

    Raises:
        CheckpointError: if it is truncated, damaged or not a checkpoint.
    """
    return from_file(io.BytesIO(data), label)


def from_file(
    file: BinaryIO, label: str = "checkpoint"
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return tensors and metadata of an open checkpoint, read straight into their arrays.

    Raises:
        CheckpointError: if it is truncated, damaged or not a checkpoint.
    """
    length = file.seek(0, os.SEEK_END)
    file.seek(0)
    header, head = _header(file, length, label)
    start = 8 + len(head)
    entry = header.pop("__metadata__", {})
    specs: list[tuple[str, np.dtype[Any], tuple[int, ...]]] = []
    expected = 0
    for name, info in sorted(header.items(), key=lambda item: _begin(item[1], label)):
        dtype, shape, (begin, end) = _describe(name, info, label)
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize if shape else dtype.itemsize
        if begin != expected or end - begin != size:
            raise CheckpointError(
                f"{label}: the offsets of tensor {name!r} do not match its shape and dtype"
            )
        expected = end
        if start + end > length:
            raise CheckpointError(
                f"{label}: truncated, tensor {name!r} ends at byte {start + end} of {length}"
            )
        specs.append((name, dtype, shape))
    if start + expected != length:
        raise CheckpointError(f"{label}: {length - start - expected} bytes after the last tensor")
    meta = _meta(entry, label)
    tensors = {name: _empty(shape, dtype) for name, dtype, shape in specs}
    raw = [a.reshape(-1).view(np.uint8).data for a in tensors.values()]
    for part in raw:
        if file.readinto(part) != len(part):  # type: ignore[attr-defined]  # files and BytesIO do
            raise CheckpointError(f"{label}: truncated while reading")
    _check_digest(head, raw, meta, label)
    return tensors, meta


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    if size < _MMAP_MIN_BYTES:
        return np.empty(shape, dtype)
    # An anonymous mapping is returned to the system with the array; the heap would keep the pages.
    return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)


def save_checkpoint(
    path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray], meta: Mapping[str, Any]
) -> None:
    """Write a checkpoint atomically: a reader sees the old file or the new one, never a part."""
    target = os.path.abspath(os.fsdecode(path))
    parts = _checkpoint_parts(tensors, meta)

    def write(file: BinaryIO) -> None:
        for part in parts:
            file.write(part)

    write_files(repr(os.fsdecode(path)), {target: write})


def load_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return tensors and metadata of a checkpoint of onnxtrain or onnxruntime-training."""
    label = repr(os.fsdecode(path))
    try:
        with open_regular(path) as file:
            if not is_odtc(file.read(8)):
                return from_file(file, label)
            file.seek(0)
            data = file.read()
    except OSError as error:
        raise CheckpointError(f"{label}: cannot be read: {error.strerror}") from error
    checkpoint = parse_odtc(data, label, os.fsdecode(path))
    if checkpoint.nominal:
        raise CheckpointError(
            f"{label}: a nominal checkpoint contains no weights\n"
            "hint: load the full checkpoint that was saved with it"
        )
    meta: dict[str, Any] = {"properties": checkpoint.properties, "step": checkpoint.step}
    return checkpoint.tensors(), meta if checkpoint.lr is None else {**meta, "lr": checkpoint.lr}


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the metadata of a checkpoint without its tensors; its digest is not checked."""
    label = repr(os.fsdecode(path))
    try:
        with open_regular(path) as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(0)
            header, _ = _header(file, length, label)
    except OSError as error:
        raise CheckpointError(f"{label}: cannot be read: {error.strerror}") from error
    return _meta(header.get("__metadata__", {}), label)


def _header(file: BinaryIO, length: int, label: str) -> tuple[dict[str, Any], bytes]:
    if length < 8:
        raise CheckpointError(f"{label}: not a checkpoint, {length} bytes long")
    size = int.from_bytes(file.read(8), "little")
    if size > _HEADER_LIMIT or 8 + size > length:
        raise CheckpointError(f"{label}: not a checkpoint, or truncated in its header")
    head = file.read(size)
    try:
        header = json.loads(head)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{label}: the header is damaged: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{label}: the header is not an object")
    return header, head


def _check_digest(head: bytes, raw: Iterable[memoryview], meta: dict[str, Any], label: str) -> None:
    if not meta:
        return  # written by another tool
    digest = meta.pop(_DIGEST, None)
    head = head.replace(str(digest).encode(), _NO_DIGEST.encode(), 1)
    if digest is None or _digest([head, *raw]) != digest:
        raise CheckpointError(
            f"{label}: damaged: its sha256 differs from the recorded one\n"
            "hint: load an older checkpoint"
        )


def _begin(info: Any, label: str) -> int:
    try:
        begin = info["data_offsets"][0]
    except (KeyError, IndexError, TypeError):
        begin = None
    if not isinstance(begin, int):
        raise CheckpointError(f"{label}: the header is damaged: a tensor has no offsets")
    return begin


def _describe(
    name: str, info: Any, label: str
) -> tuple[np.dtype[Any], tuple[int, ...], tuple[int, int]]:
    try:
        dtype, shape = _DTYPES[info["dtype"]], tuple(info["shape"])
        begin, end = info["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{label}: invalid entry of tensor {name!r}: {error}") from error
    if not all(
        isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in (*shape, begin, end)
    ):
        raise CheckpointError(
            f"{label}: invalid entry of tensor {name!r}: sizes and offsets must be integers"
        )
    problem = array_shape_problem(shape, dtype.itemsize)
    if problem:
        raise CheckpointError(f"{label}: invalid entry of tensor {name!r}: {problem}")
    return dtype, shape, (begin, end)


def _meta(entry: Any, label: str) -> dict[str, Any]:
    text = entry.get(KEY) if isinstance(entry, dict) else None
    if text is None:
        _check_metadata_key(entry, label)
        return {}  # a safetensors file of another tool
    try:
        meta = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{label}: the metadata is damaged: {error}") from error
    if not isinstance(meta, dict):
        raise CheckpointError(f"{label}: the metadata is not an object")
    return meta


def _check_metadata_key(entry: Any, label: str) -> None:
    """Reject our metadata under a damaged key: without the key, no digest would be checked."""
    for key, text in entry.items() if isinstance(entry, dict) else ():
        try:
            meta = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            continue
        if isinstance(meta, dict) and _DIGEST in meta and text == _text(meta):
            raise CheckpointError(
                f"{label}: damaged: its metadata is under the key {key[:80]!r}, not {KEY!r}\n"
                "hint: load an older checkpoint"
            )


def _text(meta: Mapping[str, Any]) -> str:
    return json.dumps(meta, sort_keys=True, separators=(",", ":"))
