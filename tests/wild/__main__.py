"""Judge files that others made: ``python -m tests.wild [--only PATTERN] [--write]``.

Each file has a process of its own with a limit of time. Results are kept in ``.cache/wild``, or
where ``ONNXTRAIN_WILD`` says.
"""

from __future__ import annotations

import argparse
import fnmatch
from pathlib import Path

from tests.wild.apart import apart
from tests.wild.places import FILES, RESULTS
from tests.wild.report import merge, summary, write


def files() -> dict[str, Path]:
    """Return all files by ``producer/name``."""
    paths = sorted([*FILES.rglob("*.onnx"), *FILES.rglob("*.ort.onnx")])
    return {str(p.relative_to(FILES)).removesuffix("/model.onnx"): p for p in paths}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="files by glob: 'genai/*'")
    parser.add_argument("--write", action="store_true", help="rewrite docs/wild.md")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where rows are kept")
    asked = parser.parse_args()
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
