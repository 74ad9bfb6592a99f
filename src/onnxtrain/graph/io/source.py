"""From a path or bytes to a ModelProto, without trusting either."""

from __future__ import annotations

import os

import onnx
from google.protobuf.message import DecodeError

from onnxtrain.graph.io.limits import Kind, Limits, Problems
from onnxtrain.graph.io.regular_file import NotRegularError, open_regular
from onnxtrain.graph.io.structure import TOO_DEEP

_PROTOBUF_BYTES = (1 << 31) - 1

NO_FILE = Kind("no such file")
DIRECTORY = Kind("this is a directory, not a model", "give the .onnx file in it")
NOT_REGULAR = Kind("not a regular file", "save the model to a file first")
CANNOT_READ = Kind("the file cannot be read")
EMPTY = Kind("the file is empty", "was it copied or downloaded completely?")
TOO_LARGE = Kind(
    "the file is over the size limit",
    "if you trust the file: load(..., limits=Limits(file_bytes=...))",
)
OVER_2_GIB = Kind(
    "the file is over 2 GiB, which no protobuf can be",
    "store the weights as external data: onnx.save(..., save_as_external_data=True)",
)
NOT_ONNX = Kind("not an ONNX model", "the file is damaged, incomplete or of another format")

_MAGIC = [
    (0, b"version https://git-lfs", "a git-lfs pointer", "fetch the file itself: git lfs pull"),
    (0, b"PK\x03\x04", "a zip archive", "a torch checkpoint must be exported: torch.onnx.export"),
    (0, b"\x1f\x8b", "a gzip archive", "unpack it first"),
    (0, b"\x89HDF", "an HDF5 file", "convert it with tf2onnx"),
    (4, b"ORTM", "an ONNX Runtime .ort file", "use the .onnx file it was made from"),
    (4, b"TFL3", "a TensorFlow Lite file", "convert it with tf2onnx"),
    (0, b"<!DOCTYPE", "a web page", "the download went wrong"),
    (0, b"<html", "a web page", "the download went wrong"),
]


def read_file(path: str, limits: Limits, problems: Problems) -> bytes:
    """The bytes of a regular file within the limits."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            _check_size(size, limits, problems)
            return file.read(size)
    except (FileNotFoundError, NotADirectoryError):
        raise problems.refusal(NO_FILE) from None
    except NotRegularError:
        raise problems.refusal(NOT_REGULAR) from None
    except OSError as error:
        if os.path.isdir(path):
            raise problems.refusal(DIRECTORY) from None
        raise problems.refusal(CANNOT_READ, str(error)) from error


def parse(data: bytes, limits: Limits, problems: Problems) -> onnx.ModelProto:
    """The model in ``data``."""
    _check_size(len(data), limits, problems)
    if not data:
        raise problems.refusal(EMPTY)
    for offset, magic, what, hint in _MAGIC:
        if data.startswith(magic, offset):
            raise problems.refusal(Kind(NOT_ONNX.headline, hint), f"this is {what}")
    try:
        model = onnx.ModelProto.FromString(data)
    except DecodeError as error:
        if _nested_deeper(data, limits.depth):
            raise problems.refusal(TOO_DEEP, f"more than {limits.depth} levels") from None
        raise problems.refusal(NOT_ONNX, "it is not a complete protobuf") from error
    return model


def _check_size(size: int, limits: Limits, problems: Problems) -> None:
    if size > limits.file_bytes:
        raise problems.refusal(TOO_LARGE, f"{size} bytes, the limit is {limits.file_bytes}")
    if size > _PROTOBUF_BYTES:
        raise problems.refusal(OVER_2_GIB, f"{size} bytes")


# Message -> {field number: message inside it}, along the way that subgraphs take.
_WAY = {
    "model": {7: "graph", 25: "function"},
    "function": {7: "node"},
    "graph": {1: "node"},
    "node": {5: "attribute"},
    "attribute": {6: "graph", 11: "graph"},
}


def _nested_deeper(data: bytes, limit: int, steps: int = 50_000) -> bool:
    """Whether subgraphs are nested over ``limit``, for a file that the parser gave up on.

    Reads the wire format with a stack of its own and looks at a bounded number of fields.
    """
    pending = [(0, len(data), "model", -1)]
    while pending and steps:
        steps -= 1
        position, end, message, depth = pending.pop()
        if depth > limit:
            return True
        tag, position = _varint(data, position, end)
        length = 0
        match tag & 7:
            case 0:
                _, position = _varint(data, position, end)
            case 1:
                length = 8
            case 2:
                length, position = _varint(data, position, end)
            case 5:
                length = 4
            case _:
                continue
        after = position + length
        if after < end:
            pending.append((after, end, message, depth))
        inside = _WAY[message].get(tag >> 3)
        if inside and tag & 7 == 2 and length:
            pending.append((position, min(after, end), inside, depth + (inside == "graph")))
    return False


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while position < end and shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value, position
