"""The figures of a GPU as a page: ``python -m benchmarks.cuda.report steps.json [kernels.txt]``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.cuda.nets import NETS

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks-cuda.md"
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


def main() -> None:
    """Put the figures into the page."""
    report = json.loads(Path(sys.argv[1]).read_text())
    kernels = Path(sys.argv[2]).read_text() if len(sys.argv) > 2 else ""
    page = PAGE.read_text(encoding="utf-8")
    head, rest = page.split(START, 1)
    tail = rest.split(END, 1)[1]
    PAGE.write_text(f"{head}{START}\n\n{figures(report, kernels)}\n\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
