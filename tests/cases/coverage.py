"""The coverage of every operator: how it is differentiated, and which cases test it."""

from __future__ import annotations

from collections import Counter
from functools import cache

import onnx

from onnxtrain.autodiff.explain import operators
from onnxtrain.importer.opset import NEWEST_OPSET
from tests.cases.collect import CASES

WORKING_OPSET = 21


@cache
def standard_operators() -> dict[str, onnx.defs.OpSchema]:
    """The newest schema of every operator of ai.onnx that is not deprecated, by name."""
    newest: dict[str, onnx.defs.OpSchema] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.since_version <= NEWEST_OPSET:
            known = newest.get(schema.name)
            if known is None or known.since_version < schema.since_version:
                newest[schema.name] = schema
    return {name: s for name, s in sorted(newest.items()) if not s.deprecated}


@cache
def _known() -> dict[str, str]:
    return {report.name: report.how for report in operators()}


def how(op: str) -> str | None:
    """How an operator is differentiated: rule, zero, none, decomposed or body; None if unknown."""
    kind = _known().get(op)
    return None if kind == "missing" else kind


def case_counts() -> Counter[str]:
    """How many cases every operator has."""
    return Counter(case.op for case in CASES)
