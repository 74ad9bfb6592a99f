"""What a shell and a notebook show of an object: a few lines, a table, a curve."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence

Row = tuple[str, str]
_WIDTH, _HEIGHT, _POINTS = 480, 120, 240
_LONGEST = 70  # characters of a cell


class Shown:
    """Shows itself by the rows that a subclass gives: what it is, and in words how it is."""

    def summary(self) -> tuple[str, list[Row]]:
        """Return a heading, and rows of (what, how)."""
        raise NotImplementedError

    def __repr__(self) -> str:
        heading, rows = self.summary()
        wide = max((len(name) for name, _ in rows), default=0)
        return "\n".join([heading, *(f"  {n:<{wide}}  {short(text)}" for n, text in rows)])

    def _repr_html_(self) -> str:
        heading, rows = self.summary()
        return table(heading, rows)


def short(text: str) -> str:
    """Return the text, or its beginning if it is long."""
    return text if len(text) <= _LONGEST else text[: _LONGEST - 4] + " ..."


def in_words(record: Mapping[str, object]) -> str:
    """Return a record in one line."""
    return ", ".join(
        f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items()
    )


def listed(names: Sequence[str]) -> str:
    """Return how many there are, and the first of them."""
    more = ", ..." if len(names) > 4 else ""
    return f"{len(names)}: {', '.join(names[:4])}{more}" if names else "none"


def table(heading: str, rows: Iterable[Row]) -> str:
    """Return a table as HTML."""
    lines = [
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(short(text))}</td></tr>"
        for name, text in rows
    ]
    return f"<table><caption>{html.escape(heading)}</caption>{''.join(lines)}</table>"


def curve(values: Sequence[float], label: str) -> str:
    """Return a line over the values as SVG; of many, the means of neighbours."""
    size = -(-len(values) // _POINTS) or 1
    parts = [values[i : i + size] for i in range(0, len(values), size)]
    means = [sum(p) / len(p) for p in parts]
    points = [(i, v) for i, v in enumerate(means) if math.isfinite(v)]
    if len(points) < 2:
        return ""
    low, high = min(v for _, v in points), max(v for _, v in points)
    across, up = _WIDTH / (len(means) - 1), _HEIGHT / ((high - low) or 1.0)
    places = " ".join(f"{i * across:.1f},{_HEIGHT - (v - low) * up:.1f}" for i, v in points)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='-4 -16 {_WIDTH + 8} {_HEIGHT + 32}' "
        f"width='{_WIDTH}' role='img' aria-label='{html.escape(label, quote=True)}'>"
        f"<polyline fill='none' stroke='#1f77b4' stroke-width='1.5' points='{places}'/>"
        f"<text x='0' y='-4' font-size='11'>{html.escape(label)}: {high:.4g}</text>"
        f"<text x='0' y='{_HEIGHT + 13}' font-size='11'>{low:.4g}</text></svg>"
    )


__all__ = ["Row", "Shown", "curve", "in_words", "listed", "short", "table"]
