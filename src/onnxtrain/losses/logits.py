"""Logits behind probabilities: what losses of logits read of a model that ends in an activation.

Classifiers exported for inference end in Softmax or Sigmoid. Cross entropy applies the activation
itself, so it reads the value before it:

    before:  z -> Softmax -> Reshape -> p -> loss
    after:   z -> Softmax -> Reshape -> p (still an output),  z -> Reshape -> loss

:func:`find_logits` walks back from an output over nodes that only move, cast or guard elements. A
node that computes with probabilities (a tight Clip, an average of classifiers) is an error.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import PrepareError, argument, term_of_output
from onnxtrain.expand.activations import smooth_softplus
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, copy_node
from onnxtrain.graph.nodes import is_op, is_standard, stops_gradient
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim


class Reads(enum.Enum):
    """What a loss expects as its prediction."""

    VALUES = "values"
    """Any values."""
    SOFTMAX_LOGITS = "logits, and applies Softmax"
    SIGMOID_LOGITS = "logits, and applies Sigmoid"
    LOG_PROBABILITIES = "log-probabilities"


@dataclasses.dataclass(frozen=True)
class Logits:
    """A prediction without its activation."""

    value: ir.Value
    repair: str
    """A line for the report of a build."""


def find_logits(
    op: OpBuilder, loss: str, name: str, reads: Reads, y: ir.Value, axis: int | None
) -> Logits | None:
    """Return what a loss reads instead of ``y``; ``None`` if it can read ``y`` itself.

    Args:
        op: the builder that receives copies of the nodes after the activation.
        loss: the class of the loss, for messages.
        name: its registered name, for hints.
        reads: what the loss expects.
        y: the output that the loss is given.
        axis: the class axis, ``None`` for that of the model.

    Raises:
        PrepareError: ``y`` consists of probabilities that have no logits for this loss.
    """
    if reads is Reads.VALUES:
        return None
    search = _Search(op, loss, name, reads, y)
    emit = search.sigmoid(y) if reads is Reads.SIGMOID_LOGITS else search.softmax(y, axis)
    if emit is None:
        search.refuse_other_activations()
        return None
    node = search.activation
    assert node is not None
    what = "log-probabilities" if reads is Reads.LOG_PROBABILITIES else "logits"
    return Logits(emit(), f"{loss} reads the {what} of output {y.name!r}, not its {node.op_type}")


_Emit = Callable[[], ir.Value]
_MOVES = (
    *("Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"),
    *("Slice", "Gather"),
)
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Mean", "Sum", "ReduceMean", "Pow", "Clip")
_GUARD = 1e-3  # Clip bounds this close to 0 and 1 guard a logarithm; others change the function
_MAX_DEPTH = 64  # nodes between the activation and the output


class _Search:
    """A walk back from an output; each method returns a function that emits the logits."""

    def __init__(self, op: OpBuilder, loss: str, name: str, reads: Reads, y: ir.Value) -> None:
        self.op, self.loss, self.name, self.reads, self.y = op, loss, name, reads, y
        self.activation: ir.Node | None = None

    def softmax(self, y: ir.Value, axis: int | None, depth: int = _MAX_DEPTH) -> _Emit | None:
        """Find ``z`` with ``softmax(z) = y`` along an axis."""
        node = y.producer()
        if node is None or not is_standard(node) or depth == 0 or stops_gradient(node):
            return None
        if is_op(node, "Softmax"):
            return self._from_softmax(node, axis)
        if is_op(node, "Sigmoid"):
            return self._from_sigmoids(node, axis)
        if is_op(node, "Clip") and _is_guard(node):
            return self.softmax(_first(node), axis, depth - 1)
        if is_op(node, "Div"):
            return self._from_division(node, axis, depth)
        if is_op(node, "Concat") and len(node.inputs) == 2:
            return self._from_two_classes(node, axis)
        if not is_op(node, *_MOVES) or not S.is_float(node.inputs[0]):
            return None
        before = None if axis is None else _axis_before(node, axis)
        emit = self.softmax(_first(node), before, depth - 1)
        if emit is not None and axis is not None and before is None:
            raise self._error(f"node {node.name!r} ({node.op_type}) changes the class axis")
        return None if emit is None else lambda: self._move(node, emit())

    def sigmoid(self, y: ir.Value, depth: int = _MAX_DEPTH) -> _Emit | None:
        """Find ``z`` with ``sigmoid(z) = y``."""
        node = y.producer()
        if node is None or not is_standard(node) or depth == 0 or stops_gradient(node):
            return None
        if is_op(node, "Sigmoid"):
            self.activation = self.activation or node
            return lambda: _first(node)
        if is_op(node, "Clip") and _is_guard(node):
            return self.sigmoid(_first(node), depth - 1)
        if is_op(node, "Sub") and _is_one(node.inputs[0]):
            emit = self.sigmoid(_input(node, 1), depth - 1)
            return None if emit is None else lambda: self.op.Neg(emit())
        if is_op(node, "Concat"):
            parts = [self.sigmoid(x, depth - 1) for x in node.inputs if x is not None]
            found = [emit for emit in parts if emit is not None]
            if len(found) < len(parts):
                return None
            axis = node.attributes["axis"].as_int()
            return lambda: self.op.Concat(*(emit() for emit in found), axis=axis)
        if not is_op(node, *_MOVES) or not S.is_float(node.inputs[0]):
            return None
        emit = self.sigmoid(_first(node), depth - 1)
        return None if emit is None else lambda: self._move(node, emit())

    def _from_softmax(self, node: ir.Node, axis: int | None) -> _Emit:
        z = _first(node)
        rank = S.rank_of(z)
        own = node.attributes.get_int("axis", -1) % max(rank, 1)
        self.activation = node
        if axis is not None and own != axis and (S.dims_of(z) or ())[axis] != 1:
            raise self._error(
                f"it normalizes axis {own} of {S.describe_value(z)}, the loss reads classes on "
                f"axis {axis}",
                f"pass axis={own} to the loss if the classes are there, for example "
                + argument("loss", f"cross_entropy:axis={own}"),
            )
        return self._normalized(lambda: z, own)

    def _from_sigmoids(self, node: ir.Node, axis: int | None) -> _Emit | None:
        """Match one score per class: the Softmax of ``log sigmoid(z)`` is ``y / sum(y)``.

        Two columns ``sigmoid(-z), sigmoid(z)`` are skl2onnx's logistic regression.
        """
        z = _first(node)
        if axis is None or (S.dims_of(z) or ())[axis] in (1, None):
            return None
        self.activation = node
        return self._normalized(lambda: self._log_sigmoid(z), axis)

    def _log_sigmoid(self, z: ir.Value) -> ir.Value:
        return self.op.Neg(smooth_softplus(self.op, self.op.Neg(z)))

    def _normalized(self, logits: _Emit, axis: int) -> _Emit:
        """Apply LogSoftmax if the loss reads log-probabilities."""
        if self.reads is Reads.LOG_PROBABILITIES:
            return lambda: self.op.LogSoftmax(logits(), axis=axis)
        return logits

    def _from_division(self, node: ir.Node, axis: int | None, depth: int) -> _Emit | None:
        """Match ``u / sum(u)`` along the class axis, whose logits are ``log u``."""
        u = _first(node)
        total = _normalizer(_input(node, 1), u)
        if total is None or axis is None or total != [axis]:
            return None
        self.activation = node
        producer = u.producer()
        if producer is not None and is_op(producer, "Exp"):
            return self._normalized(lambda: _first(producer), axis)
        return self.softmax(u, axis, depth - 1)

    def _from_two_classes(self, node: ir.Node, axis: int | None) -> _Emit | None:
        """Match ``concat(1 - sigmoid(z), sigmoid(z))``, whose logits are ``concat(0, z)``."""
        p, q = (_input(node, i) for i in (0, 1))
        swapped = _is_complement(q, p)
        if not swapped and not _is_complement(p, q):
            return None
        emit = self.sigmoid(p if swapped else q)
        own = node.attributes["axis"].as_int() % max(S.rank_of(p), 1)
        if emit is None or (axis is not None and axis != own):
            return None

        def concat() -> ir.Value:
            z = emit()
            zero = self.op.zeros_like(z)
            return self.op.Concat(*((z, zero) if swapped else (zero, z)), axis=own)

        return self._normalized(concat, own)

    def _move(self, node: ir.Node, x: ir.Value) -> ir.Value:
        """Return the copy of a node that moves the logits as it moves the probabilities."""
        if is_op(node, "Identity") or (is_op(node, "Cast") and x.dtype == node.outputs[0].dtype):
            return x
        return copy_node(self.op, node, [x, *node.inputs[1:]])

    def refuse_other_activations(self) -> None:
        """Raise PrepareError if the output consists of probabilities of another kind."""
        found = _probabilities(self.y, _MAX_DEPTH)
        if found is not None:
            self.activation = found
            raise self._error()

    def _error(self, reason: str = "", hint: str = "") -> PrepareError:
        node = self.activation
        assert node is not None
        if not hint:
            z = _first(node).name
            hint = f"let the loss read a value before it: {term_of_output(self.name, z)}"
            if node.op_type == "Sigmoid":
                hint += f"; or use {argument('loss', 'bce')}, which reads probabilities"
            elif self.reads is Reads.SIGMOID_LOGITS:
                hint += f"; or use {argument('loss', 'cross_entropy')} with class indices"
        return PrepareError(
            f"{self.loss} expects {self.reads.value}, but output {self.y.name!r} has the "
            f"probabilities of {node.op_type} (node {node.name!r})"
            + (f": {reason}" if reason else "")
            + f"\nhint: {hint}"
        )


def _probabilities(y: ir.Value, depth: int) -> ir.Node | None:
    """Return a Softmax or Sigmoid if ``y`` is computed only from outputs of such nodes."""
    node = y.producer()
    if node is None or not is_standard(node) or depth == 0 or stops_gradient(node):
        return None
    if is_op(node, "Softmax", "Sigmoid"):
        return node
    if is_op(node, *_MOVES):
        return _probabilities(_first(node), depth - 1) if S.is_float(node.inputs[0]) else None
    if not is_op(node, *_ARITHMETIC, "Concat"):
        return None
    operands = [x for x in node.inputs if S.is_float(x) and x is not None and not _is_number(x)]
    found = [_probabilities(x, depth - 1) for x in dict.fromkeys(operands)]
    return found[0] if found and None not in found else None


def _first(node: ir.Node) -> ir.Value:
    return _input(node, 0)


def _input(node: ir.Node, i: int) -> ir.Value:
    x = node.inputs[i]
    assert x is not None
    return x


def _is_number(x: ir.Value) -> bool:
    return S.constant_of(x) is not None and x.producer() is None


def _number(x: ir.Value | None) -> float | None:
    """Return the value of a constant with one element."""
    array = S.constant_of(x)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def _is_one(x: ir.Value | None) -> bool:
    return _number(x) == 1.0


def _is_complement(x: ir.Value, p: ir.Value) -> bool:
    """Return whether ``x`` is ``1 - p``."""
    node = x.producer()
    return (
        node is not None and is_op(node, "Sub") and _is_one(node.inputs[0]) and node.inputs[1] is p
    )


def _is_guard(node: ir.Node) -> bool:
    """Return whether a Clip changes probabilities only where they are close to 0 or 1."""
    low, high = ((*node.inputs, None, None)[i] for i in (1, 2))
    bounds = [(low, -np.inf), (high, np.inf)]
    lowest, highest = (missing if x is None else _number(x) for x, missing in bounds)
    if lowest is None or highest is None:
        return False
    return lowest <= _GUARD and highest >= 1 - _GUARD


def _normalizer(total: ir.Value, u: ir.Value) -> list[int] | None:
    """Return the axes if ``total`` is the sum of ``u >= 0`` along them, possibly made safe."""
    node = total.producer()
    if node is not None and is_op(node, "Where"):  # where(sum > 0, sum, 1)
        node = _input(node, 1).producer()
    elif node is not None and is_op(node, "Add", "Max", "Clip"):  # sum + eps
        node = _first(node).producer()
    if node is None or not is_op(node, "ReduceSum", "ReduceL1"):
        return None
    x = _first(node)
    inner = x.producer()
    if inner is not None and is_op(inner, "Abs"):
        x = _first(inner)
    axes = S.constant_of(node.inputs[1]) if len(node.inputs) > 1 else None
    if x is not u or axes is None or not node.attributes.get_int("keepdims", 1):
        return None
    rank = S.rank_of(u)
    return sorted(int(a) % rank for a in axes.reshape(-1))


def _axis_before(node: ir.Node, axis: int) -> int | None:
    """Return the axis of a node's input that becomes ``axis`` of its output, unchanged."""
    x, y = _first(node), node.outputs[0]
    have, want = S.dims_of(x), S.dims_of(y)
    if is_op(node, "Identity", "Cast"):
        return axis
    if have is None or want is None:
        return None
    if is_op(node, "Transpose"):
        perm = node.attributes.get_ints("perm") or range(len(have))[::-1]
        return list(perm)[axis]
    if is_op(node, "Slice"):
        return axis if have[axis] == want[axis] else None
    if is_op(node, "Gather"):
        at, indices = node.attributes.get_int("axis", 0) % len(have), _input(node, 1)
        rank = S.rank_of(indices)
        return axis if axis < at else axis - rank + 1 if axis >= at + rank else None
    return _same_axis(have, want, axis)


def _same_axis(have: Sequence[Dim], want: Sequence[Dim], axis: int) -> int | None:
    """Return the axis of ``have`` with the size and stride of an axis of ``want``."""
    size, stride = want[axis], D.product(want[axis + 1 :])
    for i, d in enumerate(have):
        if d is not None and d == size and D.product(have[i + 1 :]) == stride:
            return i
    return None
