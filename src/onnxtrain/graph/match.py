"""Match graph patterns that are written as functions over a recording builder.

A pattern is written like the code that would build the graph:

    @pattern
    def swish(op, x):
        return op.Mul(x, op.Sigmoid(x))

    match = swish.match(node)
    if match is not None:
        replace(match["x"])

Parameters after `op` are variables: they match any value, and the same variable matches the same
value everywhere. Operands of commutative operators match in both orders. `x.once()` matches a value
that a single node reads and that is not a graph output, `x.named("s")` makes an inner value part of
the match. All nodes of a match lie in the graph of the root.

`check` sees a complete match and returns whether it holds, or the reason why not. A failed check
tries the other orders of commutative operands. `Pattern.explain(node)` returns why a node does not
match; with logging at DEBUG under "onnxtrain.optimize" every near miss is logged.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from types import EllipsisType
from typing import Any

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_op

LOGGER = logging.getLogger("onnxtrain.optimize")
COMMUTATIVE = frozenset({"Add", "And", "Equal", "Max", "Min", "Mul", "Or", "Sum", "Xor"})


@dataclasses.dataclass(eq=False)
class ValuePattern:
    """What a value of the graph has to be; without `node`, a variable."""

    name: str | None = None
    node: NodePattern | None = None
    output: int = 0
    constant: float | list[int] | None = None
    used_once: bool = False

    def once(self) -> ValuePattern:
        """Require that one node reads the value and that it is not a graph output."""
        self.used_once = True
        return self

    def named(self, name: str) -> ValuePattern:
        """Make the value part of the match under a name."""
        self.name = name
        return self


@dataclasses.dataclass(eq=False)
class NodePattern:
    """What a node has to be: one of some operators with these inputs and attributes."""

    op_types: tuple[str, ...]
    inputs: tuple[ValuePattern | None, ...]
    attributes: Mapping[str, Any]
    more_inputs: bool
    outputs: tuple[ValuePattern, ...] = ()

    def orders(self, node: ir.Node) -> Iterator[tuple[ir.Value | None, ...]]:
        """Yield the node's inputs as the pattern may read them."""
        given = (*node.inputs, *[None] * (len(self.inputs) - len(node.inputs)))
        if self.more_inputs:
            given = given[: len(self.inputs)]
        yield given
        if node.op_type in COMMUTATIVE and len(given) == 2:
            yield given[::-1]


class RecordingBuilder:
    """Records the operators that a pattern calls."""

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if op_type.startswith("_"):
            raise AttributeError(op_type)
        return lambda *inputs, **attributes: self.node((op_type,), *inputs, **attributes)

    def node(
        self,
        op_types: tuple[str, ...],
        *inputs: ValuePattern | float | list[int] | EllipsisType | None,
        _outputs: int = 1,
        **attributes: Any,
    ) -> Any:
        """Record a node of one of some operators.

        Args:
            op_types: names of operators.
            inputs: values, numbers for scalar constants, lists for constant vectors, None for an
                input that is absent, and a last `...` for inputs that do not matter.
            _outputs: the number of outputs; with several, the node has to have exactly these.
            attributes: what attributes have to be: values, or functions of the value.
        """
        more = bool(inputs) and inputs[-1] is ...
        operands = tuple(
            ValuePattern(constant=x) if isinstance(x, int | float | list) else x
            for x in inputs
            if not isinstance(x, EllipsisType)
        )
        node = NodePattern(op_types, operands, attributes, more)
        node.outputs = tuple(ValuePattern(node=node, output=i) for i in range(_outputs))
        return node.outputs[0] if _outputs == 1 else node.outputs


class Match:
    """A match: the values of variables and of named inner values."""

    def __init__(self, root: ir.Node, values: Mapping[ValuePattern, ir.Value]) -> None:
        self.root = root
        self._values = {p.name: v for p, v in values.items() if p.name is not None}

    def __getitem__(self, name: str) -> ir.Value:
        return self._values[name]

    def node(self, name: str) -> ir.Node:
        """Return the node that computes a named value."""
        node = self[name].producer()
        assert node is not None
        return node


_Values = dict[ValuePattern, ir.Value]
Check = Callable[[Match], bool | str]


class Pattern:
    """A graph pattern with one result.

    Args:
        function: builds the pattern; its parameters after the first one are variables.
        check: returns whether a complete match holds, or the reason why not.
        source: maps values before variables are compared, such as an Identity to its input.
    """

    def __init__(
        self,
        function: Callable[..., ValuePattern],
        check: Check | None = None,
        source: Callable[[ir.Value], ir.Value] = lambda x: x,
    ) -> None:
        names = list(inspect.signature(function).parameters)[1:]
        self.name, self._check, self._source = function.__name__.strip("_"), check, source
        self._variables = {name: ValuePattern(name) for name in names}
        self._root = function(RecordingBuilder(), *self._variables.values())

    def match(self, node: ir.Node, /, **bound: ir.Value) -> Match | None:
        """Return the first match whose result is an output of a node.

        Args:
            node: the last node of the pattern.
            bound: values of variables that are known already.
        """
        attempt = _Attempt(node, self._source)
        found = self._search(attempt, node, bound)
        if found is None and attempt.depth > 0 and LOGGER.isEnabledFor(logging.DEBUG):
            LOGGER.debug("%s does not match %s: %s", self.name, node.name, attempt.reason)
        return found

    def find_user(self, x: ir.Value, /, **bound: ir.Value) -> Match | None:
        """Return the match of the first node that reads a value and ends the pattern."""
        matches = (self.match(use.node, **bound) for use in x.uses())
        return next((m for m in matches if m is not None), None)

    def explain(self, node: ir.Node, /, **bound: ir.Value) -> str:
        """Return why a node does not match: the reason of the attempt that got furthest."""
        attempt = _Attempt(node, self._source)
        return "it matches" if self._search(attempt, node, bound) else attempt.reason

    def _search(
        self, attempt: _Attempt, node: ir.Node, bound: Mapping[str, ir.Value]
    ) -> Match | None:
        values: _Values = {self._variables[name]: value for name, value in bound.items()}
        if self._root.output >= len(node.outputs):
            return None
        for found in attempt.value(self._root, node.outputs[self._root.output], values, 0):
            match = Match(node, found)
            verdict = True if self._check is None else self._check(match)
            if verdict is True:
                return match
            attempt.fail(1 << 16, verdict or "its check fails")
        return None


class _Attempt:
    """The search for a pattern at one node, and the failure that came after most nodes."""

    def __init__(self, root: ir.Node, source: Callable[[ir.Value], ir.Value]) -> None:
        self._graph, self._source = root.graph, source
        self.depth, self.reason = -1, ""

    def fail(self, depth: int, reason: str) -> None:
        if depth > self.depth:
            self.depth, self.reason = depth, reason

    def value(
        self, wanted: ValuePattern | None, x: ir.Value | None, values: _Values, depth: int
    ) -> Iterator[_Values]:
        """Yield the ways in which a value matches, each with all values known so far."""
        if wanted is None or x is None:
            if wanted is None and x is None:
                yield values
            else:
                self.fail(depth, "an input is absent" if x is None else f"{x.name} is present")
            return
        if wanted in values:
            if self._source(values[wanted]) is self._source(x):
                yield values
            else:
                self.fail(depth, f"{x.name} is not {values[wanted].name}")
            return
        if wanted.used_once and (len(x.uses()) != 1 or x.is_graph_output()):
            self.fail(depth, f"{x.name} has other readers")
        elif wanted.constant is not None:
            if _is_constant(x, wanted.constant):
                yield values
            else:
                self.fail(depth, f"{x.name} is not the constant {wanted.constant}")
        elif wanted.node is None:
            yield {**values, wanted: x}
        else:
            yield from self._node(wanted, wanted.node, x, values, depth + 1)

    def _node(
        self, wanted: ValuePattern, pattern: NodePattern, x: ir.Value, values: _Values, depth: int
    ) -> Iterator[_Values]:
        node = x.producer()
        if node is None or node.graph is not self._graph or not is_op(node, *pattern.op_types):
            kind = "an input" if node is None else f"computed by {node.op_type}"
            self.fail(depth - 1, f"{x.name} is {kind}, not by {' or '.join(pattern.op_types)}")
            return
        several = len(pattern.outputs) > 1
        if x is not node.outputs[wanted.output]:
            self.fail(depth, f"{x.name} is another output of {node.name}")
            return
        if several and len(node.outputs) != len(pattern.outputs):
            self.fail(depth, f"{node.name} has {len(node.outputs)} outputs")
            return
        for name, value in pattern.attributes.items():
            actual = _attribute(node, name)
            if not (value(actual) if callable(value) else value == actual):
                self.fail(depth, f"{name} of {node.name} is {actual}")
                return
        own = {**values, **dict(zip(pattern.outputs, node.outputs, strict=False))}
        for inputs in pattern.orders(node):
            if len(inputs) > len(pattern.inputs) and any(
                v is not None for v in inputs[len(pattern.inputs) :]
            ):
                self.fail(depth, f"{node.name} has more inputs")
                continue
            yield from self._inputs(list(zip(pattern.inputs, inputs, strict=False)), own, depth)

    def _inputs(
        self, pairs: list[tuple[ValuePattern | None, ir.Value | None]], values: _Values, depth: int
    ) -> Iterator[_Values]:
        if not pairs:
            yield values
            return
        (wanted, x), *rest = pairs
        for found in self.value(wanted, x, values, depth):
            yield from self._inputs(rest, found, depth + 1)


def _is_constant(x: ir.Value, constant: float | list[int]) -> bool:
    array = S.constant_of(x)
    if array is None or isinstance(constant, list):
        return array is not None and array.tolist() == constant
    return array.size == 1 and array.item() == constant


def _attribute(node: ir.Node, name: str) -> Any:
    if name in node.attributes:
        return S.python_value(node.attributes[name])
    opset = None if node.graph is None else node.graph.opset_imports.get(node.domain)
    return S.attributes_of(node, opset or 21).get(name)


def pattern(function: Callable[..., ValuePattern]) -> Pattern:
    """Return the pattern that a function writes."""
    return Pattern(function)


def checked(check: Check) -> Callable[[Callable[..., ValuePattern]], Pattern]:
    """Return a decorator for patterns whose matches have to pass a check."""
    return lambda function: Pattern(function, check)


__all__ = ["COMMUTATIVE", "Match", "Pattern", "ValuePattern", "checked", "pattern"]
