"""Gradient rules select per-target variants from tables; they do not query the target."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import onnxtrain
import onnxtrain.autodiff.rules
import onnxtrain.losses
from onnxtrain.autodiff import rule_registry
from onnxtrain.autodiff.rule_registry import Choice, Variant, select_variant_name
from onnxtrain.targets import find

SOURCE = Path(onnxtrain.__file__).parent
# Files that pass the target to their table.
CHOOSERS = {"conv.py": {"target"}, "conv_weight.py": {"target"}}
VARIANTS = {"sum": Variant(len), "product": Variant(len, lambda n: n > 1), "gather": Variant(len)}
CHOICES = [
    Choice("gather", lacks="ScatterElements"),
    Choice("product", lambda n: n < 9, prefers="means-as-matmul"),
    Choice("sum"),
]


@pytest.mark.parametrize(
    ("target", "size", "variant"),
    [
        ("wasm", 8, "product"),
        ("wasm", 1, "sum"),  # the product variant does not apply
        ("wasm", 9, "sum"),  # the condition of the product choice is false
        ("cuda", 8, "sum"),  # cuda does not prefer the product
        ("webgpu", 8, "gather"),  # webgpu lacks ScatterElements
    ],
)
def test_the_first_applicable_choice_is_selected(target: str, size: int, variant: str) -> None:
    assert select_variant_name(find(target), size, VARIANTS, CHOICES) == variant


@pytest.mark.parametrize("folder", ["autodiff/rules", "losses"])
def test_rules_do_not_query_the_target(folder: str) -> None:
    queries = {}
    for path in sorted((SOURCE / folder).rglob("*.py")):
        name = path.relative_to(SOURCE / folder).as_posix()
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)]
        attributes = {
            n.attr for n in nodes if n.attr in ("lacks", "prefers", "preferences", "missing")
        }
        attributes |= {
            n.attr
            for n in nodes
            if n.attr == "target" and isinstance(n.value, ast.Name) and n.value.id == "op"
        }
        if attributes:
            queries[name] = attributes
    # losses/attach.py chooses the type of graph inputs, which depends on the target.
    assert queries == (
        CHOOSERS if folder == "autodiff/rules" else {"attach.py": {"lacks", "target"}}
    )


SHARED_CHOICES = {"AT_LABEL": "BY_LABEL", "WITHOUT_LABEL": "BY_LABEL"}


def tables() -> Iterator[tuple[str, dict[str, Any], Any, bool]]:
    """Yield name, variants and choices of every table, and whether targets have lists of theirs."""
    for package in (onnxtrain.autodiff.rules, onnxtrain.losses):
        for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(info.name)
            for name, variants in vars(module).items():
                stem = name.removesuffix("_VARIANTS")
                if stem == name or not name.isupper():
                    continue
                found = getattr(module, SHARED_CHOICES.get(stem, f"{stem}_CHOICES"))
                by_family = isinstance(found, dict)
                for choices in found.values() if by_family else [found]:
                    yield f"{info.name}.{stem}", variants, choices, by_family


def test_tables_name_existing_variants_and_end_with_a_fallback() -> None:
    names = set()
    for name, variants, choices, by_family in tables():
        chosen = [c.variant for c in choices]
        assert set(chosen) <= variants.keys(), name
        last = choices[-1]
        assert (last.when, last.prefers, last.lacks) == (rule_registry.always, None, None), name
        assert by_family or set(chosen) == variants.keys(), name
        names.add(name)
    assert len(names) > 25
