"""Boxes, arrows and text as SVG."""

from __future__ import annotations

import html
from collections.abc import Sequence

FONT = "font-family='system-ui, sans-serif'"
INK, PAPER, LINE = "#1f2933", "#ffffff", "#7b8794"
COLORS = {"blue": "#dbeafe", "green": "#dcfce7", "orange": "#ffedd5", "gray": "#f1f5f9"}


def box(
    x: float, y: float, wide: float, high: float, lines: Sequence[str], color: str = "gray"
) -> str:
    """Return a box with centered lines; the first is bold."""
    frame = (
        f"<rect x='{x:g}' y='{y:g}' width='{wide:g}' height='{high:g}' rx='6' "
        f"fill='{COLORS[color]}' stroke='{LINE}'/>"
    )
    parts = [frame]
    top = y + high / 2 - 8 * (len(lines) - 1) + 4.5
    for i, line in enumerate(lines):
        style = "font-size='13' font-weight='600'" if i == 0 else "font-size='11'"
        parts.append(
            f"<text x='{x + wide / 2:g}' y='{top + 16 * i:g}' text-anchor='middle' {style} "
            f"fill='{INK}'>{html.escape(line)}</text>"
        )
    return "\n".join(parts)


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """Return an arrow downwards."""
    middle = (y + to_y) / 2
    return _arrow(f"M{x:g},{y:g} C{x:g},{middle:g} {to_x:g},{middle:g} {to_x:g},{to_y:g}")


def sideways(x: float, y: float, to_x: float, to_y: float) -> str:
    """Return an arrow to the right."""
    middle = (x + to_x) / 2
    return _arrow(f"M{x:g},{y:g} C{middle:g},{y:g} {middle:g},{to_y:g} {to_x:g},{to_y:g}")


def _arrow(path: str) -> str:
    style = f"fill='none' stroke='{LINE}' stroke-width='1.3'"
    return f"<path d='{path}' {style} marker-end='url(#to)'/>"


def svg_image(wide: float, high: float, parts: Sequence[str], title: str) -> str:
    """Return a complete image on a white background, readable in dark mode as well."""
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {wide:g} {high:g}' "
        f"width='{wide:g}' height='{high:g}' role='img' {FONT}>\n"
        f"<title>{html.escape(title)}</title>\n"
        "<defs><marker id='to' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' "
        f"markerHeight='7' orient='auto'><path d='M0,0 L8,4 L0,8 z' fill='{LINE}'/></marker>"
        "</defs>\n"
        f"<rect width='{wide:g}' height='{high:g}' rx='10' fill='{PAPER}'/>"
    )
    return "\n".join([head, *parts, "</svg>", ""])
