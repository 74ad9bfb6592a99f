"""The declared dependencies are complete and minimal."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib

import pytest

from tests.lower_bounds import EXTRA, FAST, ROOT, oldest

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
MODULES = {"ml_dtypes": "ml_dtypes", "onnx-ir": "onnx_ir"}


def plain(name: str) -> str:
    return name.lower().replace("_", "-")


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {plain(name): version for name, version in pairs}


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0]))


@pytest.mark.parametrize("requirement", PROJECT["dependencies"])
def test_what_is_required_is_imported(requirement: str) -> None:
    name = re.split(r"[<>=]", requirement)[0]
    module = MODULES.get(name, name)
    sources = (p.read_text("utf-8") for p in (ROOT / "src").rglob("*.py"))
    assert any(re.search(rf"^\s*(import|from) {module}\b", text, re.M) for text in sources)


@pytest.mark.parametrize("extra", [None, "cpu", "torch", "sklearn", "plot"])
def test_lower_bounds_are_below_what_is_tested(extra: str | None) -> None:
    for pin in oldest(extra):
        name, version = pin.split("==")
        assert numbers(version) <= numbers(pins()[plain(name)]), pin
        assert numbers(version) <= numbers(importlib.metadata.version(name)), pin


def test_constraints_are_exact_and_cover_development() -> None:
    versions = pins()
    for extra in ("cpu", "torch", "sklearn", "plot", "text", "dev"):
        for requirement in EXTRAS[extra]:
            name, exact = re.split(r"[<>=]+", requirement)[:2]
            assert plain(name) in versions
            if "==" in requirement:
                assert versions[plain(name)] == exact


def test_the_tests_of_lower_bounds_are_there() -> None:
    assert [path for path in (*FAST, *EXTRA) if not (ROOT / path).is_file()] == []
