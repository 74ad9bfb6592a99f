"""The questions notice wrong rules: each fault below is caught by the question named beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onnxtrain.autodiff import registry
from tests.cases import questions
from tests.cases.base import OpCase, distinct, f


def install(monkeypatch: pytest.MonkeyPatch, op: str, rule: Callable[..., Any]) -> None:
    """Put a rule in the place of a built-in one, for one test."""
    monkeypatch.setattr(registry, "USER_RULES", {})
    registry.register_vjp(op)(rule)


def off_by_a_little(op: Any, dy: Any, x: Any, *, y: Any) -> Any:
    """A gradient that is one percent too large."""
    return op.Mul(dy, op.Mul(1.01, op.Sub(1.0, op.Mul(y, y))))


@pytest.mark.parametrize("ask", [questions.finite, questions.oracle, questions.second])
def test_a_wrong_value_is_noticed(
    ask: Callable[[OpCase], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "Tanh", off_by_a_little)
    with pytest.raises(AssertionError, match="Tanh-plain"):
        ask(OpCase("Tanh", (f(3, 4),), torch=torch.tanh))


@pytest.mark.parametrize("forward", ["reference", "torch", "onnxruntime", "vjp"])
def test_a_wrong_value_is_noticed_by_every_forward(
    forward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def double(op: Any, dy: Any, x: Any, *, y: Any) -> Any:
        return op.Mul(2.0, op.Mul(dy, op.Sub(1.0, op.Mul(y, y))))

    questions.finite(OpCase("Tanh", (f(3, 4),), torch=torch.tanh, forward=forward))
    install(monkeypatch, "Tanh", double)
    with pytest.raises(AssertionError, match="gradient along a direction"):
        questions.finite(OpCase("Tanh", (f(3, 4),), torch=torch.tanh, forward=forward))


def test_without_an_oracle_float64_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    questions.oracle(OpCase("Tanh", (f(3, 4),)))
    questions.second(OpCase("Tanh", (f(3, 4),)))
    questions.oracle(OpCase("Tanh", (f(3, 4),), forward="onnxruntime"))
    questions.second(OpCase("Tanh", (f(3, 4),), forward="onnxruntime"))
    install(monkeypatch, "Tanh", off_by_a_little)
    with pytest.raises(AssertionError, match="difference"):
        questions.finite(OpCase("Tanh", (f(3, 4),)))


def test_a_kink_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "Sign", lambda op, dy, x: op.Mul(dy, 0.0))
    text = "g (float[2] x) => (float[2] y) { z = Sub (x, x) a = Abs (x) y = Floor (a) }"
    case = OpCase("Floor", (distinct(2),), model=text, id="kink")
    jump = OpCase("Floor", (at([1.0, 2.0]),), id="jump")
    questions.finite(case)
    with pytest.raises(AssertionError, match="unstable finite difference"):
        questions.finite(jump)


def at(values: list[float]) -> Any:
    """A differentiated input with given values."""
    import dataclasses

    from tests.cases.base import const

    return dataclasses.replace(const(values), kind="wrt")
