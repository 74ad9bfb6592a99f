"""Run programs of other projects: ``python -m tests.upstream <folder> [--only NAME]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.upstream.projects import PROJECTS, write_page
from tests.upstream.results import not_passed, stored, summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="checkouts by name of the project")
    parser.add_argument("--only", help="one project")
    asked = parser.parse_args()
    names = [p.name for p in PROJECTS]
    if not asked.folder or (asked.only and asked.only not in names):
        print(f"usage: make upstream UPSTREAM=<folder> [ONLY=<one of {', '.join(names)}>]")
        return 2
    chosen = [p for p in PROJECTS if asked.only in (None, "", p.name)]
    there = [p for p in chosen if (Path(asked.folder) / p.name).is_dir()]
    if not there:
        wanted = "\n".join(f"  {asked.folder}/{p.name}: {p.repository}" for p in chosen)
        print(f"no checkout found; expected any of\n{wanted}")
        return 2
    failed = False
    for project in there:
        run = project.run(Path(asked.folder).resolve() / project.name)
        run.store()
        print(f"{summary(run.results)}\n\n{not_passed(run.results)}\n", flush=True)
        failed |= any(r.outcome == "fail" and not r.outside for r in run.results)
    for project in chosen:
        if project not in there:
            print(f"not run: {project.name}: no checkout in {asked.folder}")
    write_page(stored())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
