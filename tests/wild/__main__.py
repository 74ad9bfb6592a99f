"""Judge files that others made: ``python -m tests.wild [--only PATTERN] [--write]``.

Each file has a process of its own with a limit of time. Results are kept in ``.cache/wild``, or
where ``ONNXTRAIN_WILD`` says.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

from tests.wild.judge import Row, judge
from tests.wild.places import FILES, RESULTS
from tests.wild.report import merge, summary, write

LIMIT = 420
"""Seconds of the processor: a busy machine may take longer."""
LONGEST = 3600
"""Seconds of the clock."""


def files() -> dict[str, Path]:
    """Return all files by ``producer/name``."""
    paths = sorted([*FILES.rglob("*.onnx"), *FILES.rglob("*.ort.onnx")])
    return {str(p.relative_to(FILES)).removesuffix("/model.onnx"): p for p in paths}


def apart(label: str, path: Path) -> Row:
    """Return the row that a process of its own gives."""
    command = [sys.executable, "-m", "tests.wild", "--one", str(path), "--label", label]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, check=False)
    except subprocess.TimeoutExpired:
        return Row(label, "time limit", seconds=LONGEST)
    if done.returncode == -signal.SIGXCPU:
        return Row(label, "time limit", seconds=LIMIT)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return Row(label, "crash", message=f"exit status {done.returncode}: {last}")
    return Row(**json.loads(lines[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="files by glob: 'genai/*'")
    parser.add_argument("--write", action="store_true", help="rewrite docs/wild.md")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--label", help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where rows are kept")
    asked = parser.parse_args()
    if asked.one:
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, resource.RLIM_INFINITY))
        print(json.dumps(dataclasses.asdict(judge(asked.one, asked.label))))
        return
    rows = []
    for label, path in files().items():
        if fnmatch.fnmatch(label, asked.only):
            row = apart(label, path)
            rows.append(row)
            words = row.message.splitlines()[0][:150] if row.message else ""
            print(f"{row.verdict:28} {label:45} {row.seconds:6.1f} s  {words}", flush=True)
            merge([row], asked.results)
    print(summary(rows))
    if asked.write:
        write(asked.results)


if __name__ == "__main__":
    main()
