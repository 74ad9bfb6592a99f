"""The section of docs/benchmarks-web.md on a real GPU, from the results of ``gpu/run.mjs``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TITLE = "## WebGPU on a real GPU"
MODELS = {"mlp": "MLP", "cnn": "CNN", "transformer": "transformer"}
NONE = f"""\
{TITLE}

No results of a real GPU are stored yet. `node benchmarks/web/gpu/run.mjs` measures them from Node,
without a browser, on a machine with a GPU (`benchmarks/web/gpu/README.md`).
"""
HEAD = f"""\
{TITLE}

`node benchmarks/web/gpu/run.mjs` makes this section: the same nets and batches in Node {{node}},
with WebGPU of Dawn (npm `webgpu` {{dawn}}), a process per system, AdamW. A ratio compares
times of the same round. {{adapter}}; {{date}}.{{busy}}

| net | system | ms per step | their time / ours | best / best | dispatches per step |
|---|---|---|---|---|---|
"""
BUSY = """
Other work was on the machine's processor meanwhile, so that times of single rounds differ by up to
twice: quickest rounds say more here than medians.\
"""
MULTIPLIED = """
`onnxtrain, multiplied` has the update of AdamW as multiplications and additions instead of one
product of small matrices, three dispatches more: its quickest rounds take {low:.2f} to {high:.2f}
times ours. A GPU in software is several times faster with it; artifacts are made for real ones.
"""
WRONG = """
TensorFlow.js is the one that is wrong in the CNN: its product with a transposed second operand,
split along the inner axis (`MatMulSplitKProgram`), is off by as much as its values are large at
64 x 9,216 x 128 (seen on SwiftShader), while its other programs and our losses agree with torch.
"""
TUNED = """
Adapters of rank 8 on all linear layers of a decoder ({shape}, int4), {tokens} tokens, AdamW:
{ms:.0f} ms per step, {tokensPerSecond:.0f} tokens/s, {dispatches:.0f} dispatches; losses are
those of the CPU within {off:.0e} (`node benchmarks/web/gpu/adapters.mjs`).
"""
SOFTWARE = """
This is a GPU in software: the figures say that everything runs and is right, not how fast it is.
"""


def section(path: Path) -> str:
    """Return the text of the section, or a sentence without results."""
    if not path.exists():
        return NONE
    results = json.loads(path.read_text())
    busy = BUSY.rstrip() if results.get("busy") else ""
    text = HEAD.format(**{**results, "busy": busy}, date=results["started"][:10])
    for group in results["groups"]:
        text += "".join(_row(MODELS[group["model"]], row) for row in group["rows"])
    rows = [row for group in results["groups"] for row in group["rows"]]
    others = [r["bestRatio"] for r in rows if "multiplied" in r["name"] and "bestRatio" in r]
    if others:
        text += MULTIPLIED.format(low=min(others), high=max(others))
    if any("wrong" in row.get("failed", "") and "TensorFlow" in row["name"] for row in rows):
        text += WRONG
    if "adapters" in results:
        text += TUNED.format(**results["adapters"])
    return text + (SOFTWARE if results["software"] else "")


def _row(net: str, row: dict[str, Any]) -> str:
    if "failed" in row:
        why = row["failed"].replace("|", "/").strip()
        return f"| {net} | {row['name']} | - | - | - | does not train: {why} |\n"
    ratio = f"{row['ratio']:.2f} | {row['bestRatio']:.2f}" if "ratio" in row else "- | -"
    return f"| {net} | {row['name']} | {row['ms']:.2f} | {ratio} | {row['dispatches']:.0f} |\n"
