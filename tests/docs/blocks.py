"""The code blocks of a page, and the reasons for the blocks that do not run here.

A comment right before a block says why it is not run: ``<!-- not run: it needs a GPU -->``. A page
that needs a package says so once: ``<!-- needs: transformers -->``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", *sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").glob("*.md")))
PLAIN = {"", "text", "diff", "pycon"}
"""What is shown and not run, as outputs are; doctest runs ``pycon``, the site ``{toctree}``."""
_FENCE = re.compile(
    r"(?:^<!-- not run: (?P<why>[^\n]+?) -->\n)?^(?P<indent> *)```(?P<kind>[^\n`]*)\n"
    r"(?P<code>.*?)^(?P=indent)```[ ]*$",
    re.DOTALL | re.MULTILINE,
)
_NEEDS = re.compile(r"^<!-- needs: ([\w, ]+) -->$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """Some code."""

    page: str
    line: int
    kind: str
    code: str
    why: str
    """Why it is not run; empty if it is."""


def text_of(page: str) -> str:
    """A page."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> Iterator[Block]:
    """The blocks of code of a page, in order."""
    text = text_of(page)
    for match in _FENCE.finditer(text):
        if match["kind"].strip() in PLAIN or match["kind"].startswith("{"):
            continue
        code = re.sub(rf"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
        line = text.count("\n", 0, match.start("code"))
        yield Block(page, line, match["kind"].strip(), code, match["why"] or "")


def needs(page: str) -> list[str]:
    """The packages without which a page is not run."""
    return [name.strip() for text in _NEEDS.findall(text_of(page)) for name in text.split(",")]
