"""Draw a small ONNX graph: operators in rows by depth, gradients in another color."""

from __future__ import annotations

import onnx

from sitegen.svg import arrow, box, svg_image

WIDE, HIGH, GAP, ROW = 128, 40, 22, 78


def graph_plot(model: onnx.ModelProto, title: str, max_nodes: int = 60) -> str:
    """Return the plot as SVG; raise ValueError above `max_nodes` nodes."""
    nodes = list(model.graph.node)
    if len(nodes) > max_nodes:
        raise ValueError(f"{len(nodes)} nodes are too many for a plot")
    constants = {t.name for t in model.graph.initializer}
    sources = {v.name: v.name for v in model.graph.input}
    depth: dict[str, int] = dict.fromkeys(sources, 0)
    items: list[tuple[str, list[str], str, list[str]]] = [
        (name, [name], "green", []) for name in sources
    ]
    for i, node in enumerate(nodes):
        inputs = [n for n in node.input if n and n not in constants]
        level = 1 + max((depth[n] for n in inputs), default=0)
        key = f"node {i}"
        for output in node.output:
            depth[output], sources[output] = level, key
        depth[key] = level
        made = [o for o in node.output if o in {v.name for v in model.graph.output}]
        color = "orange" if node.name.startswith("grad") else "blue"
        items.append((key, [node.op_type, *made], color, [sources[n] for n in inputs]))
    return _drawn(items, depth, title)


def _drawn(
    items: list[tuple[str, list[str], str, list[str]]], depth: dict[str, int], title: str
) -> str:
    rows: dict[int, list[str]] = {}
    for key, *_ in items:
        rows.setdefault(depth[key], []).append(key)
    wide = max(len(row) for row in rows.values()) * (WIDE + GAP) + GAP
    places = {}
    for level, row in rows.items():
        left = (wide - len(row) * (WIDE + GAP) + GAP) / 2
        for i, key in enumerate(row):
            places[key] = (left + i * (WIDE + GAP), 16 + level * ROW)
    arrows, boxes = [], []
    for key, lines, color, inputs in items:
        x, y = places[key]
        boxes.append(box(x, y, WIDE, HIGH, lines[:2], color))
        for source in inputs:
            from_x, from_y = places[source]
            arrows.append(arrow(from_x + WIDE / 2, from_y + HIGH, x + WIDE / 2, y))
    return svg_image(wide, 16 + (max(rows) + 1) * ROW, [*arrows, *boxes], title)
