"""The results as a page: docs/wild.md, a row for each file."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

from tests.wild.judge import Row
from tests.wild.places import ROOT

LONGEST = 180
"""Letters of a reason on the page."""
PAGE = ROOT / "docs" / "wild.md"
HEAD = """# Files that others made

`make wild` makes or downloads these files and judges each: the gradient of the mean square of an
output against central differences of the same loss on the original file in stock onnxruntime; ten
steps of AdamW; and what is exported against what the trainer predicts. Weights are random where a
producer has no others. The page is written by `python -m tests.wild --write`.

How gradients are judged: along the gradient of all weights together and of each tensor by itself
(the column "alone" says how many; fewer than all where a run takes long), with nine sizes of steps.
Neighbours are extrapolated, and of all estimates those that change least from one step to the next
count, not those nearest to the gradient. The error is relative to the tensor's own slope, or to a
hundredth of the steepest. It has to be below 1e-3 for decoders and encoders in float32 and int4
(mobius, genai), below 1e-2 for nets with kinks and those of packages, below 5e-2 in float16, where
differences round. What is over the limit is looked at again: in float64 by ONNX's reference
implementation, fused operators written out in standard ones, if that computes what the runtime
does, with the weights of the file and with others; else by fits through 96 steps. Where an output
ends in a sigmoid or a softmax the loss is taken before it: numbers near 0 and 1 have no slope that
float32 shows. Files with 4-bit weights get float adapters of rank 2 beside every quantised product
(`y = x W + x A B`), and the gradients of all of them are judged as well (column "adapters").

A file that rounds its activations is refused, and the message names `straight_through=True`; one
whose weights are integers alone is refused, and the message names `onnxtrain.lora` besides. Such
files are then built as they advise: their steps and their exports are judged, their gradients are
not, for a loss with steps has no slope ("refused; trains by its hint").
"""


EARLIER = """Rows with an error but without "alone" are of an earlier run, judged by the nearest of
six steps.
"""
COLUMNS = ("file", "parameters", "elements", "alone", "gradient error", "adapters", "loss")
COLUMNS += ("export", "verdict")


def merge(rows: Sequence[Row], path: Path) -> None:
    """Keep the latest row of each file."""
    known = {r.file: r for r in read(path)}
    known.update({r.file: r for r in rows})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([dataclasses.asdict(known[n]) for n in sorted(known)], indent=1))


def read(path: Path) -> list[Row]:
    """Return all rows."""
    return [Row(**r) for r in json.loads(path.read_text())] if path.exists() else []


def summary(rows: Sequence[Row]) -> str:
    """Return how many files have which verdict."""
    counts = collections.Counter(r.verdict for r in rows)
    lines = [f"{count:5} {verdict}" for verdict, count in counts.most_common()]
    return "\n".join([*lines, f"{len(rows):5} files"])


def write(path: Path) -> None:
    """Write the page."""
    rows = read(path)
    counts = collections.Counter(r.verdict for r in rows)
    earlier = [r for r in rows if r.gradient is not None and not r.checked]
    lines = [HEAD, *([EARLIER] if earlier else []), "| verdict | files |", "|---|---|"]
    lines += [f"| {verdict} | {count} |" for verdict, count in counts.most_common()]
    by_producer: dict[str, list[Row]] = {}
    for row in rows:
        by_producer.setdefault(row.file.split("/")[0], []).append(row)
    for producer, own in by_producer.items():
        lines += ["", f"## {producer}", ""]
        lines += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        lines += [_line(row) for row in own]
    PAGE.write_text("\n".join(lines) + "\n")


def _line(row: Row) -> str:
    name = row.file.split("/", 1)[-1]
    said = reason(row.message).replace("|", "/")
    loss = "" if row.first is None else f"{row.first:.3g} -> {row.last:.3g}"
    verdict = f"{row.verdict}: {said}" if said else row.verdict
    error = " ".join(filter(None, (_number(row.gradient), row.closer and f"({row.closer})")))
    cells = [name, row.parameters, row.elements, row.checked or "", error, _number(row.adapters)]
    return "| " + " | ".join(map(str, [*cells, loss, _number(row.export), verdict])) + " |"


def reason(message: str) -> str:
    """Return what a refusal comes to: its first line, the first reason below it, and no hint.

    The runtime's messages say it at their end.
    """
    lines = [x.strip() for x in message.splitlines() if not x.startswith("hint:")]
    if not lines:
        return ""
    first = lines[0].rpartition(" , Error ")[2]
    why = re.sub(r"\(.*\):", ":", lines[1]) if len(lines) > 1 else ""
    said = f"{first.removesuffix(':')}: {why}" if why else first
    return said if len(said) <= LONGEST else said[: LONGEST - 4] + " ..."


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"
