"""Helpers for tests of `load` errors."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from onnxtrain.errors import LoadError
from onnxtrain.graph.io import load


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    entries = {}
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        entries[str(path)] = (info.st_mode, info.st_size, info.st_mtime_ns)
    return entries


def refusal(source: object, folder: Path, **options: object) -> str:
    """Return the message of the LoadError; check that it came fast and that no file changed."""
    before, cwd, start = snapshot(folder), os.listdir(), time.thread_time()
    with pytest.raises(LoadError) as caught:
        load(source, **options)  # type: ignore[arg-type]
    # CPU time of this thread, independent of the machine's load.
    assert time.thread_time() - start < 1
    assert snapshot(folder) == before
    assert os.listdir() == cwd
    return str(caught.value)


def first_line(text: str) -> str:
    return text.split("\n")[0]
