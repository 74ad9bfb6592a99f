"""A stranger's path: install the packages, paste what the first pages show, and see it work.

The lines are taken from the pages as they stand and run in empty folders with a fresh environment.
Only the names of the packages in the lines that install them are replaced, by the files that would
be published. Other steps of the release check have installed the same before, so that the time is
that of someone with a warm cache of packages. ``python -m tools.stranger .cache/release`` walks it
again with the files of the last release check.
"""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tests.docs.blocks import blocks

from tools.processes import empty, environment, run

PAGES = {
    "README.md": ["sh: pip", "python"],
    "docs/quickstart.md": ["python", "sh", "sh: npm", "js"],
    "web/packages/onnxtrain/README.md": ["sh: npm", "js"],
}
"""Which kinds of programs are pasted of each page, in the order of the page."""
LIMIT = 180.0
"""Seconds that all of it may take."""
_PIP = re.compile(r'pip install "?onnxtrain(\[\w+\])"?')
_NPM = re.compile(r"npm install onnxtrain\b")


@dataclass(frozen=True)
class Program:
    """Blocks of one kind that follow each other on a page."""

    kind: str
    code: str


def programs(page: Path) -> list[Program]:
    """Return the programs of the page, with blocks of the same kind joined."""
    wanted = [b for b in blocks(str(page)) if not b.why or "make release-check" in b.why]
    named = [(_kind(b.kind, b.code), b.code) for b in wanted]
    return [
        Program(kind, "\n".join(code for _, code in some))
        for kind, some in groupby(named, key=lambda pair: pair[0])
    ]


def _kind(kind: str, code: str) -> str:
    if kind == "sh" and _PIP.search(code):
        return "sh: pip"
    return "sh: npm" if kind == "sh" and _NPM.search(code) else kind


def from_files(code: str, wheel: Path, tarball: Path) -> str:
    """Return lines that install with the files in place of the names of the packages."""
    code = _PIP.sub(lambda m: f'pip install "{wheel}{m[1]}"', code)
    return _NPM.sub(lambda _: f'npm install "{tarball}"', code)


def paste(program: Program, python: Path, place: Path, files: tuple[Path, Path]) -> str:
    """Return what a program printed in the folder."""
    if program.kind == "python":
        (place / "page.py").write_text(program.code, encoding="utf-8")
        return run([python, "page.py"], place)
    if program.kind == "js":
        (place / "page.mjs").write_text(program.code, encoding="utf-8")
        return run(["node", "page.mjs"], place)
    tools = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    # The download of the runtime for Node fetches CUDA libraries: the page says how to skip it.
    settings = {"PATH": tools, "ONNXRUNTIME_NODE_INSTALL": "skip"}
    code = from_files(program.code, *files)
    return run(["bash", "-euo", "pipefail", "-c", code], place, **settings)


def walk(clone: Path, wheel: Path, tarball: Path, folder: Path) -> tuple[list[str], list[str]]:
    """Return what was done with its seconds, and what is wrong with it."""
    start, processor = time.monotonic(), _processor()
    python = environment(folder / "environment")
    done, wrong = [f"fresh environment {time.monotonic() - start:.0f} s"], []
    for page, kinds in PAGES.items():
        place = empty(folder / page.replace("/", "-"))
        todo = programs(clone / page)
        if [p.kind for p in todo] != kinds:
            wrong.append(f"{page} has {', '.join(p.kind for p in todo)}, not {', '.join(kinds)}")
        for program in todo:
            began = time.monotonic()
            paste(program, python, place, (wheel, tarball))
            done.append(f"{page} {program.kind} {time.monotonic() - began:.0f} s")
    seconds = time.monotonic() - start
    total = f"{seconds:.0f} s, {_processor() - processor:.0f} s of them on a processor"
    if seconds > LIMIT:
        wrong.append(f"a stranger's path takes {total}: more than {LIMIT:.0f} s")
    return [*done, f"in all {total}"], wrong


def _processor() -> float:
    """Return the processor time of all commands so far: a busy machine does not add to it."""
    times = os.times()
    return times.children_user + times.children_system


def main(folder: Path) -> int:
    """Walk with the files of a release check; return 1 if something is wrong."""
    (wheel,), (tarball,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tgz")
    done, wrong = walk(folder / "clone", wheel, tarball, folder / "stranger")
    print("\n".join([*done, *wrong]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
