"""The checks notice wrong rules: each fault below is caught by the check named beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onnxtrain.autodiff import rule_registry
from tests.cases import checks
from tests.cases.base import OpCase, at, f


def install(monkeypatch: pytest.MonkeyPatch, op: str, rule: Callable[..., Any]) -> None:
    """Put a rule in the place of a built-in one, for one test."""
    monkeypatch.setattr(rule_registry, "USER_RULES", {})
    rule_registry.register_vjp(op)(rule)


def off_by_a_little(op: Any, dy: Any, x: Any, *, y: Any) -> Any:
    """A gradient that is one percent too large."""
    return op.Mul(dy, op.Mul(1.01, op.Sub(1.0, op.Mul(y, y))))


@pytest.mark.parametrize("check", [checks.finite, checks.oracle, checks.second])
def test_a_wrong_value_is_noticed(
    check: Callable[[OpCase], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "Tanh", off_by_a_little)
    with pytest.raises(AssertionError, match="Tanh-plain"):
        check(OpCase("Tanh", (f(3, 4),), torch=torch.tanh))


@pytest.mark.parametrize("forward", ["reference", "torch", "onnxruntime", "vjp"])
def test_a_wrong_value_is_noticed_by_every_forward(
    forward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def double(op: Any, dy: Any, x: Any, *, y: Any) -> Any:
        return op.Mul(2.0, op.Mul(dy, op.Sub(1.0, op.Mul(y, y))))

    checks.finite(OpCase("Tanh", (f(3, 4),), torch=torch.tanh, forward=forward))
    install(monkeypatch, "Tanh", double)
    with pytest.raises(AssertionError, match="gradient along a direction"):
        checks.finite(OpCase("Tanh", (f(3, 4),), torch=torch.tanh, forward=forward))


def test_without_an_oracle_float64_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    checks.oracle(OpCase("Tanh", (f(3, 4),)))
    checks.second(OpCase("Tanh", (f(3, 4),)))
    checks.oracle(OpCase("Tanh", (f(3, 4),), forward="onnxruntime"))
    checks.second(OpCase("Tanh", (f(3, 4),), forward="onnxruntime"))
    install(monkeypatch, "Tanh", off_by_a_little)
    with pytest.raises(AssertionError, match="difference"):
        checks.finite(OpCase("Tanh", (f(3, 4),)))


def test_a_jump_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "Floor", lambda op, dy, x: op.Mul(dy, 0.0))
    checks.finite(OpCase("Floor", (at([0.5, 1.5]),)))
    with pytest.raises(AssertionError, match="unstable finite difference"):
        checks.finite(OpCase("Floor", (at([1.0, 2.0]),)))


def test_a_dead_node_is_noticed() -> None:
    text = "g (float[2] x) => (float[2] y) { z = Neg (x) y = Abs (x) }"
    case = OpCase("Abs", (f(2),), model=text)
    with pytest.raises(AssertionError, match="dead nodes"):
        checks.check_standard(case.build())


@pytest.mark.parametrize(
    "fields",
    [
        {"xfail": "no reason"},
        {"xfail": "finite:"},
        {"xfail": "fnite: a reason"},
        {"dynamic": "batch"},
        {"forward": "torch"},
        {"forward": "jax"},
    ],
)
def test_a_careless_case_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Tanh"):
        OpCase("Tanh", (f(2),), **fields)
