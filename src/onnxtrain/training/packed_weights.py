"""Whether a file has products with packed weights, found without reading it into memory.

A parsed file of thousands of nodes takes as much as a layer's activations, and the peak of a
process is never given back. So its fields are walked where they lie.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

_GRAPH, _NODE = 7, 1  # fields of a model and of a graph
_INPUT, _ATTRIBUTE = 1, 5  # fields of a node
_NAME, _NUMBER = 1, 3  # fields of an attribute
_PRODUCT = b"MatMulNBits"
_PLAIN_INPUTS = 3
_BITS = 4


def has_packed_weights(source: bytes | str) -> bool:
    """Return whether all products of a file with packed weights have 4 bits and scales alone.

    Kernels would keep a second copy of them, larger than the weights. They unpack these at little
    cost in each run; of other kinds they may not.
    """
    if not isinstance(source, str) or not Path(source).stat().st_size:
        return False
    with (
        Path(source).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        plain = [
            _is_plain(data, *node)
            for graph in _spans(data, 0, len(data), _GRAPH)
            for node in _spans(data, *graph, _NODE)
            if data.find(_PRODUCT, *node) >= 0
        ]
    return bool(plain) and all(plain)


def _is_plain(data: mmap.mmap, start: int, end: int) -> bool:
    inputs = sum(1 for _ in _spans(data, start, end, _INPUT))
    bits = [
        number
        for at, to in _spans(data, start, end, _ATTRIBUTE)
        if any(data[a:b] == b"bits" for a, b in _spans(data, at, to, _NAME))
        for field, number, _ in _fields(data, at, to)
        if field == _NUMBER
    ]
    return inputs == _PLAIN_INPUTS and all(n == _BITS for n in bits)


def _spans(data: mmap.mmap, start: int, end: int, wanted: int) -> Iterator[tuple[int, int]]:
    """Return where the contents of a field begin and end, for each of its values."""
    return ((a, b) for field, a, b in _fields(data, start, end) if field == wanted and b)


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Return fields: number, begin and end; of an integer, its value and 0."""
    at = start
    while at < end:
        tag, at = _varint(data, at)
        field, kind = tag >> 3, tag & 7
        if kind == 2:
            length, at = _varint(data, at)
            yield field, at, at + length
            at += length
        elif kind == 0:
            value, at = _varint(data, at)
            yield field, value, 0
        else:
            at += 8 if kind == 1 else 4


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
