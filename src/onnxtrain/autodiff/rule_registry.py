"""Registry of gradient rules, and variants of a rule per target.

Lookup order for a node: a rule, a declared zero or missing gradient, the function body of the
standard (inlined by ``prepare``), an error. Operators of other domains have the key
``"Domain::Op"``.

A rule is written as its formula. Where targets differ in the fastest way to compute a part of it,
the part has two tables. ``..._VARIANTS`` names the implementations, each with the condition under
which it applies at all. ``..._CHOICES`` lists which one to use where; the first match wins. The
conditions read facts: sizes and dtypes, often a small dataclass. All variants compute the same
values.

>>> from onnxtrain.targets import find
>>> variants = {"sum": Variant(lambda op, x: ...)}
>>> variants["matmul"] = Variant(lambda op, x: ..., lambda n: n > 1)
>>> choices = [Choice("matmul", lambda n: n < 9, prefers="means-as-matmul"), Choice("sum")]
>>> cases = (("wasm", 8), ("wasm", 1), ("cuda", 8))
>>> [select_variant_name(find(t), n, variants, choices) for t, n in cases]
['matmul', 'sum', 'sum']
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import onnx_ir as ir

from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.call_by_signature import call_by_signature
from onnxtrain.graph.nodes import op_key, stops_gradient
from onnxtrain.targets import Target

Gradient = ir.Value | None
Gradients = Gradient | tuple[Gradient, ...]


@dataclasses.dataclass(frozen=True)
class Undefined:
    """A gradient without a formula; an error only if it is needed."""

    why: str


def undefined(why: str) -> Any:
    """Return the marker that a rule returns for a gradient it cannot compute."""
    return Undefined(why)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Computes the gradients of a node's inputs from those of its outputs."""

    op: str
    function: Callable[..., Any]
    multi: bool = False
    """The function receives ``dys``, one per output, instead of ``dy``."""
    broadcasts: bool = False
    """Inputs broadcast; the driver sums gradients back to their shapes."""
    constant_inputs: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Inputs that get no gradient although they may be floats, with the reason."""


RULES: dict[str, Rule] = {}
ZERO_GRADIENT: dict[str, str] = {}
"""Operators whose gradient is zero wherever it is defined, with the reason."""
NO_GRADIENT: dict[str, str] = {}
"""Operators that have no gradient: integer or boolean results, randomness, quantization ..."""
NOT_DIFFERENTIABLE: set[str] = set()
"""Those of ``NO_GRADIENT`` where a zero gradient would be wrong: differentiating them raises."""
USER_RULES: dict[str, Rule] = {}
KEEP_UNEXPANDED: dict[str, Callable[[ir.Node], bool]] = {}
"""Operators with a rule and a decomposition: a predicate, whether the rule covers a node."""


STRAIGHT_THROUGH_RULES: dict[str, Rule] = {}
"""Straight-through rules of quantizers: gradients pass inside the integer range."""
_STRAIGHT_THROUGH_KEY = "onnxtrain.straight_through"  # key in Node.meta


def mark_straight_through(nodes: Iterable[ir.Node]) -> int:
    """Mark the quantizers among ``nodes`` as straight-through; return how many there are."""
    count = 0
    for node in nodes:
        if op_key(node) in STRAIGHT_THROUGH_RULES:
            node.meta[_STRAIGHT_THROUGH_KEY] = True
            count += 1
    return count


def is_straight_through(node: ir.Node) -> bool:
    """Return whether a node is a straight-through quantizer."""
    return bool(node.meta.get(_STRAIGHT_THROUGH_KEY))


_STOP_GRADIENT_KEY = "onnxtrain.stopped"


def find_rule(node: ir.Node) -> Rule | None:
    """Return the rule of a node; rules of the user take precedence."""
    if stops_gradient(node):
        return None
    key = op_key(node)
    straight = STRAIGHT_THROUGH_RULES.get(key) if is_straight_through(node) else None
    return USER_RULES.get(key) or straight or RULES.get(key)


def mark_stop_gradient(node: ir.Node | None) -> None:
    """Stop the gradient at a node, because another node computes it."""
    assert node is not None
    node.meta[_STOP_GRADIENT_KEY] = True


def blocks_gradient(node: ir.Node) -> bool:
    """Return whether the node is declared to pass no gradient."""
    if node.meta.get(_STOP_GRADIENT_KEY):
        return True
    key = op_key(node)
    known = key in ZERO_GRADIENT or key in NO_GRADIENT or stops_gradient(node)
    return find_rule(node) is None and known


def is_not_differentiable(node: ir.Node) -> bool:
    """Return whether it is an error to differentiate through the node."""
    return blocks_gradient(node) and op_key(node) in NOT_DIFFERENTIABLE


def has_user_rule(node: ir.Node) -> bool:
    """Return whether the user registered a rule for the node."""
    return op_key(node) in USER_RULES


def vjp(
    *ops: str, broadcasts: bool = False, constant_inputs: Mapping[int, str] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a rule for operators that have one differentiable output."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            _add(Rule(op, function, broadcasts=broadcasts, constant_inputs=constant_inputs or {}))
        return function

    return register


def vjp_multi(
    *ops: str, constant_inputs: Mapping[int, str] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a rule that receives ``dys``, one gradient per output (``None`` = zero)."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            _add(Rule(op, function, multi=True, constant_inputs=constant_inputs or {}))
        return function

    return register


def elementwise(op: str, function: Callable[..., Any]) -> None:
    """Register a rule of a broadcasting operator; the rule may ignore broadcasting."""
    _add(Rule(op, function, broadcasts=True))


def zero_gradient(*ops: str, why: str) -> None:
    """Declare operators whose gradient is zero wherever it exists."""
    ZERO_GRADIENT.update(dict.fromkeys(ops, why))


def no_gradient(*ops: str, why: str, refuse: bool = False) -> None:
    """Declare operators without a gradient; with ``refuse``, differentiating them raises."""
    NO_GRADIENT.update(dict.fromkeys(ops, why))
    NOT_DIFFERENTIABLE.update(ops if refuse else ())


def register_vjp(
    op: str, *, multi: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a gradient rule for a custom operator, or replace a built-in rule.

    Args:
        op: ``"MyDomain::MyOp"``, or the bare name of a standard operator.
        multi: the rule receives ``dys``, one per output, instead of ``dy``.

    >>> from onnxtrain.autodiff.rule_registry import USER_RULES
    >>> @register_vjp("acme::Twice")
    ... def twice(op, dy, x):
    ...     return op.Mul(dy, 2.0)
    >>> del USER_RULES["acme::Twice"]
    """
    key = op.removeprefix("::").removeprefix("ai.onnx::")

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        USER_RULES[key] = Rule(key, function, multi=multi)
        return function

    return register


def call_rule(
    rule: Rule,
    op: OpBuilder,
    node: ir.Node,
    dys: list[Gradient],
    wanted: tuple[bool, ...],
) -> list[Any]:
    """Apply a rule; return one entry per input: a value, ``None`` or :class:`Undefined`."""
    context = {"y": node.outputs[0], "outputs": node.outputs, "node": node, "wanted": wanted}
    dy = dys if rule.multi else dys[0]
    rule_grads = call_by_signature(rule.function, op, node, dy, context=context)
    grads = list(rule_grads) if isinstance(rule_grads, tuple | list) else [rule_grads]
    grads += [None] * (len(node.inputs) - len(grads))
    if rule.broadcasts:
        grads = [
            op.sum_to(g, x) if isinstance(g, ir.Value) and x is not None and w else g
            for g, x, w in zip(grads, node.inputs, wanted, strict=False)
        ]
    return grads


def _add(rule: Rule) -> None:
    if rule.op in RULES:
        raise ValueError(f"a gradient rule for {rule.op} is already registered")
    RULES[rule.op] = rule


Facts = TypeVar("Facts")


def always(facts: object) -> bool:
    """Return True, whatever the facts."""
    return True


@dataclasses.dataclass(frozen=True)
class Variant(Generic[Facts]):
    """An implementation, and the condition under which it applies."""

    build: Callable[..., Any]
    fits: Callable[[Facts], bool] = always


@dataclasses.dataclass(frozen=True)
class Choice(Generic[Facts]):
    """A variant, and when to use it.

    Attributes:
        variant: its name.
        when: condition on the facts.
        prefers: only for targets that prefer this.
        lacks: only for targets that lack this.
    """

    variant: str
    when: Callable[[Facts], bool] = always
    prefers: str | None = None
    lacks: str | None = None

    def wanted(self, target: Target, facts: Facts) -> bool:
        """Return whether the variant is preferred, whether it applies or not."""
        if self.prefers is not None and not target.prefers(self.prefers):
            return False
        if self.lacks is not None and not target.lacks(self.lacks):
            return False
        return self.when(facts)


Variants = Mapping[str, Variant[Facts]]
Choices = Sequence[Choice[Facts]]


def select_variant_name(
    target: Target, facts: Facts, variants: Variants[Facts], choices: Choices[Facts]
) -> str:
    """Return the name of the first variant that is preferred and applies."""
    return next(
        c.variant for c in choices if c.wanted(target, facts) and variants[c.variant].fits(facts)
    )


def select_variant(
    op: OpBuilder, facts: Facts, variants: Variants[Facts], choices: Choices[Facts]
) -> Callable[..., Any]:
    """Return the function of the variant for the builder's target."""
    return variants[select_variant_name(op.target, facts, variants, choices)].build
