"""Write the map of the library's layers into the pages that show it.

The order comes from the import-linter contract in ``pyproject.toml``, the descriptions from the
first line of each module's docstring. A test compares the pages with it.
"""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ("CONTRIBUTING.md", "docs/design.md")
_BEGIN = "<!-- layers, written by `python -m tools.layer_map` -->"
_END = "<!-- end of layers -->"


def layers() -> list[list[str]]:
    """Return the rows of the import contract, upper layers first."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = config["tool"]["importlinter"]["contracts"]
    (chain,) = (c["layers"] for c in contracts if c["type"] == "layers")
    return [[name.removeprefix("onnxtrain.") for name in row.split(" | ")] for row in chain]


def description(module: str) -> str:
    """Return the first line of a module's docstring, without its full stop."""
    path = ROOT / "src" / "onnxtrain" / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.splitlines()[0].rstrip(".").replace("``", "`") if docstring else ""


def entry(module: str) -> str:
    """Return the path of a module below ``src/onnxtrain``: a folder ends in a slash."""
    path = ROOT / "src" / "onnxtrain" / module.replace(".", "/")
    return module.replace(".", "/") + ("/" if path.is_dir() else ".py")


def text() -> str:
    """Return the map: one line per module, upper layers first."""
    modules = [module for row in layers() for module in row]
    width = max(len(entry(module)) for module in modules) + 2
    lines = [f"{entry(module):<{width}}{description(module)}" for module in modules]
    return "\n".join([_BEGIN, "```", *lines, "```", _END])


def with_map(page: str) -> str:
    """Return a page's text with the current map between its marks."""
    before, rest = page.split(_BEGIN)
    return before + text() + rest.split(_END)[1]


def main() -> None:
    """Rewrite the map in each page."""
    for name in PAGES:
        page = ROOT / name
        page.write_text(with_map(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
