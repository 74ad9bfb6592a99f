"""Short lines in C++ too, and no header that needs another one to be included first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cpp import ort_root
from tests.cpp.programs import SOURCE, need, run

FILES = sorted(
    p for p in SOURCE.rglob("*") if p.suffix in (".hpp", ".h", ".cpp", ".c", ".java", ".rs")
)
HEADERS = [p for p in FILES if p.suffix == ".hpp"]
LONGEST_LINE = 120


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_lines_are_short(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > LONGEST_LINE] == []
    assert [line for line in lines if line != line.rstrip() or "\t" in line] == []


@pytest.mark.full
@pytest.mark.parametrize("path", HEADERS, ids=lambda p: p.name)
def test_headers_stand_alone(path: Path) -> None:
    need()
    include = ort_root.headers()
    assert include is not None
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-xc++"]
    run("g++", *flags, f"-I{include}", f"-I{SOURCE}", "-include", path, "/dev/null")
