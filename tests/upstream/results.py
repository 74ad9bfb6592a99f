"""Outcomes of programs and tests of other projects: stored as JSON, shown as tables."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Outcome = Literal["pass", "fail", "skip"]
FOLDER = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Result:
    """One program or test of another project, and how it ended."""

    project: str
    program: str
    outcome: Outcome
    reason: str = ""
    how: str = ""
    """Which part of the project was run, and what was changed: "tests, imports changed"."""
    outside: bool = False
    """Whether the cause of a failure is known and is not in this project."""
    count: int = 1
    """Parameter sets of a test that ended so."""


@dataclass(frozen=True)
class Run:
    """All results of one project, and the commit they are of."""

    project: str
    commit: str
    results: tuple[Result, ...]

    def store(self, folder: Path = FOLDER) -> None:
        """Write ``<project>.json``."""
        rows = [_row(r) for r in sorted(self.results, key=lambda r: (r.how, r.program))]
        text = json.dumps({"commit": self.commit, "results": rows}, indent=1)
        folder.mkdir(exist_ok=True)
        (folder / f"{self.project}.json").write_text(f"{text}\n")


def stored(folder: Path = FOLDER) -> list[Run]:
    """Return the stored runs, by name of the project."""
    runs = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        results = tuple(Result(project=path.stem, **row) for row in content["results"])
        runs.append(Run(path.stem, content["commit"], results))
    return runs


def explain(results: Iterable[Result], causes: Mapping[str, str]) -> list[Result]:
    """Mark failures and skips whose cause is outside this project.

    Args:
        results: of one way to run a project.
        causes: cause by program; a program may be a glob pattern.
    """
    explained = []
    for result in results:
        cause = next((c for p, c in causes.items() if fnmatch.fnmatch(result.program, p)), None)
        if result.outcome != "pass" and cause is not None:
            result = dataclasses.replace(result, reason=cause, outside=True)
        explained.append(result)
    return explained


def merged(results: Iterable[Result]) -> list[Result]:
    """Return one result for all parameter sets of a test that ended in the same way."""
    counts: dict[Result, int] = {}
    for result in results:
        key = dataclasses.replace(result, program=result.program.partition("[")[0], count=1)
        counts[key] = counts.get(key, 0) + result.count
    return [dataclasses.replace(result, count=n) for result, n in counts.items()]


def summary(results: Iterable[Result]) -> str:
    """Return a table of counts: one row for each way to run a project."""
    rows: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        rows.setdefault((result.project, result.how), []).append(result)
    lines = ["| project | what runs | pass | fail | skip |", "|---|---|---:|---:|---:|"]
    for (project, how), some in rows.items():
        counts = [
            sum(r.count for r in some if r.outcome == kind) for kind in ("pass", "fail", "skip")
        ]
        lines.append(f"| {project} | {how} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def not_passed(results: Iterable[Result]) -> str:
    """Return a table of everything that did not pass, with the reason."""
    lines = ["| what runs | program | outcome | reason |", "|---|---|---|---|"]
    lines += [
        f"| {r.how} | `{r.program}`{_sets(r)} | {r.outcome} | {_cell(r.reason)} |"
        for r in results
        if r.outcome != "pass"
    ]
    return "\n".join(lines) if len(lines) > 2 else ""


def _sets(result: Result) -> str:
    return f", {result.count} parameter sets" if result.count > 1 else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _row(result: Result) -> dict[str, str | bool | int]:
    defaults = {f.name: f.default for f in dataclasses.fields(result)}
    row = dataclasses.asdict(result)
    del row["project"]
    return {name: value for name, value in row.items() if value != defaults[name]}
