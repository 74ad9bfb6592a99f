"""Gradient rules, by operator.

Look-up order for a node: a rule, a declared zero or missing gradient, the operator's official
function body (inlined by ``prepare``), an error. Operators of another domain are keyed
``"Domain::Op"``.

Variants of a formula: the same numbers by other operators, for speed or for what a target lacks.

A rule is written as its formula. Where targets differ in how a part of it is best computed, the
part is a table: ``FORMS`` names the ways, each with the condition under which it can be used at
all, and ``CHOICES`` says which one goes where, first match first. Facts are what the conditions
need to know: sizes and types, often a small dataclass.

>>> from onnxtrain.targets import find
>>> forms = {"sum": Form(lambda op, x: ...), "product": Form(lambda op, x: ..., lambda n: n > 1)}
>>> choices = [Choice("product", lambda n: n < 9, prefers="means-as-matmul"), Choice("sum")]
>>> [pick(find(t), n, forms, choices) for t, n in (("wasm", 8), ("wasm", 1), ("cuda", 8))]
['product', 'sum', 'sum']
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
    """Stands for a gradient we do not have; an error only if somebody wants it."""

    why: str


def undefined(why: str) -> Any:
    """Return the marker a rule returns in place of a gradient that it cannot do right."""
    return Undefined(why)


@dataclasses.dataclass(frozen=True)
class Rule:
    """How to turn the gradients of a node's outputs into those of its inputs."""

    op: str
    function: Callable[..., Any]
    multi: bool = False
    """The function gets ``dys``, one per output, and not ``dy``."""
    broadcasts: bool = False
    """Inputs broadcast; the driver sums gradients back to their shapes."""
    constant_inputs: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Inputs through which no gradient flows though they may be floats, with the reason."""


RULES: dict[str, Rule] = {}
ZERO_GRADIENT: dict[str, str] = {}
"""Operators whose gradient is zero wherever it is defined, with the reason."""
NO_GRADIENT: dict[str, str] = {}
"""Operators that have no gradient: integer or boolean results, randomness, quantisation ..."""
NOT_DIFFERENTIABLE: set[str] = set()
"""Those of ``NO_GRADIENT`` where zeros would be a trap: it is an error to want a gradient."""
USER_RULES: dict[str, Rule] = {}
KEEP_UNEXPANDED: dict[str, Callable[[ir.Node], bool]] = {}
"""Operators with a rule and a decomposition: tells of a node whether the rule knows its form."""


STRAIGHT_THROUGH_RULES: dict[str, Rule] = {}
"""Rules of quantisers that are trained straight through: gradients pass inside their range."""
_STRAIGHT_THROUGH_KEY = "onnxtrain.straight_through"  # key in Node.meta


def mark_straight_through(nodes: Iterable[ir.Node]) -> int:
    """Let gradients pass the quantisers among some nodes; return how many there are."""
    count = 0
    for node in nodes:
        if op_key(node) in STRAIGHT_THROUGH_RULES:
            node.meta[_STRAIGHT_THROUGH_KEY] = True
            count += 1
    return count


def is_straight_through(node: ir.Node) -> bool:
    """Return whether gradients pass a quantiser as if it did not round."""
    return bool(node.meta.get(_STRAIGHT_THROUGH_KEY))


_STOP_GRADIENT_KEY = "onnxtrain.stopped"


def find_rule(node: ir.Node) -> Rule | None:
    """Return the rule of a node; users' own go first."""
    if stops_gradient(node):
        return None
    key = op_key(node)
    straight = STRAIGHT_THROUGH_RULES.get(key) if is_straight_through(node) else None
    return USER_RULES.get(key) or straight or RULES.get(key)


def mark_stop_gradient(node: ir.Node | None) -> None:
    """Say that no gradient flows through a node, since its gradient is brought in another way."""
    assert node is not None
    node.meta[_STOP_GRADIENT_KEY] = True


def blocks_gradient(node: ir.Node) -> bool:
    """Return whether no gradient flows through the node, by declaration."""
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
    """Register a rule whose inputs broadcast; it may ignore that."""
    _add(Rule(op, function, broadcasts=True))


def zero_gradient(*ops: str, why: str) -> None:
    """Declare operators whose gradient is zero wherever it exists."""
    ZERO_GRADIENT.update(dict.fromkeys(ops, why))


def no_gradient(*ops: str, why: str, refuse: bool = False) -> None:
    """Declare operators without a gradient; ``refuse`` makes it an error to want one."""
    NO_GRADIENT.update(dict.fromkeys(ops, why))
    NOT_DIFFERENTIABLE.update(ops if refuse else ())


def register_vjp(
    op: str, *, multi: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register your own gradient rule, for a custom operator or in place of a built-in rule.

    Args:
        op: ``"MyDomain::MyOp"``, or the bare name of a standard operator.
        multi: the rule receives ``dys``, one per output, where it would receive ``dy``.

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


Variants = Mapping[str, Variant[Facts]]
Choices = Sequence[Choice[Facts]]


def select_variant_name(
    target: Target, facts: Facts, forms: Variants[Facts], choices: Choices[Facts]
) -> str:
    """Return the name of the form for a target: the first that is wanted and that fits."""
    return next(c.form for c in choices if c.wanted(target, facts) and forms[c.form].fits(facts))


def select_variant(
    op: OpBuilder, facts: Facts, forms: Variants[Facts], choices: Choices[Facts]
) -> Callable[..., Any]:
    """Return the function of the form for the builder's target."""
    return forms[select_variant_name(op.target, facts, forms, choices)].build
