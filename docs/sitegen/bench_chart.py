"""A chart of the ratios in benchmarks.md: our time over that of each other engine."""

from __future__ import annotations

import re

from sitegen.contents import DOCS
from sitegen.svg import INK, picture

PAGE = DOCS / "benchmarks.md"
BAR, LEFT, WIDE, MOST = 13, 250, 420, 1.75
FILLS = ["#2563eb", "#16a34a", "#ea580c", "#9333ea"]
WARNING = "not to be quoted"


def ratios(text: str) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Return the engines, and the ratios by net and engine, of the table of one thread."""
    table = text.split("### 1 thread", 1)[1].split("\n\n")[1]
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
    ]
    engines = [cell.removeprefix("/ ") for cell in header[3:]]
    values = {}
    for cells in rows:
        numbers = {
            engine: float(match[0])
            for engine, cell in zip(engines, cells[3:], strict=True)
            if (match := re.match(r"\d+\.\d+", cell))
        }
        values[f"{cells[0]}, {cells[1]}"] = numbers
    return engines, values


def chart() -> str:
    """Return the picture; it says so if other work was on the machine."""
    text = PAGE.read_text(encoding="utf-8")
    engines, values = ratios(text)
    parts, y = [], 58.0
    at_one = LEFT + WIDE / MOST
    for i, engine in enumerate(engines):
        x = 16 + 165 * i
        parts.append(f"<rect x='{x}' y='34' width='12' height='12' fill='{FILLS[i]}'/>")
        parts.append(_words(x + 18, 44, engine, 11))
    for name, numbers in values.items():
        parts.append(_words(16, y + len(engines) * BAR / 2 + 4, name, 12))
        for i, engine in enumerate(engines):
            value = numbers.get(engine)
            top = y + i * BAR
            if value is None:
                parts.append(_words(LEFT + 4, top + 10, "no time", 9))
                continue
            long = WIDE * min(value, MOST) / MOST
            parts.append(
                f"<rect x='{LEFT}' y='{top + 1:g}' width='{long:.1f}' height='{BAR - 2}' "
                f"fill='{FILLS[i]}'/>"
            )
            parts.append(_words(LEFT + long + 5, top + 10, f"{value:.2f}", 10))
        y += len(engines) * BAR + 8
    line = (
        f"<line x1='{at_one:.1f}' x2='{at_one:.1f}' y1='54' y2='{y:g}' stroke='{INK}' "
        "stroke-dasharray='4 3'/>"
    )
    warned = " (other work was on the machine: not to be quoted)" if WARNING in text else ""
    title = f"Time of a step, ours / theirs, one thread: below 1 ours is faster{warned}"
    head = _words(16, 22, title, 13)
    return picture(LEFT + WIDE + 70, y + 10, [head, *parts, line], title)


def _words(x: float, y: float, text: str, size: int) -> str:
    return f"<text x='{x:g}' y='{y:g}' font-size='{size}' fill='{INK}'>{text}</text>"


__all__ = ["chart", "ratios"]
