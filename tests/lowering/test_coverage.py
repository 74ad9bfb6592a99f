"""The cases cover every decomposition, at opsets 7, 11, 13, 17 and 20."""

import contextlib
from collections import Counter

import numpy as np
import pytest

from onnxtrain.errors import LoweringError
from onnxtrain.expand.expansions import (
    EXPANSIONS,
    apply_lowering,
    is_straight_through,
    lowerings,
    training_expansions,
)
from onnxtrain.lowering import replace as engine
from onnxtrain.lowering.lower import lower

from .cases import CASES
from .make import c
from .single import OPSETS, Case, Const, everything_but, feeds_of, lacking, model_of, op_types, run
from .test_bool_as_int import FLOAT, LACKS, MASKS, model
from .test_symbolic import REQUIRES_CONSTANTS, reshaped, sliced


def test_opsets_of_the_cases():
    assert OPSETS == (7, 11, 13, 17, 20)


def test_every_operator_has_a_case():
    lowered = {name for name in EXPANSIONS if lowerings(name)}
    # Straight-through expansions replace integers by floats, for training only.
    trained = {n for n in training_expansions() if "::" not in n and not is_straight_through(n)}
    # onnxruntime defines SimplifiedLayerNormalization in the default domain.
    expected = (lowered | trained) - {"SimplifiedLayerNormalization"}
    assert expected - {case.op for case in CASES} == set()
    lowered = {case.op for case in CASES if not set(OPSETS) <= set(case.refused)}
    assert expected - lowered == set()


_BYTES, _STEP, _ZERO = np.arange(16, dtype=np.uint8), c(0.5, np.float32), c(3, np.uint8)
_MATRIX, _IMAGE = _BYTES.reshape(4, 4), _BYTES.reshape(1, 1, 4, 4)
INTEGERS = [
    Case("MatMulInteger", (_MATRIX, Const(_MATRIX), _ZERO, _ZERO)),
    Case("ConvInteger", (_IMAGE, Const(_IMAGE[..., :2, :2]), _ZERO, _ZERO)),
    Case("QLinearMatMul", (_MATRIX, _STEP, _ZERO, Const(_MATRIX), _STEP, _ZERO, _STEP, _ZERO)),
    Case(
        "QLinearConv",
        (_IMAGE, _STEP, _ZERO, Const(_IMAGE[..., :2, :2]), _STEP, _ZERO, _STEP, _ZERO),
    ),
]


@pytest.mark.parametrize("case", INTEGERS, ids=str)
def test_integer_operators_are_not_lowered_to_floats(case: Case):
    """Float expansions sometimes round differently; they are for training only."""
    assert is_straight_through(case.op)
    lowered = lower(model_of(case), opset=13)
    assert case.op in op_types(lowered)
    (expected,), (actual,) = (run(m, feeds_of(case)) for m in (model_of(case), lowered))
    np.testing.assert_array_equal(actual, expected)
    with pytest.raises(LoweringError, match=case.op):
        lower(model_of(case), lacking(case), opset=13)


def test_every_decomposition_is_used(monkeypatch: pytest.MonkeyPatch):
    """At opset 7, the cases use every decomposition of every operator."""
    used: Counter[str] = Counter()

    def counting_apply(rule, op, node):
        replacement = apply_lowering(rule, op, node)
        if replacement is not None:
            used[rule.__name__] += 1
        return replacement

    monkeypatch.setattr(engine, "apply_lowering", counting_apply)
    for case in CASES:
        if 7 in case.refused:
            continue
        lower(model_of(case), lacking(case), opset=7, verify=False)
    for case in CASES:
        _try(model_of(case), None, 7)
        _try(model_of(case, symbolic=True), lacking(case), 13)
    for name in ("Greater", "same", "finite"):
        _try(model(MASKS[name], FLOAT, 4), everything_but(*LACKS), 7)
    _try(reshaped(), REQUIRES_CONSTANTS, 7)
    _try(sliced(), REQUIRES_CONSTANTS, 7)
    decompositions = {rule.__name__ for name in EXPANSIONS for rule in lowerings(name)}
    assert sorted(decompositions - used.keys()) == []


def _try(proto, profile, opset: int) -> None:
    with contextlib.suppress(LoweringError):  # other tests check what is refused
        lower(proto, profile, opset=opset, verify=False)
