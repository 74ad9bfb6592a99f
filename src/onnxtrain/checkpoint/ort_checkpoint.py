"""Read checkpoints of onnxruntime-training.

They are FlatBuffers with the identifier ODTC. A table starts with the offset of its vtable, which
lists the offset of each field in the table (0: absent). Strings, vectors and tables are reached by
relative offsets. The reader checks each offset against the end of the file before it follows it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from onnxtrain.errors import CheckpointError
from onnxtrain.graph.io.limits import Limits, read_regular

_MAX_BYTES = (1 << 63) - 1  # bytes


def array_shape_problem(shape: Sequence[int], itemsize: int) -> str | None:
    """Return why a shape from a file is impossible, or ``None`` if it is possible.

    >>> array_shape_problem([0, 2**63 - 1], 4)
    'no array has the shape [0, 9223372036854775807]'
    """
    if len(shape) > Limits().rank:
        return f"{len(shape)} dimensions, the limit is {Limits().rank}"
    # numpy rejects an impossible size even if another size is 0.
    if math.prod(max(size, 1) for size in shape) * itemsize > _MAX_BYTES:
        return f"no array has the shape {list(shape)}"
    return None


IDENTIFIER = b"ODTC"
VERSIONS = (1, 2)
_MAX_NAME_BYTES = 1 << 16  # bytes of a name
_DTYPES: dict[int, Any] = {
    1: np.float32,
    2: np.uint8,
    3: np.int8,
    4: np.uint16,
    5: np.int16,
    6: np.int32,
    7: np.int64,
    9: np.bool_,
    10: np.float16,
    11: np.float64,
    12: np.uint32,
    13: np.uint64,
    16: ml_dtypes.bfloat16,
}
# Slot names of onnxtrain by the number of moments per parameter.
_SLOTS = {1: ("momentum_buffer",), 2: ("exp_avg", "exp_avg_sq")}


@dataclasses.dataclass(frozen=True)
class OrtCheckpoint:
    """The content of a file."""

    parameters: dict[str, np.ndarray]
    frozen: dict[str, np.ndarray]
    moments: dict[str, dict[str, np.ndarray]]
    """By parameter, then by slot: ``momentum0``, ``momentum1``."""
    step: int
    lr: float | None
    properties: dict[str, int | float | str]
    nominal: bool
    """Whether the tensors have names but no values."""

    def tensors(self) -> dict[str, np.ndarray]:
        """Return all tensors under the names that onnxtrain's checkpoints use."""
        arrays = {**self.parameters, **self.frozen}
        for name, moments in self.moments.items():
            slots = _SLOTS.get(len(moments), tuple(moments))
            for slot, key in zip(slots, sorted(moments), strict=True):
                arrays[f"optim/{slot}/{name}"] = moments[key]
        return arrays


def is_odtc(data: bytes) -> bool:
    """Return whether the bytes have the identifier of such a file."""
    return data[4:8] == IDENTIFIER


def read_odtc(path: str | os.PathLike[str]) -> OrtCheckpoint:
    """Read a checkpoint of onnxruntime-training.

    Raises:
        CheckpointError: if it is damaged, or of another format or version.
    """
    label = repr(os.fsdecode(path))
    return parse_odtc(_read(path, label), label, os.fspath(path))


def parse_odtc(data: bytes, label: str, path: str | bytes | None = None) -> OrtCheckpoint:
    """Read a checkpoint from bytes; external data is read from ``<path>.data``."""
    if len(data) < 8 or not is_odtc(data):
        raise CheckpointError(f"{label}: not a checkpoint of onnxruntime-training")
    root = _Reader(data, label).root()
    version = root.number(0, "<i", 0)
    if version not in VERSIONS:
        raise CheckpointError(f"{label}: version {version} is not supported (only {VERSIONS})")
    module = root.table(1)
    external = None
    if module is not None and module.number(3, "<?", False):
        if path is None:
            raise CheckpointError(f"{label}: its tensors are in a separate .data file")
        external = _read(os.fsdecode(path) + ".data", f"{label} (.data)")
    groups = root.tables(2)
    moments: dict[str, dict[str, np.ndarray]] = {}
    for group in groups:
        for state in group.tables(3):
            moments[state.text(0)] = _tensors(state, 1, external)
    bag = root.table(3)
    nominal = module is not None and bool(module.number(2, "<?", False))
    return OrtCheckpoint(
        parameters={} if module is None else _tensors(module, 0, external, nominal),
        frozen={} if module is None else _tensors(module, 1, external, nominal),
        moments=moments,
        step=groups[0].number(1, "<q", 0) if groups else 0,
        lr=groups[0].number(2, "<f", 0.0) if groups else None,
        properties={} if bag is None else _properties(bag),
        nominal=nominal,
    )


def _properties(bag: _Table) -> dict[str, int | float | str]:
    properties: dict[str, int | float | str] = {}
    kinds: list[tuple[int, Callable[[_Table], int | float | str]]] = [
        (0, lambda t: t.number(1, "<q", 0)),
        (1, lambda t: t.number(1, "<f", 0.0)),
        (2, lambda t: t.text(1)),
    ]
    for field, read in kinds:
        properties.update({entry.text(0): read(entry) for entry in bag.tables(field)})
    return properties


def _tensors(
    owner: _Table, field: int, external: bytes | None, nominal: bool = False
) -> dict[str, np.ndarray]:
    arrays = {}
    for table in owner.tables(field):
        name = table.text(0)
        if nominal:
            arrays[name] = np.empty(0, np.float32)
            continue
        dims = [int(d) for d in table.vector(2, np.dtype("<i8"))]
        kind = table.number(3, "<i", 0)
        if kind not in _DTYPES:
            raise table.damaged(f"tensor {name!r} has the element type {kind}")
        dtype = np.dtype(_DTYPES[kind])
        if any(d < 0 for d in dims):
            raise table.damaged(f"tensor {name!r} has shape {dims}")
        problem = array_shape_problem(dims, dtype.itemsize)
        if problem:
            raise table.damaged(f"tensor {name!r}: {problem}")
        count = int(np.prod(dims, dtype=object)) if dims else 1
        raw = table.vector(4, np.dtype(np.uint8)).data
        at = table.number(6, "<q", -1)
        if not len(raw) and at >= 0 and external is not None:
            raw = memoryview(external)[at : at + count * dtype.itemsize]
        if len(raw) != count * dtype.itemsize:
            raise table.damaged(f"tensor {name!r} of shape {dims} has {len(raw)} bytes")
        arrays[name] = np.frombuffer(raw, dtype).reshape(dims)
    return arrays


class _Reader:
    """Bytes with bounds checks on every access."""

    def __init__(self, data: bytes, label: str) -> None:
        self.data, self.label = data, label

    def root(self) -> _Table:
        return _Table(self, self.number("<I", 0))

    def number(self, form: str, at: int) -> Any:
        self.check(at, struct.calcsize(form))
        return struct.unpack_from(form, self.data, at)[0]

    def check(self, at: int, size: int) -> None:
        if at < 0 or size < 0 or at + size > len(self.data):
            raise self.damaged(f"{size} bytes at {at} of {len(self.data)}")

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.label}: truncated or damaged: {what}")


class _Table:
    def __init__(self, reader: _Reader, at: int) -> None:
        self._reader, self._at = reader, at
        self._vtable = at - reader.number("<i", at)
        self._size = reader.number("<H", self._vtable)

    def _place(self, field: int) -> int | None:
        entry = 4 + 2 * field
        if entry + 2 > self._size:
            return None  # written before this field existed
        offset = self._reader.number("<H", self._vtable + entry)
        return self._at + offset if offset else None

    def number(self, field: int, form: str, default: Any) -> Any:
        at = self._place(field)
        return default if at is None else self._reader.number(form, at)

    def _target(self, field: int) -> int | None:
        at = self._place(field)
        return None if at is None else at + self._reader.number("<I", at)

    def table(self, field: int) -> _Table | None:
        at = self._target(field)
        return None if at is None else _Table(self._reader, at)

    def vector(self, field: int, dtype: np.dtype[Any]) -> np.ndarray:
        at = self._target(field)
        if at is None:
            return np.empty(0, dtype)
        count = self._reader.number("<I", at)
        self._reader.check(at + 4, count * dtype.itemsize)
        return np.frombuffer(self._reader.data, dtype, count, at + 4)

    def tables(self, field: int) -> list[_Table]:
        at = self._target(field)
        distances = self.vector(field, np.dtype("<u4"))
        return [
            _Table(self._reader, (at or 0) + 4 + 4 * i + int(d)) for i, d in enumerate(distances)
        ]

    def text(self, field: int) -> str:
        raw = self.vector(field, np.dtype(np.uint8))
        if len(raw) > _MAX_NAME_BYTES:
            raise self.damaged(f"a name of {len(raw)} bytes")
        try:
            return raw.tobytes().decode()
        except UnicodeDecodeError as error:
            raise self.damaged(f"a name is not UTF-8: {error}") from error

    def damaged(self, what: str) -> CheckpointError:
        return self._reader.damaged(what)


def _read(path: str | os.PathLike[str], label: str) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise CheckpointError(f"{label}: cannot be read: {error.strerror}") from error
