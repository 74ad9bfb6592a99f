"""The public check of gradient rules finds wrong ones and passes right ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import onnxtrain
from onnxtrain.autodiff import rule_registry
from onnxtrain.errors import OnnxTrainError
from onnxtrain.testing import check_rule

X = np.linspace(-1.4, 1.6, 6).reshape(2, 3)


@pytest.fixture(autouse=True)
def _own_rules() -> Iterator[None]:
    before = dict(rule_registry.USER_RULES)
    yield
    rule_registry.USER_RULES.clear()
    rule_registry.USER_RULES.update(before)


def test_rules_of_ours() -> None:
    check_rule("Sin", X)
    check_rule("Gemm", X, np.ones((4, 3)), None, attributes={"transB": 1, "alpha": 0.5})
    check_rule("ReduceMean", X, np.array([1]), attributes={"keepdims": 0})
    check_rule("Split", X, attributes={"axis": 1, "num_outputs": 3}, outputs=3)
    check_rule("Floor", X + 0.05)  # declared: zero wherever it exists


def test_a_rule_of_the_user() -> None:
    def scaled_cube(x: np.ndarray, factor: float) -> np.ndarray:
        return factor * x**3

    @onnxtrain.register_vjp("acme::ScaledCube")
    def rule(op, dy, x, *, factor):
        return op.Mul(dy, op.Mul(op.Mul(x, x), 3.0 * factor))

    check_rule("acme::ScaledCube", X, attributes={"factor": 2.0}, forward=scaled_cube)

    @onnxtrain.register_vjp("acme::ScaledCube")
    def wrong(op, dy, x, *, factor):
        return op.Mul(dy, op.Mul(op.Mul(x, x), 3.0))

    with pytest.raises(AssertionError, match=r"acme::ScaledCube, input 0: the gradient is off by"):
        check_rule("acme::ScaledCube", X, attributes={"factor": 2.0}, forward=scaled_cube)


def test_several_inputs_and_outputs() -> None:
    @onnxtrain.register_vjp("acme::SumAndProduct", multi=True)
    def rule(op, dys, a, b):
        total, product = dys
        return (
            op.Add(total, op.Mul(product, b)),
            op.Add(total, op.Mul(product, op.Mul(a, 1.5))),  # wrong
        )

    with pytest.raises(AssertionError, match="input 1"):
        check_rule("acme::SumAndProduct", X, X + 2, forward=lambda a, b: (a + b, a * b), outputs=2)


def test_a_wrong_shape_is_wrong() -> None:
    onnxtrain.register_vjp("acme::Double")(lambda op, dy, x: op.ReduceSum(dy, keepdims=1))
    with pytest.raises((AssertionError, OnnxTrainError)):
        check_rule("acme::Double", X, forward=lambda x: 2 * x)


def test_refusals() -> None:
    with pytest.raises(OnnxTrainError, match="no gradient rule for acme::Nothing"):
        check_rule("acme::Nothing", X, forward=lambda x: x)
    onnxtrain.register_vjp("acme::Same")(lambda op, dy, x: dy)
    with pytest.raises(OnnxTrainError, match="acme::Same is not a standard operator"):
        check_rule("acme::Same", X)
    with pytest.raises(OnnxTrainError, match="float elements"):
        check_rule("Erf", np.array([1]))
    with pytest.raises(OnnxTrainError, match="returns 1 outputs, expected 2"):
        check_rule("acme::Same", X, forward=lambda x: x, outputs=2)
