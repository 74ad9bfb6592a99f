"""The figures of a GPU as a page.

``python -m benchmarks.cuda.report steps.json [kernels.txt]`` or, of real nets,
``python -m benchmarks.cuda.report --real real.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.cuda.nets import NETS

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks-cuda.md"
REAL_TITLES = {
    "gpt2": "GPT-2 124M, 8x512", "bert": "BERT-base, 32x128", "vit": "ViT-B/16, 32",
    "resnet50": "ResNet-50, 64", "mobilenet": "MobileNetV3-L, 64",
    "smollm2": "SmolLM2-135M shape, 4x512", "unet": "U-Net, 16 x 64x64",
    "whisper": "Whisper-tiny encoder, 8", "gpt2-large": "GPT-2 774M, 4x512",
}  # fmt: skip
TARGETS = {
    ("mlp", "float32"): 0.5,
    ("cnn", "float32"): 0.9,
    ("transformer", "float32"): 1.0,
    ("transformer", "bf16-mixed"): 1.1,
}
HEADS = (
    "net", "optimizer", "precision", "ours ms", "torch ms", "torch, loss not read",
    "ours / torch (range)", "target", "CUDA graph", "nodes by provider", "left the GPU",
)  # fmt: skip
START, END = "<!-- figures -->", "<!-- end of figures -->"
REAL_START, REAL_END = "<!-- real nets -->", "<!-- end of real nets -->"
REAL_HEADS = (
    "net", "precision", "ours ms", "eager ms", "compile ms", "/ eager", "/ compile",
    "GiB ours / eager", "worst loss", "build s", "first step s",
)  # fmt: skip


def verdict(row: dict[str, Any]) -> str:
    """Say whether the target of a row is met, or by how much it is missed."""
    target = TARGETS.get((row["net"], row["precision"]))
    if target is None:
        return "report"
    ratio = row["ours_ms"] / row["torch_ms"]
    met = "met" if ratio <= target else f"missed by {ratio / target - 1:.0%}"
    return f"{target} {met}"


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [f"| {' | '.join(HEADS)} |", "|" + "---|" * len(HEADS)]
    for r in rows:
        low, high = r["spread"]
        ratio = r["ours_ms"] / r["torch_ms"]
        nodes = (f"{k.removesuffix('ExecutionProvider')} {v}" for k, v in r["nodes"].items())
        cells = (
            NETS[r["net"]].title, r["optimizer"], r["precision"], f"{r['ours_ms']:.3f}",
            f"{r['torch_ms']:.3f}", f"{r['torch_async_ms']:.3f}",
            f"{ratio:.2f} ({low:.2f}-{high:.2f})", verdict(r), "yes" if r["captured"] else "no",
            ", ".join(nodes), str(len(r["left"]) or "none"),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def figures(report: dict[str, Any], kernels: str = "") -> str:
    """Return the part of the page that is measured."""
    facts = "; ".join(f"{k}: {v}" for k, v in report["facts"].items() if k != "command")
    parts = [facts, f"```\n{report['facts']['command']}\n```", table(report["rows"])]
    if kernels:
        parts.append(f"Kernels by time, in milliseconds per step:\n\n```\n{kernels.strip()}\n```")
    return "\n\n".join(parts)


def real_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows of real nets as Markdown; what was not measured is left empty."""
    lines = [f"| {' | '.join(REAL_HEADS)} |", "|" + "---|" * len(REAL_HEADS)]
    for r in rows:
        name = REAL_TITLES.get(r["net"], r["net"])
        if "error" in r:
            lines.append(f"| {name} | {r['precision']} | {r['error']} |" + " |" * 8)
            continue
        ours = r["ours_ms"]
        ratios = [f"{ours / r[e]:.2f}" if e in r else "" for e in ("eager_ms", "compile_ms")]
        loss = f"{r['worst_loss']:.0e}" if "worst_loss" in r else ""
        cells = (
            name, r["precision"], f"{ours:.1f}", _shown(r, "eager_ms"), _shown(r, "compile_ms"),
            *ratios, f"{r['ours_gib']:.1f} / {r['eager_gib']:.1f}", loss, _shown(r, "build_s"),
            f"{r['first_step_s']:.2f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.1f}" if name in row else ""


def put(page: str, marks: tuple[str, str], text: str) -> str:
    """Return a page with new text between two marks."""
    head, rest = page.split(marks[0], 1)
    tail = rest.split(marks[1], 1)[1]
    return f"{head}{marks[0]}\n\n{text}\n\n{marks[1]}{tail}"


def main() -> None:
    """Put the figures into the page."""
    if sys.argv[1] == "--real":
        report = json.loads(Path(sys.argv[2]).read_text())
        facts = "; ".join(f"{k}: {v}" for k, v in report["facts"].items() if k != "command")
        text = f"{facts}\n\n```\n{report['facts']['command']}\n```\n\n{real_table(report['rows'])}"
        page = put(PAGE.read_text(encoding="utf-8"), (REAL_START, REAL_END), text)
        PAGE.write_text(page, encoding="utf-8")
        return
    report = json.loads(Path(sys.argv[1]).read_text())
    kernels = Path(sys.argv[2]).read_text() if len(sys.argv) > 2 else ""
    page = put(PAGE.read_text(encoding="utf-8"), (START, END), figures(report, kernels))
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
