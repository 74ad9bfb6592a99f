"""The figures of a GPU as a page.

``python -m benchmarks.cuda.report steps.json [kernels.txt]``, of real nets
``python -m benchmarks.cuda.report --real real.json``, and of files
``python -m benchmarks.cuda.report --files files.json ...``, each with a part of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.cuda.nets import NETS
from benchmarks.cuda.real_report import real_figures

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
WRONG = 1e-3  # of a loss, relative
FILES_START, FILES_END = "<!-- files -->", "<!-- end of files -->"
START, END = "<!-- figures -->", "<!-- end of figures -->"
REAL_START, REAL_END = "<!-- real nets -->", "<!-- end of real nets -->"


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


def files_table(rows: list[dict[str, Any]]) -> str:
    """Return what was seen of each file, as Markdown."""
    heads = ("file", "largest difference of a loss", "recorded", "nodes on the CPU")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for r in sorted(rows, key=lambda r: r["file"]):
        if "error" in r:
            lines.append(f"| {r['file']} | {r['error'].replace('|', ' ')} | | |")
            continue
        left = ", ".join(r["left"]) or "none"
        lines.append(
            f"| {r['file']} | {r['loss']:.0e} | {'yes' if r['captured'] else 'no'} | {left} |"
        )
    wrong = sum("error" not in r and r["loss"] > WRONG for r in rows)
    refused, off = (sum(bool(r.get(k)) for r in rows) for k in ("error", "left"))
    head = f"{len(rows)} files: {wrong} wrong, {refused} refused, {off} with nodes on the CPU."
    return "\n".join([head, "", *lines])


def put(page: str, marks: tuple[str, str], text: str) -> str:
    """Return a page with new text between two marks."""
    head, rest = page.split(marks[0], 1)
    tail = rest.split(marks[1], 1)[1]
    return f"{head}{marks[0]}\n\n{text}\n\n{marks[1]}{tail}"


def main() -> None:
    """Put the figures into the page."""
    if sys.argv[1] == "--real":
        text = real_figures(json.loads(Path(sys.argv[2]).read_text()))
        page = put(PAGE.read_text(encoding="utf-8"), (REAL_START, REAL_END), text)
        PAGE.write_text(page, encoding="utf-8")
        return
    if sys.argv[1] == "--files":
        rows = [r for name in sys.argv[2:] for r in json.loads(Path(name).read_text())]
        page = PAGE.read_text(encoding="utf-8")
        if FILES_START not in page:
            page += f"\n## Every model of the zoo\n\n{FILES_START}\n\n{FILES_END}\n"
        page = put(page, (FILES_START, FILES_END), files_table(rows))
        PAGE.write_text(page, encoding="utf-8")
        return
    report = json.loads(Path(sys.argv[1]).read_text())
    kernels = Path(sys.argv[2]).read_text() if len(sys.argv) > 2 else ""
    page = put(PAGE.read_text(encoding="utf-8"), (START, END), figures(report, kernels))
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
