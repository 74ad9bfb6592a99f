"""Every spelling of the weight gradient gives torch's numbers, and is chosen where it should be."""

from __future__ import annotations

import pytest

import onnxtrain
from onnxtrain.autodiff.rules import conv_weight
from onnxtrain.autodiff.rules.conv_weight import CHOICES, FORMS, Facts, choose
from onnxtrain.graph.builder import TARGETS
from tests.cases import conv, conv_transpose
from tests.cases.base import OpCase
from tests.cases.evaluate import assert_close, oracle_of, stock
from tests.cases.questions import cotangents, feeds

CASES = [*conv.CASES, *conv_transpose.CASES]


def _applies(form: str, case: OpCase) -> bool:
    w = case.values()[1]
    assert w is not None
    return form != "depthwise" or (w.shape[1] == 1 and w.shape[0] == case.attrs.get("group", 1) > 1)


@pytest.mark.parametrize("dynamic", ["", "batch"])
@pytest.mark.parametrize(
    ("form", "case"),
    [
        pytest.param(form, case, id=f"{form}-{case.name}")
        for form in FORMS
        for case in CASES
        if _applies(form, case)
    ],
)
def test_form_equals_torch(
    form: str, case: OpCase, dynamic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conv_weight, "choose", lambda target, facts: form)
    model = onnxtrain.vjp(case.build(dynamic=dynamic), case.wrt)
    ours = stock(model)([*feeds(case), *cotangents(case).values()])
    oracle = oracle_of(case)
    assert oracle is not None
    theirs = oracle.backward(feeds(case), cotangents(case))
    assert_close(ours[1:], theirs, case.wrt, case.tol, f"{case.name} by {form}")


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_has_a_form_for_anything(target: str) -> None:
    for taps in (None, 1, 9, 65):
        for strided in (False, True):
            for channels, outs, group in ((None, None, 1), (1, 1, 8), (1, 2, 8), (32, 32, 1)):
                found = choose(target, Facts(taps, strided, channels, outs, group))
                assert found in FORMS


def test_forms_that_spell_out_taps_are_not_chosen_without_a_kernel() -> None:
    unknown = Facts(taps=None, strided=False, channels=None, outs=None, group=1)
    assert {choose(target, unknown) for target in CHOICES} <= {"lifted", "swapped"}
