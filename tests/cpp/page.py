"""The page docs/any-language.md shows the programs of the tests, not copies of them.

``python -m tests.cpp.page`` puts each file that a comment names into the block behind it.
"""

from __future__ import annotations

import re

from tests.cpp.ort_root import ROOT

PAGE = ROOT / "docs/any-language.md"
_BLOCK = re.compile(r"<!-- (cpp/\S+) -->\n```(\w+)\n(.*?)```\n", re.DOTALL)


def shown(text: str) -> dict[str, str]:
    """Return the code that a page shows, by the file that it is said to come from."""
    return {match[1]: match[3] for match in _BLOCK.finditer(text)}


def filled(text: str) -> str:
    """Return the page with the content of the files."""

    def block(match: re.Match[str]) -> str:
        source = (ROOT / match[1]).read_text(encoding="utf-8")
        return f"<!-- {match[1]} -->\n```{match[2]}\n{source}```\n"

    return _BLOCK.sub(block, text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
