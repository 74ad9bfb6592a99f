"""How step time grows with batch, depth and parameters, beside torch's.

    python -m benchmarks.growth            # prints the table
    python -m benchmarks.growth --write    # docs/benchmarks.md and docs/images/growth_*.png

AdamW, two engines in turns, losses compared as in the large table. Ends when the budget is spent:
points that were not reached are named.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from itertools import zip_longest
from pathlib import Path

from benchmarks import machine, page, quiet, report, verdicts
from benchmarks.measure import Builder, Cell, measure
from benchmarks.peers import OURS, PEERS, REFERENCE, ROOT
from benchmarks.prepare import prepared
from benchmarks.workloads import find, growth

IMAGES = ROOT / "docs" / "images"
OUT = ROOT / "runs" / "bench" / "growth.json"
SECONDS = 4.0  # of timing per point


def run(threads: int, budget: float, others: list[float]) -> tuple[list[Cell], list[str]]:
    """Return the points that were measured, and the names of those that were not.

    Samples of other work on the machine are added to ``others``.
    """
    builder, order = Builder(), random.Random(0)
    cells: list[Cell] = []
    end = time.monotonic() + budget
    # The curves grow together, so that each has points when the budget is spent.
    names = [n for group in zip_longest(*growth.curves()) for n in group if n]
    for i, name in enumerate(names):
        if time.monotonic() > end:
            return cells, names[i:]
        workload = find(name)
        prepared(workload)
        cell = measure(
            workload,
            "adamw",
            threads,
            [OURS, REFERENCE],
            builder,
            seconds=SECONDS,
            limits={},
            order=order,
        )
        cells.append(cell)
        others.append(quiet.others())
        print(report.line(cell, "wall"), flush=True)
    return cells, []


def curve(cells: list[Cell], axis: str, engine: str) -> tuple[list[int], list[verdicts.Spread]]:
    """Return the sizes along an axis and an engine's milliseconds there."""
    points = sorted(
        (int(c.workload.partition("-")[2]), c.engines[engine])
        for c in cells
        if c.workload.startswith(f"{axis}-") and c.engines[engine].status == "timed"
    )
    return [n for n, _ in points], [
        verdicts.Spread.of([1000 * t for t in e.wall]) for _, e in points
    ]


def axes_of(cells: list[Cell]) -> list[str]:
    """Return the axes along which both engines have times."""
    return [
        a
        for a in ("batch", "depth", "parameters")
        if all(curve(cells, a, e.name)[0] for e in (OURS, REFERENCE))
    ]


def draw(cells: list[Cell], threads: int) -> None:
    """Write one plot per axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {
        "batch": "CNN, step time against batch",
        "depth": "decoder of width 128, against layers",
        "parameters": "MLP of two hidden layers, against parameters",
    }
    IMAGES.mkdir(parents=True, exist_ok=True)
    for axis in axes_of(cells):
        title = titles[axis]
        figure, axes = pyplot.subplots(figsize=(5.2, 3.6))
        for engine in (OURS.name, REFERENCE.name):
            sizes, times = curve(cells, axis, engine)
            axes.plot(sizes, [t.median for t in times], "o-", ms=4, label=PEERS[engine].title)
            low, high = [t.low for t in times], [t.high for t in times]
            axes.fill_between(sizes, low, high, alpha=0.2)
        axes.set(xlabel=axis, ylabel="ms per step", title=f"{title}, AdamW, threads: {threads}")
        axes.title.set_fontsize(9)
        if axis != "depth":
            axes.set_xscale("log")
            axes.set_yscale("log")
        axes.grid(True, alpha=0.3)
        axes.legend()
        figure.tight_layout()
        figure.savefig(IMAGES / f"growth_{axis}.png", dpi=110)
        pyplot.close(figure)


def text(cells: list[Cell], skipped: list[str], facts: dict, threads: int) -> str:
    """Return the section in Markdown."""
    rows = []
    for cell in cells:
        ratio = report.ratio(cell, REFERENCE.name, "wall")
        said = f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})" if ratio else ""
        shown = [report.milliseconds(cell.engines[n], "wall") for n in cell.engines]
        rows.append([find(cell.workload).title, *shown, said])
    head = ["net", *(f"{PEERS[n].title}, ms" for n in (OURS.name, REFERENCE.name)), "ratio"]
    plots = " ".join(f"![step time against {a}](images/growth_{a}.png)" for a in axes_of(cells))
    parts = [
        (
            f"{facts['date']}, commit {facts['commit']}: `python -m benchmarks.growth --write "
            f"--threads {threads}`, {facts['cores']} cores of {facts['cpu']}:"
        ),
        *page.busy(facts),
        plots,
        report.markdown(head, rows, left=1),
    ]
    if skipped:
        parts.append(f"Not reached within the budget: {', '.join(skipped)}.")
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budget", type=float, default=330.0, help="seconds")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    facts = machine.facts()
    facts["others"] = quiet.begin(strict=options.write)
    cells, skipped = run(options.threads, options.budget, facts["others"])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    kept = {
        "machine": facts,
        "threads": options.threads,
        "cells": [c.to_json() for c in cells],
        "skipped": skipped,
    }
    options.out.write_text(json.dumps(kept, indent=1))
    made = text(cells, skipped, facts, options.threads)
    print(made)
    if options.write:
        quiet.refuse_busy(facts)
        draw(cells, options.threads)
        page.write(made, "growth")
        page.keep(kept, "growth")


if __name__ == "__main__":
    main()
