"""The numbers of a run as files: metrics.csv, metrics.jsonl, TensorBoard events, a curve."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, Self

from onnxtrain.errors import SaveError
from onnxtrain.graph.io.atomic import content, named_refusal, write_files
from onnxtrain.training.reports.tensorboard import EventFile

Row = dict[str, Any]
_CSV, _JSONL, _CURVE, _EVENTS = "metrics.csv", "metrics.jsonl", "loss.png", "events"


class Records:
    """Rows of numbers, appended to files as they come.

    Args:
        folder: where the files go.
        columns: of the csv file; the others are in the jsonl file only.
        resume_at: keep the rows up to this step that an earlier run has left; ``None`` keeps none.
        epochs: how many are over at that step; the row of the next one would be written again.
        tensorboard: write event files; ``None`` does if TensorBoard is installed.

    Raises:
        SaveError: the file system refuses, here or in any method.
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
        with named_refusal(str(folder)):
            folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.columns = folder, list(columns)
        kept = [] if resume_at is None else self._kept(resume_at, epochs)
        self.rows: list[Row] = kept
        write_files(
            str(folder),
            {
                str(folder / _JSONL): content("".join(map(_line, kept)).encode()),
                str(folder / _CSV): content(self._csv(kept).encode()),
            },
        )
        if tensorboard is None:
            tensorboard = importlib.util.find_spec("tensorboard") is not None
        with named_refusal(str(folder)):
            self._jsonl = open(folder / _JSONL, "a", encoding="utf-8")  # noqa: SIM115
            self._table = open(folder / _CSV, "a", encoding="utf-8", newline="")  # noqa: SIM115
            self._events = EventFile(folder / _EVENTS) if tensorboard else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        # What ended the run counts: a full disk is also the end of the curve.
        with suppress(SaveError):
            self.close()

    def _kept(self, step: int, epochs: int) -> list[Row]:
        path = self.folder / _JSONL
        if not path.exists():
            return []
        rows = []
        with named_refusal(str(path)):
            text = path.read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # a killed run may leave half a line
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
        with named_refusal(str(self.folder / _JSONL)):
            self._jsonl.write(_line(row))
        with named_refusal(str(self.folder / _CSV)):
            csv.writer(self._table, lineterminator="\n").writerow(
                [row.get(c, "") for c in self.columns]
            )
        if self._events is not None:
            tags = {f"{row['kind']}/{n}": v for n, v in row.items() if isinstance(v, float)}
            with named_refusal(str(self.folder / _EVENTS)):
                self._events.scalars(int(row["step"]), tags)

    def flush(self) -> None:
        """Hand everything to the operating system, which outlives this process."""
        for name, file in self._files():
            with named_refusal(str(self.folder / name)):
                file.flush()

    def close(self) -> None:
        """Close the files and draw the curve."""
        with ExitStack() as stack:  # closes all, whatever one of them says
            for name, file in reversed(self._files()):
                stack.enter_context(named_refusal(str(self.folder / name)))
                stack.callback(file.close)
        draw_losses(self.rows, self.folder / _CURVE)

    def _files(self) -> list[tuple[str, IO[str] | EventFile]]:
        events = [] if self._events is None else [(_EVENTS, self._events)]
        return [(_JSONL, self._jsonl), (_CSV, self._table), *events]


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps({n: _plain(v) for n, v in row.items()}, sort_keys=True) + "\n"


def _plain(value: Any) -> Any:
    """Return a value that JSON has; it knows no NaN."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def draw_losses(rows: Iterable[Row], path: Path) -> bool:
    """Draw the loss of training and validation over the steps; ``False`` without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    # Not through pyplot: that keeps figures of the whole program.
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
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    write_files(str(path), {str(path): content(picture.getvalue())})
    return True
