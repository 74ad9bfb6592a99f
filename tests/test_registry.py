"""The registry is complete, and its rules have the signatures that the ONNX schemas give."""

from __future__ import annotations

import inspect

import onnx
import pytest

from onnxtrain.autodiff import rule_registry
from tests.cases.coverage import NEWEST_OPSET, WORKING_OPSET, case_counts, how, standard_operators

CONTEXT = {"y", "outputs", "node", "wanted"}
STANDARD_RULES = sorted(op for op in rule_registry.RULES if "::" not in op)


def schemas_of(op: str) -> list[onnx.defs.OpSchema]:
    """The schemas a rule may meet: the working opset's, and the newest one."""
    schemas = []
    for opset in (WORKING_OPSET, NEWEST_OPSET):
        try:
            schemas.append(onnx.defs.get_schema(op, opset))
        except onnx.defs.SchemaError:
            continue
    return schemas


@pytest.mark.parametrize("op", STANDARD_RULES)
def test_signature_fits_schema(op: str) -> None:
    rule = rule_registry.RULES[op]
    schemas = schemas_of(op)
    assert schemas, f"{op} is not an operator of ai.onnx up to opset {NEWEST_OPSET}"
    parameters = list(inspect.signature(rule.function).parameters.values())
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    rest = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert [p.name for p in positional[:2]] == ["op", "dys" if rule.multi else "dy"]
    inputs = positional[2:]
    attributes = {name for s in schemas for name in s.attributes}
    unknown = keywords - attributes - CONTEXT
    assert not unknown, f"{op} has no attribute {sorted(unknown)}; it has {sorted(attributes)}"
    most = max(s.max_input for s in schemas)
    least = min(s.min_input for s in schemas)
    required = [p for p in inputs if p.default is p.empty]
    assert len(required) <= least, f"{op} may have {least} inputs; give the others a default None"
    variadic = most > 1000
    assert rest or (not variadic and len(inputs) == most), f"{op} takes up to {most} inputs"
    assert all(i < most for i in rule.constant_inputs)
    assert all(rule.constant_inputs.values()), f"{op}: a constant input needs a reason"


def test_every_operator_is_accounted_for() -> None:
    unknown = [op for op in standard_operators() if how(op) is None]
    assert not unknown, f"neither rule, body, decomposition, zero nor none: {unknown}"


def test_every_refusal_has_its_reason() -> None:
    reasons = {**rule_registry.ZERO_GRADIENT, **rule_registry.NO_GRADIENT}
    assert not [op for op, why in reasons.items() if not why.strip()]


def test_an_operator_is_declared_once() -> None:
    kinds = (
        set(rule_registry.RULES),
        set(rule_registry.ZERO_GRADIENT),
        set(rule_registry.NO_GRADIENT),
    )
    assert not (kinds[0] & kinds[1] | kinds[0] & kinds[2] | kinds[1] & kinds[2])


def test_declared_names_exist() -> None:
    declared = {*rule_registry.ZERO_GRADIENT, *rule_registry.NO_GRADIENT}
    assert not [op for op in sorted(declared) if "::" not in op and not schemas_of(op)]


def test_two_cases_per_differentiable_operator() -> None:
    counts = case_counts()
    ways = {"rule", "body", "decomposed"}
    few = [op for op in standard_operators() if how(op) in ways and counts[op] < 2]
    assert not few, f"{len(few)} operators have fewer than two cases: {few}"
