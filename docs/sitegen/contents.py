"""The table of contents: which page stands where, in one place.

A page that is not there yet is left out; one that nobody has listed comes last in the guide.
"""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
SECTIONS = {
    "Start": ["install", "quickstart"],
    "Guide": [
        *("training", "data", "losses", "optimizers", "parameters", "fine-tuning", "text"),
        *("from-pytorch", "hugging-face", "sklearn", "distributed", "devices", "web"),
        "any-language",
        "federated",
        *(
            "quantization",
            "continual-learning",
            "methods",
            "lowering",
            "own-operators",
            "onnx-standard",
            "coming-from-onnxruntime-training",
        ),
        *("coming-from-ortmodule", "coming-from-web-training", "coming-from-onnxcustom"),
        "style-transfer",
    ],
    "Reference": [
        *("generated/api/index", "generated/command-line", "artifacts", "ops", "fused-operators"),
        "differentiability",
        *("generated/profiles", "zoo", "wild", "programs-of-other-projects"),
    ],
    "Internals": [
        *(
            "design",
            "speed",
            "benchmarks",
            "benchmarks-cuda",
            "benchmarks-web",
            "benchmarks-finetune",
        ),
        *("contributing", "changelog", "proposals/training-artifacts"),
    ],
    "Gallery": ["gallery/digits", "gallery/gradients", "gallery/learning-rate", "gallery/pages"],
}
MADE = "generated/"


def sections() -> dict[str, list[str]]:
    """Return the pages of each section, those that are there."""
    there = {p.stem for p in DOCS.glob("*.md")} - {"index"}
    listed = {page for pages in SECTIONS.values() for page in pages}
    chosen = {
        name: [p for p in pages if p.startswith(MADE) or (DOCS / f"{p}.md").exists()]
        for name, pages in SECTIONS.items()
    }
    chosen["Guide"] += sorted(there - listed)
    return chosen


def toctrees() -> str:
    """Return the tables of contents as MyST writes them."""
    parts = []
    for name, pages in sections().items():
        lines = "\n".join(pages)
        parts.append(f"```{{toctree}}\n:caption: {name}\n:maxdepth: 1\n:hidden:\n\n{lines}\n```")
    return "\n\n".join(parts)
