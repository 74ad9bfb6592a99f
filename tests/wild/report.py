"""The results as a page: docs/wild.md, a row for each file."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import onnxruntime

import onnxtrain
from tests.wild.judge import Row
from tests.wild.places import FILES, MISSING, ROOT
from tests.wild.stamps import stamp

LONGEST = 180
"""Letters of a reason on the page."""
PAGE = ROOT / "docs" / "wild.md"
HEAD = """# Third-party models

`make wild` generates or downloads these files and checks each: the gradient of the mean square of
an output against central differences of the same loss on the original file in stock onnxruntime;
ten steps of AdamW; and the exported model against the trainer's predictions. Weights are random
where the producer has none. `python -m tests.wild --write` writes this page. A stopped run resumes:
it skips files that the same code has already checked.

How gradients are checked: along the gradient of all weights together and of each tensor separately
(the column "alone" gives the number of tensors: as many as twelve seconds of CPU time allow, at
least about four, and none whose gradient is zero), with nine step sizes. Adjacent estimates are
extrapolated; those that change least from one step to the next count, not those nearest to the
gradient. The error is relative to the norm of the tensor's gradient, or to a hundredth of the
largest. It must be below 1e-3 for decoders and encoders in float32 and int4 (mobius, genai), below
1e-2 for nets with kinks and those of packages, below 5e-2 in float16, where differences round. What
exceeds the limit is checked again: in float64 by ONNX's reference implementation, fused operators
written out in standard ones, if that computes what the runtime does, with the weights of the file
and with others; else by fits through 96 steps. Where an output ends in a sigmoid or a softmax the
loss is taken before it: near 0 and 1 float32 cannot resolve the derivative. Files with 4-bit
weights get float adapters of rank 2 beside every quantized matmul (`y = x W + x A B`), and the
gradients of all of them are checked as well (column "adapters").

A file that rounds its activations is refused, and the message names `straight_through=True`; one
whose weights are integers alone is refused, and the message names `onnxtrain.lora` besides. Such
files are then built as the hint says: their steps and their exports are checked, their gradients
are not, since the derivative of a stepwise loss is zero ("refused; trains by its hint"). Linear
models of scikit-learn keep their weights in attributes, which no session takes as inputs: their
rows have no error, and `tests/wild/test_hidden_weights.py` checks them.
"""

ALL = " All rows are of the same code, and of the files of the same run."
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


def missing(folder: Path = FILES) -> list[tuple[str, str]]:
    """Return what could not be made: the producer, and the name with the reason."""
    return [
        (str(path.parent.relative_to(folder)), line)
        for path in sorted(folder.rglob(MISSING))
        for line in path.read_text().splitlines()
    ]


def write(path: Path, paths: Mapping[str, Path], page: Path = PAGE, folder: Path = FILES) -> None:
    """Write the page: a row for each file that is there, by ``producer/name``."""
    rows = [r for r in read(path) if r.file in paths]
    counts = collections.Counter(r.verdict for r in rows)
    lines = [HEAD, _when(rows, paths), "| verdict | files |", "|---|---|"]
    lines += [f"| {verdict} | {count} |" for verdict, count in counts.most_common()]
    by_producer: dict[str, list[Row]] = {}
    for row in rows:
        by_producer.setdefault(row.file.split("/")[0], []).append(row)
    for producer, own in by_producer.items():
        lines += ["", f"## {producer}", ""]
        lines += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        lines += [_line(row) for row in own]
    lines += _left_out(missing(folder))
    page.write_text("\n".join(lines) + "\n")


def _when(rows: Sequence[Row], paths: Mapping[str, Path]) -> str:
    """Return when the rows were made, and which of them by other code than the present."""
    days = sorted({r.day for r in rows if r.day})
    span = " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "an unknown day"
    names = {"onnxtrain": onnxtrain, "onnx": onnx, "onnxruntime": onnxruntime}
    versions = ", ".join(f"{name} {module.__version__}" for name, module in names.items())
    said = f"{len(rows)} files, judged on {span} by `make wild` with {versions}."
    older = [r.file for r in rows if r.stamp != stamp(paths[r.file], r)]
    unjudged = sorted(set(paths) - {r.file for r in rows})
    said += f" {len(older)} rows are of earlier code: {', '.join(older)}." if older else ALL
    if unjudged:
        said += f" {len(unjudged)} files are not judged yet: {', '.join(unjudged)}."
    return textwrap.fill(said, 100, break_long_words=False, break_on_hyphens=False) + "\n"


def _left_out(parts: Sequence[tuple[str, str]]) -> list[str]:
    """Return the lines about what no row is of."""
    if not parts:
        return []
    lines = ["", "## Not made", "", "What a producer could not make, in its words, and files"]
    lines += ["of packages that are too large to be judged:", ""]
    lines += ["| producer | file | why |", "|---|---|---|"]
    for producer, line in parts:
        name, _, why = line.partition(": ")
        lines.append(f"| {producer} | {name} | {why.replace('|', '/')} |")
    return lines


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
