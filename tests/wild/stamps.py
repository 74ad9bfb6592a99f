"""Stamps of a row: the file, the code that trained it and the code that checked it.

A row with current stamps is not recomputed, so a stopped run resumes. Failures are always checked
again.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

from tests.wild.judge import Row
from tests.wild.places import ROOT

JUDGES = ("differences", "inputs", "judge", "original", "surgery")
CLOSER = ("double",)
"""Asked only where the first look is not enough."""
FAILED = ("gradient differs", "time limit", "crash", "NaN")


def stamp(path: Path, row: Row) -> str:
    """Return a few letters that change with the file, its weights beside it, or the code."""
    beside = [p for p in path.parent.iterdir() if p.name.startswith(f"{path.name}.")]
    closer = bool(row.closer) or row.verdict in FAILED
    return digest([path, *sorted(beside)], code(JUDGES + CLOSER if closer else JUDGES))


@functools.cache
def code(judges: tuple[str, ...]) -> str:
    """Return a few letters that change with the library's code, or with that of some judges."""
    paths = [ROOT / "tests" / "wild" / f"{name}.py" for name in judges]
    return digest([*sorted((ROOT / "src" / "onnxtrain").rglob("*.py")), *paths])


def digest(paths: Iterable[Path], start: str = "") -> str:
    """Return a few letters that change with the content of files."""
    total = hashlib.sha256(start.encode())
    for path in paths:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()[:16]
