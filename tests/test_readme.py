"""The first screen of the README; tests/docs runs its code."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_first_screen_has_the_two_commands() -> None:
    first = TEXT.splitlines()[:25]
    assert any(line.startswith("make demo") for line in first)
    assert any(line.startswith("make test") for line in first)


def test_it_is_short_and_begins_with_twelve_lines() -> None:
    assert len(TEXT.splitlines()) < 90
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len([line for line in code.splitlines() if line]) == 12


def test_what_it_links_to_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)", TEXT)
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []
