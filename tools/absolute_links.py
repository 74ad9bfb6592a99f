"""Make the links of README.md absolute: ``python -m tools.absolute_links URL``.

Package indexes show the text alone. The publishing workflow runs this with the address of the tag
before it builds.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
_LINK = re.compile(r"(!?\[[^\]]*\]\()(?!https?://|#)([^)]+)\)")


def absolute(text: str, address: str) -> str:
    """Return the text with every relative link below an address.

    >>> absolute("[a](docs/a.md) ![b](b.svg) [c](https://x.org)", "https://h.org/o/p/blob/v1")
    '[a](https://h.org/o/p/blob/v1/docs/a.md) ![b](https://h.org/o/p/raw/v1/b.svg) [c](https://x.org)'
    """
    raw = address.replace("/blob/", "/raw/")

    def put(match: re.Match[str]) -> str:
        base = raw if match[1].startswith("!") else address
        return f"{match[1]}{base}/{match[2]})"

    return _LINK.sub(put, text)


if __name__ == "__main__":
    README.write_text(absolute(README.read_text("utf-8"), sys.argv[1].rstrip("/")), "utf-8")
