"""Read and write the protobuf wire format, where the generated classes do not suffice.

``onnx.ModelProto`` does not report the file offset of a weight, gives up on deeply nested messages
of hostile files, and does not know the messages of other tools. The functions here see a message as
a sequence of fields: a varint key ``number << 3 | wire type``, followed by the value.

>>> key = varint(5 << 3 | LENGTH_DELIMITED)
>>> read_varint(key, 0, len(key))
(42, 1)
>>> list(fields(bytes_field(5, b"abc") + double_field(1, 0.5)))
[(5, 2, 2, 5), (1, 1, 6, 14)]
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5
"""Wire types; 3 and 4 are groups, which proto3 does not have."""
_FIXED_SIZES = {FIXED64: 8, FIXED32: 4}
_VARINT_BITS = 64


def read_varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """Return the varint at ``position`` and the position after it.

    A varint that is truncated at ``end`` or exceeds 64 bits is read up to that point, without an
    error: callers read untrusted files.
    """
    value = shift = 0
    while position < end and shift < _VARINT_BITS:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value, position


def read_field(data: bytes, position: int, end: int) -> tuple[int, int, int, int] | None:
    """Return (number, wire type, start, stop) of the field at ``position``.

    ``data[start:stop]`` is the value; ``stop`` exceeds ``end`` if the message is truncated. The
    result is ``None`` for a group, which has no length prefix.
    """
    key, position = read_varint(data, position, end)
    number, wire_type = key >> 3, key & 7
    if wire_type == VARINT:
        return number, wire_type, position, read_varint(data, position, end)[1]
    if wire_type == LENGTH_DELIMITED:
        size, position = read_varint(data, position, end)
        return number, wire_type, position, position + size
    if wire_type in _FIXED_SIZES:
        return number, wire_type, position, position + _FIXED_SIZES[wire_type]
    return None


def fields(
    data: bytes, start: int = 0, end: int | None = None
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (number, wire type, start, stop) of each field of the message ``data[start:end]``.

    Raises:
        ValueError: if the message contains a group.
    """
    position, end = start, len(data) if end is None else end
    while position < end:
        field = read_field(data, position, end)
        if field is None:
            raise ValueError(f"unknown wire type {data[position] & 7}")
        yield field
        position = field[3]


def varint(value: int) -> bytes:
    """Return a non-negative integer as a varint.

    >>> varint(300).hex()
    'ac02'
    """
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def varint_field(number: int, value: int) -> bytes:
    """Return a field that holds an integer."""
    return varint(number << 3 | VARINT) + varint(value)


def bytes_field(number: int, value: bytes) -> bytes:
    """Return a field that holds bytes, a string or a message."""
    return varint(number << 3 | LENGTH_DELIMITED) + varint(len(value)) + value


def double_field(number: int, value: float) -> bytes:
    """Return a field that holds a float64."""
    return varint(number << 3 | FIXED64) + struct.pack("<d", value)


def float_field(number: int, value: float) -> bytes:
    """Return a field that holds a float32."""
    return varint(number << 3 | FIXED32) + struct.pack("<f", value)
