"""Write the page and the plot of a run: ``python -m benchmarks.web.report RESULTS.json docs/``.

``benchmarks/web/finetune.json`` and ``benchmarks/web/gpu/results.json`` have their own sections.
The whole page is generated.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.web import finetune_report, gpu_report

mpl.use("agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent

MODELS = {
    "mlp": "MLP 784-128-10",
    "cnn": "CNN conv32-conv64-maxpool-fc128-fc10",
    "transformer": "transformer, 2 layers, width 32, 28 tokens",
}
OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD"}
DEVICES = {"wasm": "wasm", "webgpu": "WebGPU in software"}
GROUPS = [("adamw", "wasm"), ("sgd", "wasm"), ("adamw", "webgpu")]
# Their time / ours on wasm with one thread; what was aimed at, met or not.
TARGETS = {
    ("mlp", "onnxruntime-web/training 1.19.2"): 1.0,
    ("cnn", "onnxruntime-web/training 1.19.2"): 1.1,
    ("mlp", "TensorFlow.js wasm"): 4.0,
    ("mlp", "jax-js wasm"): 3.0,
    ("cnn", "jax-js wasm"): 10.0,
}
COLORS = ["#2563eb", "#93c5fd", "#d97706", "#059669", "#6ee7b7", "#9333ea"]


def table(group: dict[str, Any]) -> list[str]:
    """Return the lines of one table."""
    gpu = group["device"] == "webgpu"
    head = "| system | ms per step | their time / ours | middle half | best / best |"
    lines = [head + (" dispatches per step |" if gpu else " aim |"), "|---|---|---|---|---|---|"]
    for row in group["rows"]:
        if "failed" in row:
            why = _plain(row["failed"])
            lines.append(f"| {row['name']} | - | - | - | - | does not train: {why} |")
            continue
        aim = TARGETS.get((group["model"], row["name"])) if group["optimizer"] == "adamw" else None
        last = f"{row['dispatches']:.0f}" if gpu else "" if aim is None else _verdict(row, aim)
        ratio = "- | - | -"
        if "ratio" in row:
            ratio = f"{row['ratio']:.2f} | {row['low']:.2f} to {row['high']:.2f}"
            ratio += f" | {row['bestRatio']:.2f}"
        lines.append(f"| {row['name']} | {row['ms']:.2f} | {ratio} | {last} |")
    return lines


def _verdict(row: dict[str, Any], aim: float) -> str:
    """Say whether an aim was met; both ways of comparing have to say so."""
    middle, best = row["ratio"] >= aim, row["bestRatio"] >= aim
    said = "met" if middle and best else "met by the median only" if middle else "missed"
    return f"{aim:g}: {said}"


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("page.evaluate: ", "").strip()


HEAD = """\
# Training in a browser, timed

`make bench-web` makes this page. One Chromium, one page per system, batches of 64, rounds in
random order; a ratio compares times of the same round, and its median is shown. All systems start
from the same weights, see the same batches and must give the losses that torch gives (within 2e-3,
for the form of the optimizer that they have: TensorFlow.js decays no weights, the old official
build has eps 1e-6 and no decay). Everything runs in the page's only thread.
WebGPU and WebGL are SwiftShader here, a GPU in software: that checks the graphs and counts
dispatches, and says nothing about real GPUs.

Chromium {browser}, onnxruntime-web 1.30.0, TensorFlow.js 4.22.0, jax-js 0.1.25; {cores} cores of
{cpu}; load average {load:.1f} before and {loadAfter:.1f} after; {date}.
{coverage}

![their time / ours](images/benchmarks-web.png)

"""
TAIL = """\
The data keep hidden units alive: moments of dead units shrink to denormal numbers after some 900
steps, which slows every system that does not flush them, and that is not what is compared here.
Best / best compares the quickest rounds, the other columns rounds of all. A system of which one
round takes more than 4 s is timed in two rounds only, beside ours of the same rounds. The CNN is
not timed on TensorFlow.js webgl, which takes minutes per round on a GPU in software.

`onnxtrain` trains 8 batches per call on wasm, as `onnxtrain build --target web` chooses for models
with up to 20 MB of parameters and state, and one per call on WebGPU, where state stays on the GPU.
On WebGPU the distance to jax-js goes with the dispatches: it fuses
elementwise operators into few kernels, while ONNX Runtime dispatches a kernel per operator.
"""


def page(results: dict[str, Any]) -> str:
    """Return the text of the page."""
    text = HEAD.format(**results, date=results["started"][:10], coverage=coverage(results))
    for group in results["groups"]:
        text += f"## {title(group['model'], group['optimizer'], group['device'])}\n\n"
        text += "\n".join(table(group)) + "\n\n"
    return text + TAIL


def title(model: str, optimizer: str, device: str) -> str:
    """Return what a group is called."""
    return f"{MODELS[model]}, {OPTIMIZERS[optimizer]}, {DEVICES[device]}"


def coverage(results: dict[str, Any]) -> str:
    """Return how many rounds there were, and what is missing of a whole run."""
    groups = results["groups"]
    rounds = sorted({max((r.get("rounds", 0) for r in g["rows"]), default=0) for g in groups})
    counted = " to ".join(str(n) for n in (rounds[:1] + rounds[-1:] if rounds[1:] else rounds))
    text = f"This run had {counted} round{'' if counted == '1' else 's'} per group."
    there = {(g["model"], g["optimizer"], g["device"]) for g in groups}
    missing = [
        title(model, *group) for model in MODELS for group in GROUPS if (model, *group) not in there
    ]
    return f"{text} It does not have: {'; '.join(missing)}." if missing else text


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw the ratios on wasm."""
    groups = [g for g in results["groups"] if g["device"] == "wasm"]
    names = dict.fromkeys(r["name"] for g in groups for r in g["rows"] if "ratio" in r)
    colors = dict(zip(names, COLORS, strict=False))
    down = -(-len(groups) // 2)
    figure, axes = plt.subplots(down, 2, figsize=(9.6, 2.2 * down), squeeze=False)
    for axis in axes.flat[len(groups) :]:
        axis.remove()
    for axis, group in zip(axes.flat, groups, strict=False):
        rows = [r for r in group["rows"] if "ratio" in r]
        places = range(len(rows))
        values = [r["ratio"] for r in rows]
        # Of two rounds the median lies between, and may be outside of what the middle half is.
        below = [max(0.0, r["ratio"] - r["low"]) for r in rows]
        above = [max(0.0, r["high"] - r["ratio"]) for r in rows]
        axis.barh(
            places,
            values,
            xerr=[below, above],
            color=[colors[r["name"]] for r in rows],
            error_kw={"lw": 0.8},
        )
        axis.axvline(1, color="#334155", lw=0.8)
        axis.set_xscale("log")
        axis.set_yticks(list(places), [r["name"].replace(" wasm", "") for r in rows], fontsize=6)
        axis.invert_yaxis()
        axis.set_title(f"{group['model']}, {OPTIMIZERS[group['optimizer']]}", fontsize=9)
        axis.tick_params(axis="x", labelsize=7)
        axis.set_xlabel("their time / ours", fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(results: Path, docs: Path) -> None:
    """Write the page with all its sections, and the plot."""
    measurements = json.loads(results.read_text())
    (docs / "images").mkdir(exist_ok=True)
    plot(measurements, docs / "images" / "benchmarks-web.png")
    text = f"{page(measurements)}\n{gpu_report.section(HERE / 'gpu' / 'results.json')}"
    (docs / "benchmarks-web.md").write_text(text)
    if (tuned := HERE / "finetune.json").exists():
        finetune_report.write_section(tuned, docs / "benchmarks-web.md")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
