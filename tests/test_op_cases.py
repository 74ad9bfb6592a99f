"""One table, many checks: see tests/cases/base.py for how to add a case."""

from __future__ import annotations

import re

import pytest

from tests.cases import checks
from tests.cases.base import OpCase
from tests.cases.collect import CASES, FAMILIES, load_family


def parametrize_cases(check: str) -> pytest.MarkDecorator:
    """Parametrize a test over all cases, with the expected failures of this check marked."""
    params = []
    for case in CASES:
        head, _, reason = case.xfail.partition(":")
        expected = set(re.split(r"\s*,\s*", head)) & {check, "all"}
        marks = [pytest.mark.xfail(reason=reason.strip(), strict=True)] if expected else []
        params.append(pytest.param(case, id=case.name, marks=marks))
    return pytest.mark.parametrize("case", params)


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str) -> None:
    assert all(isinstance(case, OpCase) for case in load_family(family))


@parametrize_cases("finite")
def test_finite_differences(case: OpCase) -> None:
    checks.finite(case)


@parametrize_cases("oracle")
def test_equals_oracle(case: OpCase) -> None:
    checks.oracle(case)


@parametrize_cases("dynamic")
def test_dynamic_equals_static(case: OpCase) -> None:
    if case.dynamic.startswith("none"):
        pytest.skip(case.dynamic)
    checks.dynamic(case)


@parametrize_cases("second")
def test_second_order(case: OpCase) -> None:
    if case.order < 2:
        pytest.skip("the case asks for the first derivative only")
    checks.second(case)


@parametrize_cases("standard")
def test_standard_operators(case: OpCase) -> None:
    checks.standard(case)


@parametrize_cases("rebuild")
def test_same_bytes_again(case: OpCase) -> None:
    checks.rebuild(case)


@parametrize_cases("closed")
def test_closed_under_differentiation(case: OpCase) -> None:
    checks.closed(case)


@parametrize_cases("targets")
def test_targets_agree(case: OpCase) -> None:
    checks.targets(case)
