"""Small functions, small files, small folders, and maps that show all of them."""

from __future__ import annotations

import ast
import functools
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import onnxtrain

ROOT = Path(onnxtrain.__file__).parent
FILES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}

LONGEST_FUNCTION = 60  # lines, docstring aside
LONGEST_FILE = 400
MOST_FILES = 20
ONE_FILE_PER_FAMILY = {"autodiff/rules", "lowering/rules"}


@functools.cache
def parsed(path: Path) -> ast.Module:
    """A file's tree; several tests look at it."""
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions of a file, those in classes and functions among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from ``def`` to the end, without the docstring."""
    lines = _lines(function)
    first = function.body[0]
    return lines - (_lines(first) if ast.get_docstring(function) is not None else 0)


def _lines(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_length_leaves_the_docstring_out() -> None:
    text = 'def f(\n    x,\n):\n    """One.\n\n    Two.\n    """\n    return x\n'
    (function,) = functions(ast.parse(text))
    assert length(function) == 4


def test_functions_are_short() -> None:
    long = {
        f"{name}:{function.name}"
        for name, path in FILES.items()
        for function in functions(parsed(path))
        if length(function) > LONGEST_FUNCTION
    }
    assert long == set()


def test_files_are_short() -> None:
    sizes = {name: len(p.read_text(encoding="utf-8").splitlines()) for name, p in FILES.items()}
    assert {name for name, size in sizes.items() if size > LONGEST_FILE} == set()


def test_folders_are_small() -> None:
    counts = Counter(Path(name).parent.as_posix() for name in FILES)
    large = {folder for folder, count in counts.items() if count > MOST_FILES}
    assert large - ONE_FILE_PER_FAMILY == set()


def packages() -> list[str]:
    """The packages of the library, and the rooms of ``graph``."""
    folders = {Path(name).parent.as_posix() for name in FILES if name.endswith("/__init__.py")}
    return sorted(f for f in folders if "/" not in f.removeprefix("graph/") and f != "graph")


@pytest.mark.parametrize("text", ["CONTRIBUTING.md", "docs/design.md"])
def test_maps_name_every_package(text: str) -> None:
    source = (Path(__file__).parent.parent / text).read_text(encoding="utf-8")
    assert len(packages()) > 15
    assert [name for name in packages() if f"{name}/" not in source] == []


def test_maps_name_nothing_else() -> None:
    """What the map of CONTRIBUTING.md lists in the library is there."""
    source = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = source.split("in `src/onnxtrain/`:", 1)[1].split("```")[1]
    listed = [line.split()[0] for line in block.strip().splitlines()]
    assert [name for name in listed if not (ROOT / name).exists()] == []


def imports(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.ImportFrom]]:
    """All imports of our own modules, each with what it stands in."""
    for parent in ast.walk(tree):
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onnxtrain"):
                yield parent, node


def test_no_function_hides_an_import() -> None:
    hidden = [
        f"{name}: {node.module}"
        for name, path in FILES.items()
        for function in functions(parsed(path))
        for _, node in imports(function)
    ]
    assert hidden == []


def test_private_names_stay_in_their_package() -> None:
    foreign = [
        f"{name}: {node.module}.{alias.name}"
        for name, path in FILES.items()
        for _, node in imports(parsed(path))
        for alias in node.names
        if alias.name.startswith("_") and (node.module or "").rpartition(".")[0] != _package(name)
    ]
    assert foreign == []


def _package(name: str) -> str:
    return ".".join(["onnxtrain", *Path(name).parent.parts])


def test_every_module_has_a_layer() -> None:
    """The chain of import-linter has every package and every file beside them, each once."""
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    (chain,) = (c["layers"] for c in contracts if c["type"] == "layers")
    layered = [name.removeprefix("onnxtrain.") for row in chain for name in row.split(" | ")]
    single = {name.removesuffix(".py") for name in FILES if "/" not in name}
    single |= {name.removesuffix(".py") for name in FILES if Path(name).parent.name == "graph"}
    expected = {*packages(), *single} - {"__init__", "__main__", "graph/__init__"}
    assert sorted(layered) == sorted(name.replace("/", ".") for name in expected)
