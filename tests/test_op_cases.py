"""One table, many questions: see tests/cases/base.py for how to add a case."""

from __future__ import annotations

import re

import pytest

from tests.cases import questions
from tests.cases.base import OpCase
from tests.cases.collect import CASES, FAMILIES, load_family


def ask(question: str) -> pytest.MarkDecorator:
    """Parametrise a test over all cases, with the expected failures of this question marked."""
    params = []
    for case in CASES:
        head, _, reason = case.xfail.partition(":")
        expected = set(re.split(r"\s*,\s*", head)) & {question, "all"}
        marks = [pytest.mark.xfail(reason=reason.strip(), strict=True)] if expected else []
        params.append(pytest.param(case, id=case.name, marks=marks))
    return pytest.mark.parametrize("case", params)


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str) -> None:
    assert all(isinstance(case, OpCase) for case in load_family(family))


@ask("finite")
def test_finite_differences(case: OpCase) -> None:
    questions.finite(case)


@ask("oracle")
def test_equals_oracle(case: OpCase) -> None:
    questions.oracle(case)


@ask("dynamic")
def test_dynamic_equals_static(case: OpCase) -> None:
    if case.dynamic.startswith("none"):
        pytest.skip(case.dynamic)
    questions.dynamic(case)


@ask("second")
def test_second_order(case: OpCase) -> None:
    if case.order < 2:
        pytest.skip("the case asks for the first derivative only")
    questions.second(case)


@ask("standard")
def test_standard_operators(case: OpCase) -> None:
    questions.standard(case)


@ask("rebuild")
def test_same_bytes_again(case: OpCase) -> None:
    questions.rebuild(case)


@ask("closed")
def test_closed_under_differentiation(case: OpCase) -> None:
    questions.closed(case)


@ask("targets")
def test_targets_agree(case: OpCase) -> None:
    questions.targets(case)
