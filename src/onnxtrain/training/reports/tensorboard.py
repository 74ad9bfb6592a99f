"""TensorBoard's event files, written without TensorBoard.

A file is a row of records: length (8 bytes), checksum of the length, content, checksum of it. The
content is an ``Event`` message: wall_time = 1 (double), step = 2, file_version = 3, summary = 5,
whose values (1) have a tag (1) and a number (2, float).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from pathlib import Path


def _table() -> list[int]:
    table = []
    for n in range(256):
        for _ in range(8):
            n = (n >> 1) ^ 0x82F63B78 if n & 1 else n >> 1
        table.append(n)
    return table


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """Return the Castagnoli checksum.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


class EventFile:
    """Appends scalars to a file that TensorBoard reads."""

    def __init__(self, folder: Path, start: float | None = None) -> None:
        start = time.time() if start is None else start
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / f"events.out.tfevents.{start:.6f}.onnxtrain", "ab")  # noqa: SIM115
        self._write(_double(1, start) + _bytes(3, b"brain.Event:2"))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers of one step."""
        summary = b"".join(
            _bytes(1, _bytes(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
            for tag, value in values.items()
        )
        self._write(_double(1, time.time()) + b"\x10" + _varint(step) + _bytes(5, summary))

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked(length) + event + _masked(event))

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    out = bytearray()
    while True:
        low, value = value & 127, value >> 7
        out.append(low | (128 if value else 0))
        if not value:
            return bytes(out)


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)
