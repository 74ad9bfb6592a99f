"""The way of a model from a file to trained weights, drawn from the list of stages in design.md."""

from __future__ import annotations

import re

from sitegen.contents import DOCS
from sitegen.svg import arrow, box, sideways, svg_image

WAYS_IN = ["model.onnx", "torch.nn.Module", "scikit-learn"]
RUNS = ["Python", "Node", "browser", "C++, C, Java, Rust", "CUDA"]
HIDDEN = {"torch.nn.Module", "model.onnx", "sessions", "train", "artifacts"}


def stages() -> list[tuple[str, str]]:
    """Return name and folder of each stage, as design.md lists them."""
    text = (DOCS / "design.md").read_text(encoding="utf-8")
    block = text.split("```", 2)[1]
    rows = re.findall(r"^ (\S.*?)\s{2,}(\S+)", block, re.MULTILINE)
    return [(name, folder) for name, folder in rows if name not in HIDDEN]


def data_flow() -> str:
    """Return the diagram."""
    rows = stages()
    high = 44 * len(rows) + 40
    middle = high / 2
    parts = []
    for i, name in enumerate(WAYS_IN):
        y = middle + 60 * (i - 1) - 18
        parts += [box(16, y, 140, 36, [name], "gray"), sideways(156, y + 18, 206, 42)]
    for i, (name, folder) in enumerate(rows):
        y = 24 + 44 * i
        parts.append(box(208, y, 190, 36, [name, folder], "blue"))
        if i:
            parts.append(arrow(303, y - 8, 303, y))
    last = 24 + 44 * (len(rows) - 1) + 18
    files = ["art/", "plain ONNX models", "checkpoint", "manifest.json"]
    parts += [
        box(456, middle - 44, 150, 88, files, "orange"),
        sideways(398, last, 454, middle),
    ]
    for i, name in enumerate(RUNS):
        y = middle + 50 * (i - (len(RUNS) - 1) / 2) - 18
        parts += [
            box(664, y, 180, 36, [name], "green"),
            sideways(606, middle, 662, y + 18),
        ]
    note = (
        f"<text x='754' y='{middle + 160:g}' text-anchor='middle' font-size='11' fill='#52606d'>"
        "stock ONNX Runtime</text>"
    )
    return svg_image(860, high, [*parts, note], "From a model to training anywhere")
