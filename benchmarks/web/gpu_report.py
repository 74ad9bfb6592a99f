"""The section of docs/benchmarks-web.md on a real GPU, from what ``gpu/run.mjs`` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TITLE = "## WebGPU on a real GPU"
MODELS = {"mlp": "MLP", "cnn": "CNN", "transformer": "transformer"}
NONE = f"""\
{TITLE}

There are no results of a real GPU yet. `node benchmarks/web/gpu/run.mjs` makes them from Node,
without a browser, where there is one (`benchmarks/web/gpu/README.md`).
"""
HEAD = f"""\
{TITLE}

`node benchmarks/web/gpu/run.mjs` makes this section: the same nets and batches in Node {{node}},
with WebGPU of Dawn (npm `webgpu` {{dawn}}), a process per system, AdamW. A ratio compares
times of the same round. {{adapter}}; {{date}}.

| net | system | ms per step | their time / ours | best / best | dispatches per step |
|---|---|---|---|---|---|
"""
SOFTWARE = """
This is a GPU in software: the figures say that everything runs and is right, not how fast it is.
"""


def section(path: Path) -> str:
    """Return the text of the section, or a sentence where there are no results."""
    if not path.exists():
        return NONE
    results = json.loads(path.read_text())
    text = HEAD.format(**results, date=results["started"][:10])
    for group in results["groups"]:
        text += "".join(_row(MODELS[group["model"]], row) for row in group["rows"])
    return text + (SOFTWARE if results["software"] else "")


def _row(net: str, row: dict[str, Any]) -> str:
    if "failed" in row:
        why = row["failed"].replace("|", "/").strip()
        return f"| {net} | {row['name']} | - | - | - | does not train: {why} |\n"
    ratio = f"{row['ratio']:.2f} | {row['bestRatio']:.2f}" if "ratio" in row else "- | -"
    return f"| {net} | {row['name']} | {row['ms']:.2f} | {ratio} | {row['dispatches']:.0f} |\n"
