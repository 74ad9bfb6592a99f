"""Check a built site: ``python -m tools.site_links docs/_build/html``.

Every link, image and script inside the site leads to a file, and every anchor to an element; the
search finds the right page for common queries.
"""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

WORDS = {
    "resum": "training",
    "webgpu": "web",
    "lora": "fine-tuning",
    "csv": "data",
    "earlystop": "training",
}
"""Stems of words, as the index has them, and a page that the search has to show for each."""


class Page(HTMLParser):
    """What a page refers to, and what in it can be referred to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect."""
        values = dict(attrs)
        self.anchors.update(v for n in ("id", "name") if (v := values.get(n)))
        name = {"a": "href", "link": "href", "img": "src", "script": "src", "object": "data"}
        link = values.get(name.get(tag, ""))
        if link:
            self.links.append(link)


def broken(site: Path) -> list[str]:
    """Return the links that lead nowhere."""
    pages = {p: Page(p.read_text("utf-8")) for p in sorted(site.rglob("*.html"))}
    lines = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.exists():
                lines.append(f"{path.relative_to(site)}: {link}")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                lines.append(f"{path.relative_to(site)}: {link}: no such place")
    return lines


def unsearchable(site: Path) -> list[str]:
    """Return the words from which the search does not lead to their page."""
    text = (site / "searchindex.js").read_text("utf-8").strip()
    index = json.loads(text.removeprefix("Search.setIndex(").rstrip(";").removesuffix(")"))
    lines = []
    for word, page in WORDS.items():
        pages = {index["docnames"][i] for i in _places(index, word)}
        if page not in pages:
            lines.append(f"the search for {word!r} does not lead to {page}")
    return lines


def _places(index: dict[str, Any], word: str) -> list[int]:
    """Return the numbers of the pages that have a word in their text or in a title."""
    kept = [index[part].get(word, []) for part in ("terms", "titleterms")]
    return [i for k in kept for i in ([k] if isinstance(k, int) else k)]


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    wrong = broken(folder) + unsearchable(folder)
    print("\n".join(wrong) or f"{folder}: every link leads somewhere")
    sys.exit(bool(wrong))
