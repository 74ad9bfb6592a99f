"""Layers, imports and private names, and maps that show every package."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools import layer_map

import onnxtrain

ROOT = Path(onnxtrain.__file__).parent
FILES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}


@functools.cache
def parsed(path: Path) -> ast.Module:
    """A file's tree; several tests look at it."""
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions of a file, those in classes and functions among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def packages() -> list[str]:
    """The packages of the library, and the rooms of ``graph``."""
    folders = {Path(name).parent.as_posix() for name in FILES if name.endswith("/__init__.py")}
    return sorted(f for f in folders if "/" not in f.removeprefix("graph/") and f != "graph")


@pytest.mark.parametrize("page", layer_map.PAGES)
def test_maps_are_those_of_the_import_contract(page: str) -> None:
    """Run ``python -m tools.layer_map`` to update the pages."""
    source = (layer_map.ROOT / page).read_text(encoding="utf-8")
    assert source == layer_map.with_map(source)


def imports(tree: ast.AST) -> Iterator[ast.ImportFrom]:
    """All imports of our own modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onnxtrain"):
            yield node


def test_no_function_hides_an_import() -> None:
    hidden = {
        f"{name}: {node.module}"
        for name, path in FILES.items()
        for function in functions(parsed(path))
        for node in imports(function)
    }
    assert hidden == set()


def test_private_names_stay_in_their_package() -> None:
    foreign = [
        f"{name}: {node.module}.{alias.name}"
        for name, path in FILES.items()
        for node in imports(parsed(path))
        for alias in node.names
        if alias.name.startswith("_") and (node.module or "").rpartition(".")[0] != _package(name)
    ]
    assert foreign == []


def _package(name: str) -> str:
    return ".".join(["onnxtrain", *Path(name).parent.parts])


def test_every_module_has_a_layer() -> None:
    """The chain of import-linter has every package and every file beside them, each once."""
    layered = [name for row in layer_map.layers() for name in row]
    single = {name.removesuffix(".py") for name in FILES if "/" not in name}
    single |= {name.removesuffix(".py") for name in FILES if Path(name).parent.name == "graph"}
    expected = {*packages(), *single} - {"__init__", "__main__", "graph/__init__"}
    assert sorted(layered) == sorted(name.replace("/", ".") for name in expected)
