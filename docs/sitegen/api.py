"""Pages of the API, one per public module, made of docstrings."""

from __future__ import annotations

import importlib
import inspect
import typing
from pathlib import Path

MODULES = {
    "onnxtrain": "Build, train, differentiate, lower.",
    "onnxtrain.training": "Trainers, callbacks, data, results.",
    "onnxtrain.losses": "Losses and metrics.",
    "onnxtrain.optim": "Optimizers and schedules.",
    "onnxtrain.torch": "From PyTorch, and back.",
    "onnxtrain.sklearn": "Estimators that train ONNX graphs.",
    "onnxtrain.manifest": "What such a directory promises.",
    "onnxtrain.checkpoint": "Checkpoints as safetensors files.",
    "onnxtrain.targets": "What runtimes have, lack and prefer.",
    "onnxtrain.testing": "Checks for rules of your own.",
    "onnxtrain.examples": "A model and data to try things on.",
    "onnxtrain.errors": "Every error that is raised on purpose.",
}
OF_OTHERS = "set_fit_request, set_partial_fit_request, set_score_request"
"""Methods that scikit-learn adds, with docstrings of its own site."""


def write(folder: Path) -> None:
    """Write the pages, and one that lists them."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[str] = []
    seen: dict[int, str] = {}
    for name, about in MODULES.items():
        file = name.replace(".", "-")
        text = f"# {name}\n\n{about}\n\n```{{eval-rst}}\n{_directives(name, seen)}```\n"
        (folder / f"{file}.md").write_text(text, encoding="utf-8")
        rows.append(f"| [`{name}`]({file}.md) | {about} |")
    pages = "\n".join(name.replace(".", "-") for name in MODULES)
    table = "| module | |\n|---|---|\n" + "\n".join(rows)
    tree = f"```{{toctree}}\n:hidden:\n\n{pages}\n```"
    text = f"# API\n\nMade of the docstrings of what is public.\n\n{table}\n\n{tree}\n"
    (folder / "index.md").write_text(text, encoding="utf-8")


def _directives(name: str, seen: dict[int, str]) -> str:
    """Return the autodoc directives; name objects that an earlier page describes."""
    module = importlib.import_module(name)
    public = getattr(module, "__all__", None) or [
        n
        for n, v in vars(module).items()
        if not n.startswith("_") and getattr(v, "__module__", None) == name
    ]
    text = f".. currentmodule:: {name}\n\n"
    again = []
    for member in sorted(public, key=lambda n: (n[:1].isupper(), n)):
        value = getattr(module, member)
        if inspect.ismodule(value):
            continue
        if id(value) in seen:
            again.append(f"* ``{member}``: :doc:`{seen[id(value)]}`\n")
            continue
        if inspect.isclass(value):
            text += f".. autoclass:: {name}.{member}\n   :members:\n   :show-inheritance:\n"
            text += f"   :exclude-members: {OF_OTHERS}\n\n"
        elif kinds := typing.get_args(value):  # autodoc would show the docstring of unions
            names = ", ".join(f"``{getattr(kind, '__name__', kind)}``" for kind in kinds)
            text += f".. py:data:: {name}.{member}\n\n   One of: {names}.\n\n"
        elif callable(value):
            text += f".. autofunction:: {name}.{member}\n\n"
        else:
            text += f".. autodata:: {name}.{member}\n   :no-value:\n\n"
        seen[id(value)] = name.replace(".", "-")
    return text + ("Also here:\n\n" + "".join(again) if again else "")
