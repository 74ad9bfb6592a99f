"""Every decomposition equals its operator, at five opsets, in a runtime that lacks it."""

import warnings

import numpy as np
import pytest

from onnxtrain.errors import LoweringError
from onnxtrain.graph.io import load
from onnxtrain.lowering.lower import lower
from onnxtrain.lowering.profile import unsupported_nodes

from .cases import CASES
from .single import OPSETS, Case, feeds_of, lacking, model_of, run


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_lowered_equals_original(case: Case, opset: int):
    model, runtime = model_of(case), lacking(case)
    expected = run(model, feeds_of(case))
    if opset in case.refused:
        _refused(model, runtime, opset)
        return
    lowered = lower(model, runtime, opset=opset, verify=False)
    assert not unsupported_nodes(load(lowered), runtime)
    assert lowered.opset_import[0].version == opset
    _same(expected, run(lowered, feeds_of(case)), case.tol)


@pytest.mark.parametrize("opset", [7, 13])
@pytest.mark.parametrize("case", [c for c in CASES if c.dynamic], ids=str)
def test_symbolic_first_axis(case: Case, opset: int):
    """With a symbolic first axis, outputs are the same, or the case expects a refusal."""
    model = model_of(case, symbolic=True)
    if opset in case.refused_symbolic:
        _refused(model, lacking(case), opset)
        return
    lowered = lower(model, lacking(case), opset=opset, verify=False)
    _same(run(model_of(case), feeds_of(case)), run(lowered, feeds_of(case)), case.tol)


@pytest.mark.parametrize("opset", [7, *(pytest.param(n, marks=pytest.mark.full) for n in (9, 11))])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_lower_to_opset_without_profile(case: Case, opset: int):
    """Lower to an opset with all its operators; models without an exact lowering are refused."""
    model = model_of(case)
    if opset in case.refused_plain:
        _refused(model, None, opset)
        return
    lowered = lower(model, None, opset=opset, verify=False)
    _same(run(model, feeds_of(case)), run(lowered, feeds_of(case)), case.tol)


def _refused(model, profile, opset: int) -> None:
    with pytest.raises(LoweringError, match="cannot be lowered"):
        lower(model, profile, opset=opset, verify=False)


def _same(expected, actual, tol: float) -> None:
    for a, b in zip(expected, actual, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scale = (
                max(1.0, float(np.nanmax(np.abs(a[np.isfinite(a)]), initial=0.0))) if a.size else 1
            )
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=tol * scale)
