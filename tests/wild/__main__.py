"""Check third-party files: ``python -m tests.wild [--only PATTERN] [--again] [--write]``.

Each file runs in its own process with a time limit. Results are stored in ``.cache/wild``, or
where ``ONNXTRAIN_WILD`` says. Files already checked with the present code are skipped, so a stopped
run resumes; ``--again`` checks all files.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path

from tests.wild.apart import apart
from tests.wild.judge import Row
from tests.wild.places import FILES, RESULTS
from tests.wild.report import merge, missing, read, summary, write
from tests.wild.stamps import FAILED, stamp


def files() -> dict[str, Path]:
    """Return all files by ``producer/name``."""
    return {
        str(p.relative_to(FILES)).removesuffix("/model.onnx"): p
        for p in sorted(FILES.rglob("*.onnx"))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="files by glob: 'genai/*'")
    parser.add_argument("--again", action="store_true", help="also what the present code judged")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="files at a time")
    parser.add_argument("--write", action="store_true", help="rewrite docs/wild.md")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where rows are kept")
    asked = parser.parse_args()
    paths = files()
    known = [r for r in read(asked.results) if r.file in paths and r.verdict not in FAILED]
    rows = {r.file: r for r in known if r.stamp == stamp(paths[r.file], r)}
    chosen = [n for n in paths if fnmatch.fnmatch(n, asked.only)]
    due = [n for n in chosen if asked.again or n not in rows]
    print(f"{len(due)} files to judge, {len(chosen) - len(due)} judged before by this code")

    def judged(name: str) -> Row:
        row = apart(name, paths[name])
        row.stamp, row.day = stamp(paths[name], row), datetime.now(UTC).date().isoformat()
        return row

    with ThreadPoolExecutor(asked.jobs) as pool:
        for work in as_completed([pool.submit(judged, n) for n in due]):
            row = work.result()
            rows[row.file] = row
            merge([row], asked.results)
            words = row.message.splitlines()[0][:150] if row.message else ""
            print(f"{row.verdict:28} {row.file:45} {row.seconds:6.1f} s  {words}", flush=True)
    print(summary([rows[n] for n in chosen]))
    for producer, why in missing():
        print(f"not made: {producer}: {why}")
    if asked.write:
        write(asked.results, paths)


if __name__ == "__main__":
    main()
