"""Variants of a formula: the same numbers by other operators, for speed or for what a target lacks.

A rule is written as its formula. Where targets differ in how a part of it is best computed, the
part is a table: ``FORMS`` names the ways, each with the condition under which it can be used at
all, and ``CHOICES`` says which one goes where, first match first. Facts are what the conditions
need to know: sizes and types, often a small dataclass.

>>> from onnxtrain.targets import find
>>> forms = {"sum": Form(lambda op, x: ...), "product": Form(lambda op, x: ..., lambda n: n > 1)}
>>> choices = [Choice("product", lambda n: n < 9, prefers="means-by-matmul"), Choice("sum")]
>>> [pick(find(t), n, forms, choices) for t, n in (("wasm", 8), ("wasm", 1), ("cuda", 8))]
['product', 'sum', 'sum']
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.targets import Target

Facts = TypeVar("Facts")


def always(facts: object) -> bool:
    """Return True, whatever the facts."""
    return True


@dataclasses.dataclass(frozen=True)
class Form(Generic[Facts]):
    """A way to compute something, and when it can be used at all."""

    build: Callable[..., Any]
    fits: Callable[[Facts], bool] = always


@dataclasses.dataclass(frozen=True)
class Choice(Generic[Facts]):
    """A form, and when to use it.

    Attributes:
        form: its name.
        when: asks the facts.
        prefers: only for targets that prefer this.
        lacks: only for targets that lack this.
    """

    form: str
    when: Callable[[Facts], bool] = always
    prefers: str | None = None
    lacks: str | None = None

    def wanted(self, target: Target, facts: Facts) -> bool:
        """Return whether the form is wanted, whether it fits or not."""
        if self.prefers is not None and not target.prefers(self.prefers):
            return False
        if self.lacks is not None and not target.lacks(self.lacks):
            return False
        return self.when(facts)


Forms = Mapping[str, Form[Facts]]
Choices = Sequence[Choice[Facts]]


def pick(target: Target, facts: Facts, forms: Forms[Facts], choices: Choices[Facts]) -> str:
    """Return the name of the form for a target: the first that is wanted and that fits."""
    return next(c.form for c in choices if c.wanted(target, facts) and forms[c.form].fits(facts))


def chosen(
    op: OpBuilder, facts: Facts, forms: Forms[Facts], choices: Choices[Facts]
) -> Callable[..., Any]:
    """Return the function of the form for the builder's target."""
    return forms[pick(op.target, facts, forms, choices)].build


__all__ = ["Choice", "Choices", "Form", "Forms", "always", "chosen", "pick"]
