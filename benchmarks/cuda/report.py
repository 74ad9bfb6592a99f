"""Write the page of GPU figures from the runs stored in ``benchmarks/results``.

``python -m benchmarks.cuda.report`` rewrites the page. Pass the files of a new run to store them
first: ``steps.json [kernels.txt]``; ``--real real.json`` for real nets; ``--files files.json ...``
for zoo files, which may be split into several parts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.cuda.nets import NETS
from benchmarks.cuda.real_report import folded, real_figures

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks-cuda.md"
RESULTS = Path(__file__).parents[1] / "results"
TARGETS = {
    ("mlp", "float32"): 0.5,
    ("cnn", "float32"): 0.9,
    ("transformer", "float32"): 1.0,
    ("transformer", "bf16-mixed"): 1.1,
}
HEADS = (
    "net",
    "optimizer",
    "precision",
    "ours ms",
    "torch ms",
    "torch, loss not read",
    "ours / torch (range)",
    "target",
    "CUDA graph",
    "nodes by provider",
    "left the GPU",
)
WRONG = 1e-3  # of a loss, relative


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
            NETS[r["net"]].title,
            r["optimizer"],
            r["precision"],
            f"{r['ours_ms']:.3f}",
            f"{r['torch_ms']:.3f}",
            f"{r['torch_async_ms']:.3f}",
            f"{ratio:.2f} ({low:.2f}-{high:.2f})",
            verdict(r),
            "yes" if r["captured"] else "no",
            ", ".join(nodes),
            str(len(r["left"]) or "none"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def figures(report: dict[str, Any]) -> str:
    """Return the part of the page that is measured on small nets."""
    facts = "; ".join(f"{k}: {v}" for k, v in report["facts"].items() if k != "command")
    parts = [facts, f"```\n{report['facts']['command']}\n```", table(report["rows"])]
    if kernels := report.get("kernels"):
        parts.append(folded("Kernels by time, in milliseconds per step", kernels.strip()))
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


SECTIONS = {
    "figures": ("cuda_steps", figures),
    "real nets": ("cuda_real", real_figures),
    "files": ("cuda_files", files_table),
}
"""What stands between the marks of the page: the stored run, and who writes it."""


def put(page: str, name: str, text: str) -> str:
    """Return a page with new text between two marks."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    head, rest = page.split(start, 1)
    tail = rest.split(end, 1)[1]
    return f"{head}{start}\n\n{text}\n\n{end}{tail}"


def rendered(page: str, results: Path = RESULTS) -> str:
    """Return the page with every section as the stored runs have it."""
    for name, (file, write) in SECTIONS.items():
        page = put(page, name, write(json.loads((results / f"{file}.json").read_text())))
    return page


def store(arguments: list[str], results: Path = RESULTS) -> None:
    """Keep the files of a new run."""
    if arguments[0] == "--files":
        name, run = "cuda_files", [r for n in arguments[1:] for r in _read(n)]
    elif arguments[0] == "--real":
        name, run = "cuda_real", _read(arguments[1])
        for row in run["rows"]:
            row.pop("losses", None)  # compared by the run, not shown
    else:
        name, run = "cuda_steps", _read(arguments[0])
        if len(arguments) > 1:
            run["kernels"] = Path(arguments[1]).read_text()
    (results / f"{name}.json").write_text(json.dumps(run, separators=(",", ":")) + "\n")


def _read(path: str) -> Any:
    return json.loads(Path(path).read_text())


def main() -> None:
    """Store what is given, and write the page."""
    if sys.argv[1:]:
        store(sys.argv[1:])
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
