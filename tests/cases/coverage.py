"""What is known about every operator: how it is differentiated, and by which cases."""

from __future__ import annotations

from collections import Counter
from functools import cache

import onnx

from onnxtrain.autodiff import registry, rules  # noqa: F401 - importing the rules fills the registry
from tests.cases.collect import CASES

WORKING_OPSET, NEWEST_OPSET = 21, 26


@cache
def standard_operators() -> dict[str, onnx.defs.OpSchema]:
    """The newest schema up to opset 26 of every operator of ai.onnx that is not deprecated."""
    newest: dict[str, onnx.defs.OpSchema] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.since_version <= NEWEST_OPSET:
            known = newest.get(schema.name)
            if known is None or known.since_version < schema.since_version:
                newest[schema.name] = schema
    return {name: s for name, s in sorted(newest.items()) if not s.deprecated}


def how(op: str) -> str | None:
    """How an operator is differentiated: rule, zero, none, decomposed or body; None if unknown."""
    if op in registry.RULES:
        return "rule"
    if op in registry.ZERO:
        return "zero"
    if op in registry.NO_GRADIENT:
        return "none"
    schema = standard_operators().get(op)
    has_body = schema is not None and (schema.has_function or schema.has_context_dependent_function)
    return "body" if has_body else None


def case_counts() -> Counter[str]:
    """How many cases every operator has."""
    return Counter(case.op for case in CASES)
