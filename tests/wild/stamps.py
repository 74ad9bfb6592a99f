"""What a row is of: the file, the code that trained it and the code that judged it.

A row with the stamp of the present ones need not be made again: a run that was stopped goes on
where it was.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

from tests.wild.places import ROOT

JUDGES = ("differences", "double", "inputs", "judge", "original", "surgery")


def stamp(path: Path) -> str:
    """Return a few letters that change with the file, its weights beside it, or the code."""
    beside = [p for p in path.parent.iterdir() if p.name.startswith(f"{path.name}.")]
    return digest([path, *sorted(beside)], code())


@functools.cache
def code() -> str:
    """Return a few letters that change with the code."""
    judges = [ROOT / "tests" / "wild" / f"{name}.py" for name in JUDGES]
    return digest([*sorted((ROOT / "src" / "onnxtrain").rglob("*.py")), *judges])


def digest(paths: Iterable[Path], start: str = "") -> str:
    """Return a few letters that change with the content of files."""
    total = hashlib.sha256(start.encode())
    for path in paths:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()[:16]
