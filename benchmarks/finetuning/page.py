"""The tables of docs/benchmarks-finetune.md, from the stored runs, one per device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks-finetune.md"
RESULTS = ROOT / "benchmarks" / "results" / "finetune.json"
DEVICES = ("cpu", "cuda")
HEADS = (
    "| model | threads | engine | ms/step | time, ratio | tokens/s | peak MB | memory, ratio |",
    "|---|---|---|---|---|---|---|---|",
)


def line(row: dict[str, Any]) -> str:
    """Return a line of the table."""
    return (
        f"| {row['model']} | {row['threads']} | {row['engine']} | {row['ms']:.0f} "
        f"| {row['ratio']:.2f} | {row['tokens']:.0f} | {row['peak_mb']:.0f} | {row['memory']:.2f} |"
    )


def table(run: dict[str, Any]) -> str:
    """Return a run as Markdown, with its command and its place."""
    head = f"`{run['command']}`, {run['where']}:"
    return "\n".join([head, "", *HEADS, *map(line, run["rows"])])


def rendered(page: str, runs: dict[str, Any]) -> str:
    """Return the page with the tables of the stored runs."""
    for device in DEVICES:
        start, end = f"<!-- {device} -->", f"<!-- end of {device} -->"
        before, _, rest = page.partition(start)
        after = rest.partition(end)[2]
        page = f"{before}{start}\n\n{table(runs[device])}\n\n{end}{after}"
    return page


def write(device: str, run: dict[str, Any]) -> None:
    """Store a run and write the page."""
    runs = {**json.loads(RESULTS.read_text()), device: run}
    RESULTS.write_text(json.dumps(runs, separators=(",", ":")) + "\n")
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8"), runs), encoding="utf-8")
