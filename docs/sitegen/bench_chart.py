"""A chart of the ratios in benchmarks.md: our time over that of each other engine."""

from __future__ import annotations

import re

from sitegen.contents import DOCS
from sitegen.svg import INK, svg_image

PAGE = DOCS / "benchmarks.md"
BAR, LEFT, WIDE, MOST = 13, 330, 420, 1.75
FILLS = ["#2563eb", "#16a34a", "#ea580c", "#9333ea"]
WARNING = "do not quote these ratios"
BEGIN, END = "<!-- glance -->", "<!-- end of glance -->"


def ratios(text: str) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Return the engines, and the ratios by net and engine, of the table of one thread."""
    table = _one_thread(text)
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


def glance(text: str) -> str:
    """Return the chart and a table of our step beside the fastest other one."""
    _, values = ratios(text)
    times = re.findall(r"^\| ([^|]+) \| (\w+) \| ([\d.]+) \(", _one_thread(text), re.MULTILINE)
    rows = [
        "| net | optimizer | ours, ms | fastest other | ours / theirs |",
        "|---|---|---|---|---|",
    ]
    for net, optimizer, ours in times:
        numbers = values[f"{net}, {optimizer}"]
        if numbers:
            engine = max(numbers, key=lambda e: numbers[e])
            rows.append(f"| {net} | {optimizer} | {ours} | {engine} | {numbers[engine]:.2f} |")
    quoted = "Below 1 ours is faster; one thread. "
    if WARNING in text:
        quoted += "**Other processes loaded the machine in this run: do not quote.** "
    return (
        "![time of a step, ours over theirs](images/benchmarks-cpu.svg)\n\n"
        + quoted
        + "`make docs` makes chart and table of the tables below.\n\n"
        + "\n".join(rows)
    )


def write_glance() -> None:
    """Put both where the page has a place for them."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n{glance(text)}\n{END}{tail}", encoding="utf-8")


def _one_thread(text: str) -> str:
    return text.split("### 1 thread", 1)[1].split("\n\n")[1]


def chart() -> str:
    """Return the chart, with a note if other processes loaded the machine."""
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
    title = "Time of a step, ours / theirs, one thread: below 1 ours is faster"
    head = [_words(16, 22, title, 13)]
    if WARNING in text:
        head.append(_words(16, y + 12, "Other processes loaded the machine: do not quote.", 12))
    return svg_image(LEFT + WIDE + 70, y + 24, [*head, *parts, line], title)


def _words(x: float, y: float, text: str, size: int) -> str:
    return f"<text x='{x:g}' y='{y:g}' font-size='{size}' fill='{INK}'>{text}</text>"


__all__ = ["chart", "glance", "ratios", "write_glance"]
