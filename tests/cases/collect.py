"""Collect the cases: every module of tests.cases that has a list ``CASES``."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections import Counter

import tests.cases
from tests.cases.base import OpCase

TOOLS = {"base", "collect", "coverage", "evaluate", "checks"}
FAMILIES = sorted(m.name for m in pkgutil.iter_modules(tests.cases.__path__) if m.name not in TOOLS)


def load_family(name: str) -> list[OpCase]:
    """The cases of one family file; raises what its import raises."""
    return list(importlib.import_module(f"tests.cases.{name}").CASES)


def all_cases() -> list[OpCase]:
    """The cases of every family that can be imported, with distinct names."""
    cases: list[OpCase] = []
    for family in FAMILIES:
        try:
            cases += load_family(family)
        except Exception:  # test_family reports it; the other families go on
            continue
    seen: Counter[str] = Counter()
    for i, case in enumerate(cases):
        seen[case.name] += 1
        if seen[case.name] > 1:
            cases[i] = dataclasses.replace(case, id=f"{case.id or 'plain'}.{seen[case.name]}")
    return cases


CASES = all_cases()
