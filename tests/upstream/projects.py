"""The projects whose programs run here, and the page that shows the outcomes."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.upstream.results import Result, Run, not_passed, summary

PAGE = Path(__file__).parents[2] / "docs" / "programs-of-other-projects.md"
BEGIN, END = "<!-- results, written by `make upstream` -->", "<!-- end of results -->"


@dataclass(frozen=True)
class Project:
    """A public repository, and what of it runs here."""

    name: str
    """Folder of the checkout, module in this package, and heading on the page."""
    repository: str
    summary: str
    """One or two sentences for the page: what runs, what was changed, what is replaced."""

    def run(self, checkout: Path) -> Run:
        """Run everything of this project in a checkout."""
        module = importlib.import_module(f"tests.upstream.{self.name.replace('-', '_')}")
        results: list[Result] = module.run(checkout)
        command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        return Run(self.name, commit, tuple(results))


PROJECTS = (
    Project(
        "onnxcustom",
        "sdpython/onnxcustom",
        "Its tests of training and its gallery of training programs, in two ways: with imports "
        "changed to `onnxtrain.compat.onnxcustom`; and on its own library, unchanged, after "
        "`onnxtrain.compat.ort.install()`. A program of ours trains ten models with the same seeds "
        "both ways and asserts equal weights. Replaced: mlprodict and pyquickhelper, which do not "
        "install any more, and names and arguments that newer releases of onnx and scikit-learn "
        "dropped.",
    ),
    Project(
        "onnxruntime",
        "microsoft/onnxruntime",
        "Its tests of `ORTModule` at v1.19.2, `orttraining_test_ortmodule_api.py` and "
        "`orttraining_test_ortmodule_onnx_ops.py`, with `cuda` read as `cpu`. Of a test with more "
        "than 36 parameter sets, 36 run, none with a tensor of more than 4 million elements; each "
        "starts at seed 0; one of 1,000 large steps runs 50. Replaced: the private modules that "
        "the files import, by empty ones; and transformers, which is not installed.",
    ),
    Project(
        "onnxruntime-training-examples",
        "microsoft/onnxruntime-training-examples",
        "The getting-started sample of `ORTTrainer`, as last published (967245e), against its "
        "torch original: the losses of three epochs agree within 1e-4, with the same optimizer and "
        "seed and no dropout, on a generated corpus in WikiText-2's format. "
        "The web demo of on-device training: its notebook writes the artifacts, and its page "
        "trains on them in Chromium, built by Vite with `onnxruntime-web/training` aliased to "
        "`onnxtrain/training`. Replaced: torchtext, MUI, Plotly and netron; and MNIST, by "
        "scikit-learn's digits.",
    ),
    Project(
        "train-pytorch-in-js",
        "juharris/train-pytorch-in-js",
        "Both programs that export graphs, and the page that trains on them in Chromium, with the "
        "script of stock onnxruntime-web instead of the build in its repository. The optimizer "
        "graph is that of `export_optimizer_graph`. Replaced: MUI, Plotly and torchvision; and "
        "MNIST, by scikit-learn's digits.",
    ),
)


def page(runs: Sequence[Run], projects: Sequence[Project] = PROJECTS) -> str:
    """Return the generated part of the page."""
    known = {run.project: run for run in runs}
    there = [p for p in projects if p.name in known]
    parts = [summary([r for p in there for r in known[p.name].results])]
    for project in there:
        run = known[project.name]
        link = f"[{project.repository}](https://github.com/{project.repository})"
        parts += [
            f"## {project.name}",
            f"{link} at {run.commit[:10]}. {project.summary}",
            not_passed(run.results) or "Everything passes.",
        ]
    return "\n\n".join(parts)


def write_page(runs: Sequence[Run], path: Path = PAGE) -> None:
    """Rewrite the part of the page between the marks."""
    text = path.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    path.write_text(f"{head}{BEGIN}\n\n{page(runs)}\n\n{END}{tail}")
