"""The generated part of docs/benchmarks.md: between markers, so that the surrounding text stays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import op_profile, quiet, report
from benchmarks.measure import Cell
from benchmarks.peers import PEERS, ROOT

PAGE = ROOT / "docs" / "benchmarks.md"
TOP = 6  # operators of a missed row
RESULTS = ROOT / "benchmarks" / "results"
"""The runs that pages show."""


def markers(name: str) -> tuple[str, str]:
    """Return the lines that enclose a generated part."""
    return f"<!-- {name} -->", f"<!-- /{name} -->"


def write(text: str, name: str = "benchmark", path: Path = PAGE) -> None:
    """Put text between the markers of a page.

    Raises:
        ValueError: if the page has no such markers.
    """
    begin, end = markers(name)
    page = path.read_text()
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"{path.name} needs {begin} and {end} once each")
    head, _, rest = page.partition(begin)
    path.write_text(f"{head}{begin}\n{text}\n{end}{rest.partition(end)[2]}")


def keep(results: dict[str, Any], name: str) -> None:
    """Store what a page shows, beside the code that shows it."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(results, separators=(",", ":")) + "\n")


def generated(results: dict[str, Any]) -> str:
    """Return the page's tables for the results of a run."""
    cells = [Cell.from_json(c) for c in results["cells"]]
    clock = results["clock"]
    parts = [_facts(results["machine"], cells, clock), _counts(cells, clock)]
    for threads in sorted({c.threads for c in cells}):
        some = [c for c in cells if c.threads == threads]
        plural = "thread" if threads == 1 else "threads"
        parts += [f"### {threads} {plural}", report.ratio_table(some, clock)]
        what = "CPU ms" if clock == "cpu" else "ms"
        parts.append(f"The same as {what} per step of each engine:")
        parts.append(
            report.per_engine(some, lambda t: report.milliseconds(t, clock), threads=False)
        )
    first = [c for c in cells if c.threads == cells[0].threads]
    parts += [
        "### Memory",
        (
            "The most that the training process had, in MB, above what it had after imports and a "
            f"first trivial use; threads: {cells[0].threads}."
        ),
        report.memory_table(first),
        "### Getting ready",
        (
            "Seconds, engines two at a time: building files (where an engine has such a step) + "
            "making sessions + the first six steps, in which torch.compile and onnxsim compile."
        ),
        report.per_engine(first, report.cost, threads=False),
        "### Refused, wrong or left out",
        report.refusals(cells),
    ]
    parts += _profiles(results.get("profiles", []))
    return "\n\n".join(parts)


def _facts(machine: dict[str, Any], cells: list[Cell], clock: str) -> str:
    versions: dict[str, dict[str, str]] = {}
    for cell in cells:
        for name, timing in cell.engines.items():
            if timing.facts:
                versions.setdefault(name, timing.facts["versions"])
    lines = [
        f"{machine['date']}, commit {machine['commit']}: `{machine['command']}`"
        + (f", {machine['seconds']} s" if "seconds" in machine else ""),
        "",
        (
            f"- {machine['cores']} cores of {machine['cpu']}, {machine['memory_gb']} GB, "
            f"{machine['system']}"
        ),
        f"- load average before {_numbers(machine['load_before'])}"
        + (f", after {_numbers(machine['load_after'])}" if "load_after" in machine else ""),
        *busy(machine),
        "- times are " + ("processor time" if clock == "cpu" else "wall-clock time"),
    ]
    for name, packages in versions.items():
        said = ", ".join(f"{k} {v}" for k, v in packages.items())
        lines.append(f"- {PEERS[name].title}: {said}")
    return "\n".join(lines)


def busy(machine: dict[str, Any]) -> list[str]:
    """Return the load of other processes, with a warning if it was too high."""
    if not quiet.busy(machine):
        return [f"- {quiet.summary(machine)}"]
    return [f"- **{quiet.summary(machine)}: do not quote these ratios**"]


def _numbers(values: list[float]) -> str:
    return ", ".join(f"{v:.2f}" for v in values)


def _counts(cells: list[Cell], clock: str) -> str:
    summary = report.summary(cells, clock)
    total = summary["met"] + len(summary["missed"])
    text = f"{summary['met']} of {total} targets with a time on both sides are met"
    return text + (f"; missed: {', '.join(summary['missed'])}." if summary["missed"] else ".")


def _profiles(profiles: list[dict[str, Any]]) -> list[str]:
    if not profiles:
        return []
    parts = ["### Where missed rows spend their time"]
    parts.append("The dearest operators of our step, by onnxruntime's profiler (`op_profile`):")
    rows = []
    for p in profiles:
        top = p["rows"][:TOP]
        said = ", ".join(f"{r['op']} {r['ms']:.2f} ms ({100 * r['part']:.0f}%)" for r in top)
        rows.append([p["workload"], p["optimizer"], str(p["threads"]), said])
    head = ["workload", "optimizer", "threads", "operators"]
    return [*parts, report.markdown(head, rows, left=4)]


def profile_missed(results: dict[str, Any]) -> None:
    """Add profiles of the rows that miss a target, each made in a process of its own."""
    cells = [Cell.from_json(c) for c in results["cells"]]
    results["profiles"] = []
    for cell in cells:
        if not report.missed(cell, results["clock"]):
            continue
        asked = [cell.workload, "--optimizer", cell.optimizer, "--threads", str(cell.threads)]
        command = [sys.executable, "-m", op_profile.__name__, *asked, "--json", "--steps", "5"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        results["profiles"].append(
            {
                "workload": cell.workload,
                "optimizer": cell.optimizer,
                "threads": cell.threads,
                "rows": json.loads(done.stdout.splitlines()[-1]),
            }
        )
