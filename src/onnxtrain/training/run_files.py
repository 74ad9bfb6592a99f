"""Files of a run: metrics as tables, TensorBoard events, a plot of the loss.

:class:`MetricsWriter` writes ``metrics.csv``, ``metrics.jsonl``, TensorBoard events and a plot of
the loss. :class:`EventFile` writes TensorBoard's format without TensorBoard: a file is a sequence
of records, each of length (8 bytes), checksum of the length, content, checksum of the content. The
content is an ``Event`` message: wall_time = 1 (double), step = 2, file_version = 3, summary = 5,
whose values (1) have a tag (1) and a simple_value (2, float).
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
import struct
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, Self

from onnxtrain.errors import SaveError
from onnxtrain.graph.io.protobuf import bytes_field, double_field, float_field, varint_field
from onnxtrain.graph.io.writer import as_save_error, bytes_writer, write_files


def _crc_table() -> list[int]:
    table = []
    for n in range(256):
        for _ in range(8):
            n = (n >> 1) ^ 0x82F63B78 if n & 1 else n >> 1
        table.append(n)
    return table


_CRC_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """Return the Castagnoli checksum.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


class EventFile:
    """Appends scalars to a TensorBoard event file."""

    def __init__(self, folder: Path, start: float | None = None) -> None:
        start = time.time() if start is None else start
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / f"events.out.tfevents.{start:.6f}.onnxtrain", "ab")  # noqa: SIM115
        self._write(double_field(1, start) + bytes_field(3, b"brain.Event:2"))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the scalars of one step."""
        summary = b"".join(
            bytes_field(1, bytes_field(1, tag.encode()) + float_field(2, value))
            for tag, value in values.items()
        )
        self._write(double_field(1, time.time()) + varint_field(2, step) + bytes_field(5, summary))

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked_crc(length) + event + _masked_crc(event))

    def flush(self) -> None:
        """Hand all records to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


Row = dict[str, Any]
_CSV, _JSONL, _CURVE, _EVENTS = "metrics.csv", "metrics.jsonl", "loss.png", "events"


class MetricsWriter:
    """Appends rows of metrics to files.

    Args:
        folder: folder of the files.
        columns: columns of the csv file; other values are in the jsonl file only.
        resume_at: keep rows of an earlier run up to this step; ``None`` starts new files.
        epochs: number of epochs completed at that step; later epoch rows are written again.
        tensorboard: write event files; by default if TensorBoard is installed.

    Raises:
        SaveError: if a file cannot be written, here or in any method.
    """

    def __init__(
        self,
        folder: Path,
        columns: Iterable[str],
        *,
        resume_at: int | None = None,
        epochs: int = 0,
        tensorboard: bool | None = None,
    ) -> None:
        with as_save_error(str(folder)):
            folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.columns = folder, list(columns)
        rows = [] if resume_at is None else self._earlier_rows(resume_at, epochs)
        self.rows: list[Row] = rows
        write_files(
            str(folder),
            {
                str(folder / _JSONL): bytes_writer("".join(map(_json_line, rows)).encode()),
                str(folder / _CSV): bytes_writer(self._csv(rows).encode()),
            },
        )
        if tensorboard is None:
            tensorboard = importlib.util.find_spec("tensorboard") is not None
        with as_save_error(str(folder)):
            self._jsonl = open(folder / _JSONL, "a", encoding="utf-8")  # noqa: SIM115
            self._table = open(folder / _CSV, "a", encoding="utf-8", newline="")  # noqa: SIM115
            self._events = EventFile(folder / _EVENTS) if tensorboard else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        # The error that ended the run matters more: on a full disk, closing fails as well.
        with suppress(SaveError):
            self.close()

    def _earlier_rows(self, step: int, epochs: int) -> list[Row]:
        path = self.folder / _JSONL
        if not path.exists():
            return []
        rows = []
        with as_save_error(str(path)):
            text = path.read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # a killed run can leave half a line
            if not isinstance(row, dict) or int(row.get("step", 0)) > step:
                continue
            if row.get("kind") != "epoch" or int(row.get("epoch", 0)) <= epochs:
                rows.append(row)
        return rows

    def _csv(self, rows: Iterable[Row]) -> str:
        out = io.StringIO()
        table = csv.writer(out, lineterminator="\n")
        table.writerow(self.columns)
        table.writerows([row.get(c, "") for c in self.columns] for row in rows)
        return out.getvalue()

    def add(self, row: Row) -> None:
        """Append a row."""
        self.rows.append(row)
        with as_save_error(str(self.folder / _JSONL)):
            self._jsonl.write(_json_line(row))
        with as_save_error(str(self.folder / _CSV)):
            csv.writer(self._table, lineterminator="\n").writerow(
                [row.get(c, "") for c in self.columns]
            )
        if self._events is not None:
            tags = {f"{row['kind']}/{n}": v for n, v in row.items() if isinstance(v, float)}
            with as_save_error(str(self.folder / _EVENTS)):
                self._events.scalars(int(row["step"]), tags)

    def flush(self) -> None:
        """Hand all rows to the operating system, which writes them even if this process dies."""
        for name, file in self._files():
            with as_save_error(str(self.folder / name)):
                file.flush()

    def close(self) -> None:
        """Close the files and plot the loss."""
        with ExitStack() as stack:  # closes all files, even if one raises
            for name, file in reversed(self._files()):
                stack.enter_context(as_save_error(str(self.folder / name)))
                stack.callback(file.close)
        plot_losses(self.rows, self.folder / _CURVE)

    def _files(self) -> list[tuple[str, IO[str] | EventFile]]:
        events = [] if self._events is None else [(_EVENTS, self._events)]
        return [(_JSONL, self._jsonl), (_CSV, self._table), *events]


def _json_line(row: Mapping[str, Any]) -> str:
    return json.dumps({n: _json_value(v) for n, v in row.items()}, sort_keys=True) + "\n"


def _json_value(value: Any) -> Any:
    """Return a JSON value; infinity and NaN become text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def plot_losses(rows: Iterable[Row], path: Path) -> bool:
    """Plot training and validation loss over steps; return ``False`` without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    # Not pyplot, whose figures are global state of the program.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = list(rows)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    lines = (("step", "loss", "training", 0.8), ("epoch", "val_loss", "validation", 1.6))
    for kind, column, label, width in lines:
        points = [(r["step"], r[column]) for r in rows if r["kind"] == kind and column in r]
        points = [(x, y) for x, y in points if isinstance(y, float) and y > 0]
        if points:
            axes.plot(*zip(*points, strict=True), linewidth=width, label=label)
            axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend()
    image = io.BytesIO()
    FigureCanvasAgg(figure).print_png(image)
    write_files(str(path), {str(path): bytes_writer(image.getvalue())})
    return True
