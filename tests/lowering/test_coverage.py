"""Every decomposition is met by cases, which run at the opsets 7, 11, 13, 17 and 20."""

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
from .test_symbolic import WANTS_CONSTANTS, cut, reshaped


def test_opsets():
    assert OPSETS == (7, 11, 13, 17, 20)


def test_every_operator_has_a_case():
    lowered = {name for name in EXPANSIONS if lowerings(name)}
    # Floats instead of integers are for training alone.
    trained = {n for n in training_expansions() if "::" not in n and not is_straight_through(n)}
    wanted = (lowered | trained) - {"SimplifiedLayerNormalization"}  # onnxruntime's own name
    assert wanted - {case.op for case in CASES} == set()
    lowered = {case.op for case in CASES if not set(OPSETS) <= set(case.refused)}
    assert wanted - lowered == set()


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
def test_integers_stay_integers(case: Case):
    """Their floats round in another place at times: they are for training alone."""
    assert is_straight_through(case.op)
    lowered = lower(model_of(case), opset=13)
    assert case.op in op_types(lowered)
    (expected,), (got,) = (run(m, feeds_of(case)) for m in (model_of(case), lowered))
    np.testing.assert_array_equal(got, expected)
    with pytest.raises(LoweringError, match=case.op):
        lower(model_of(case), lacking(case), opset=13)


def test_every_decomposition_is_used(monkeypatch: pytest.MonkeyPatch):
    """Not only one of several for an operator; at opset 7, where all are needed."""
    used: Counter[str] = Counter()

    def watched(rule, op, node):
        replacement = apply_lowering(rule, op, node)
        if replacement is not None:
            used[rule.__name__] += 1
        return replacement

    monkeypatch.setattr(engine, "apply_lowering", watched)
    for case in CASES:
        if 7 in case.refused:
            continue
        lower(model_of(case), lacking(case), opset=7, verify=False)
    for case in CASES:
        _try(model_of(case), None, 7)
        _try(model_of(case, symbolic=True), lacking(case), 13)
    for name in ("Greater", "same", "finite"):
        _try(model(MASKS[name], FLOAT, 4), everything_but(*LACKS), 7)
    _try(reshaped(), WANTS_CONSTANTS, 7)
    _try(cut(), WANTS_CONSTANTS, 7)
    every = {rule.__name__ for name in EXPANSIONS for rule in lowerings(name)}
    assert sorted(every - used.keys()) == []


def _try(proto, profile, opset: int) -> None:
    with contextlib.suppress(LoweringError):  # what is refused is not asked for here
        lower(proto, profile, opset=opset, verify=False)
