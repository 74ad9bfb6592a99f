"""How artifacts and training results display in a shell and in a notebook.

A class derives from :class:`SummaryRepr` and returns a heading and rows from ``summary()``. A shell
prints them as lines, a notebook as an HTML table. :func:`svg_curve` plots losses below the table.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence

Row = tuple[str, str]
"""Label and text of a row."""

_MAX_CELL_LENGTH = 70  # characters
_CURVE_WIDTH, _CURVE_HEIGHT = 480, 120  # pixels
_MAX_CURVE_POINTS = 240


class SummaryRepr:
    """Base class of objects that a shell and a notebook display as a table."""

    def summary(self) -> tuple[str, list[Row]]:
        """Return the heading and the rows of the table."""
        raise NotImplementedError

    def __repr__(self) -> str:
        heading, rows = self.summary()
        width = max((len(label) for label, _ in rows), default=0)
        lines = [f"  {label:<{width}}  {_truncate(text)}" for label, text in rows]
        return "\n".join([heading, *lines])

    def _repr_html_(self) -> str:
        heading, rows = self.summary()
        return _html_table(heading, rows)


def format_record(record: Mapping[str, object]) -> str:
    """Return a record of metrics in one line."""
    return ", ".join(
        f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items()
    )


def format_names(names: Sequence[str]) -> str:
    """Return the number of names and the first four of them."""
    more = ", ..." if len(names) > 4 else ""
    return f"{len(names)}: {', '.join(names[:4])}{more}" if names else "none"


def svg_curve(values: Sequence[float], label: str) -> str:
    """Return a line plot of the values as SVG; long series are averaged over windows."""
    window = -(-len(values) // _MAX_CURVE_POINTS) or 1
    windows = [values[i : i + window] for i in range(0, len(values), window)]
    means = [sum(w) / len(w) for w in windows]
    points = [(i, v) for i, v in enumerate(means) if math.isfinite(v)]
    if len(points) < 2:
        return ""
    low, high = min(v for _, v in points), max(v for _, v in points)
    x_scale, y_scale = _CURVE_WIDTH / (len(means) - 1), _CURVE_HEIGHT / ((high - low) or 1.0)
    coordinates = " ".join(
        f"{i * x_scale:.1f},{_CURVE_HEIGHT - (v - low) * y_scale:.1f}" for i, v in points
    )
    view_box = f"-4 -16 {_CURVE_WIDTH + 8} {_CURVE_HEIGHT + 32}"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='{view_box}' "
        f"width='{_CURVE_WIDTH}' role='img' aria-label='{html.escape(label, quote=True)}'>"
        f"<polyline fill='none' stroke='#1f77b4' stroke-width='1.5' points='{coordinates}'/>"
        f"<text x='0' y='-4' font-size='11'>{html.escape(label)}: {high:.4g}</text>"
        f"<text x='0' y='{_CURVE_HEIGHT + 13}' font-size='11'>{low:.4g}</text></svg>"
    )


def _html_table(heading: str, rows: Iterable[Row]) -> str:
    cells = [
        f"<tr><th style='text-align:left'>{html.escape(label)}</th>"
        f"<td style='text-align:left'>{html.escape(_truncate(text))}</td></tr>"
        for label, text in rows
    ]
    return f"<table><caption>{html.escape(heading)}</caption>{''.join(cells)}</table>"


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_CELL_LENGTH else text[: _MAX_CELL_LENGTH - 4] + " ..."
