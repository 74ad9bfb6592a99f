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
from onnxtrain.graph.match import COMMUTATIVE, pattern
from onnxtrain.graph.nodes import is_op, is_standard, stops_gradient, subgraphs_of
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
    search = _Search(op, loss, name, reads, y, axis)
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
_ARITHMETIC = (
    *("Add", "Sub", "Mul", "Div", "Mean", "Sum", "ReduceMean", "Pow", "Clip", "Max", "Min"),
    *("Sqrt", "Abs", "Relu", "Where", "Dropout", "Split", "TopK", "Concat"),
)
_GUARD = 1e-3  # bounds this close to 0 and 1 guard a logarithm; others change the function
_MAX_DEPTH = 64  # nodes between the activation and the output


class _Search:
    """A walk back from an output; each method returns a function that emits the logits."""

    def __init__(
        self, op: OpBuilder, loss: str, name: str, reads: Reads, y: ir.Value, axis: int | None
    ) -> None:
        self.op, self.loss, self.name, self.reads, self.y = op, loss, name, reads, y
        self.axis = axis
        self.activation: ir.Node | None = None
        self._moves: list[ir.Node] = []  # from the output back to the activation

    def softmax(self, y: ir.Value, axis: int | None, depth: int = _MAX_DEPTH) -> _Emit | None:
        """Find ``z`` with ``softmax(z) = y`` along an axis."""
        node = y.producer()
        if node is None or not is_standard(node) or depth == 0 or stops_gradient(node):
            return None
        if is_op(node, "Softmax"):
            return self._from_softmax(node, axis)
        sigmoid = self._logistic(node)
        if sigmoid is not None:
            return self._from_sigmoids(node, axis, sigmoid)
        guarded = _guarded(node)
        if guarded is not None:
            return self.softmax(guarded, axis, depth - 1)
        if is_op(node, "Div", "Mul", "LpNormalization"):
            return self._from_shares(node, axis, depth)
        if is_op(node, "Exp"):
            return self._from_logarithms(node, axis)
        if is_op(node, "Concat") and len(node.inputs) == 2:
            return self._from_two_classes(node, axis)
        if not is_op(node, *_MOVES) or not S.is_float(node.inputs[0]):
            return None
        before = None if axis is None else _axis_before(node, axis)
        self._moves.append(node)
        emit = self.softmax(_first(node), before, depth - 1)
        if emit is not None and axis is not None and before is None:
            raise self._error(f"node {node.name!r} ({node.op_type}) changes the class axis")
        return None if emit is None else lambda: self._move(node, emit())

    def sigmoid(self, y: ir.Value, depth: int = _MAX_DEPTH) -> _Emit | None:
        """Find ``z`` with ``sigmoid(z) = y``."""
        node = y.producer()
        if node is None or not is_standard(node) or depth == 0 or stops_gradient(node):
            return None
        logits = self._logistic(node)
        if logits is not None:
            self.activation = self.activation or node
            return logits
        guarded = _guarded(node)
        if guarded is not None:
            return self.sigmoid(guarded, depth - 1)
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
            right = self._output_axis(own)
            raise self._error(
                f"it normalizes axis {own} of {S.describe_value(z)}, the loss reads classes on "
                f"axis {axis} of it",
                ""
                if right is None
                else f"pass axis={right} to the loss if the classes are there, for example "
                + argument("loss", f"cross_entropy:axis={right}"),
            )
        return self._normalized(lambda: z, own)

    def _output_axis(self, axis: int) -> int | None:
        """Return the axis of the output that is an axis of the activation."""
        for candidate in range(S.rank_of(self.y)):
            at: int | None = candidate
            for node in self._moves:
                at = None if at is None else _axis_before(node, at)
            if at == axis:
                return candidate
        return None

    def _logistic(self, node: ir.Node) -> _Emit | None:
        """Match ``sigmoid(z)``, also written out."""
        if is_op(node, "Sigmoid"):
            return lambda: _first(node)
        for factor, patterns in _LOGISTIC.items():
            for form in patterns:
                match = form.match(node)
                if match is not None and S.dims_of(match["z"]) == S.dims_of(node.outputs[0]):
                    z = match["z"]
                    return lambda: z if factor == 1 else self.op.Mul(z, factor)
        return None

    def _from_sigmoids(self, node: ir.Node, axis: int | None, logits: _Emit) -> _Emit | None:
        """Match one score per class: the Softmax of ``log sigmoid(z)`` is ``y / sum(y)``.

        Two columns ``sigmoid(-z), sigmoid(z)`` are skl2onnx's logistic regression.
        """
        if axis is None or (S.dims_of(node.outputs[0]) or ())[axis] in (1, None):
            return None
        self.activation = node
        return self._normalized(lambda: self._log_sigmoid(logits()), axis)

    def _log_sigmoid(self, z: ir.Value) -> ir.Value:
        return self.op.Neg(smooth_softplus(self.op, self.op.Neg(z)))

    def _normalized(self, logits: _Emit, axis: int) -> _Emit:
        """Apply LogSoftmax if the loss reads log-probabilities."""
        if self.reads is Reads.LOG_PROBABILITIES:
            return lambda: self.op.LogSoftmax(logits(), axis=axis)
        return logits

    def _from_shares(self, node: ir.Node, axis: int | None, depth: int) -> _Emit | None:
        """Match ``u / sum(u)`` along the class axis, whose logits are ``log u``."""
        found = _share(node)
        if found is None or axis is None or found[1] != [axis]:
            return None
        u = found[0]
        self.activation = node
        producer = u.producer()
        while producer is not None and is_op(producer, "Cast", "Identity"):
            producer = _first(producer).producer()
        if producer is not None and is_op(producer, "Exp"):
            return self._normalized(lambda: _first(producer), axis)
        return self.softmax(u, axis, depth - 1)

    def _from_logarithms(self, node: ir.Node, axis: int | None) -> _Emit | None:
        """Match ``exp(log_softmax(z))``: log-probabilities are logits."""
        u = _first(node)
        own = _log_softmax_axis(u)
        if own is None or (axis is not None and own != axis):
            return None
        self.activation = node
        return lambda: u

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
        sigmoid = self.reads is Reads.SIGMOID_LOGITS
        found = _probabilities(self.y, _MAX_DEPTH, logarithms=sigmoid)
        if found is not None:
            self.activation = found
            raise self._error()

    def _has_one_class(self) -> bool:
        dims = S.dims_of(self.y)
        return self.axis is not None and dims is not None and dims[self.axis] == 1

    def _error(self, reason: str = "", hint: str = "") -> PrepareError:
        node = self.activation
        assert node is not None
        if not hint:
            name = "cross_entropy" if self.reads is Reads.LOG_PROBABILITIES else self.name
            x = _before(node, self.y)
            hint = f"let the loss read a value before it: {term_of_output(name, x.name)}"
            producer = self.y.producer()
            if producer is not None and node.graph is not producer.graph:  # in a branch of an If
                hint = "export the model without this activation"
            if node.op_type == "Sigmoid" and self._has_one_class():
                hint = f"use {argument('loss', 'bce_with_logits')}, whose targets are 0 and 1"
            elif node.op_type in ("HardSigmoid", "Clip") and self.reads is Reads.SIGMOID_LOGITS:
                hint = f"use {argument('loss', 'bce')}, which reads probabilities"
            elif node.op_type == "Sigmoid" and _probabilities(self.y, _MAX_DEPTH) is not None:
                hint += f"; or use {argument('loss', 'bce')}, which reads probabilities"
            elif self.reads is Reads.SIGMOID_LOGITS:
                hint += f"; or use {argument('loss', 'cross_entropy')} with class indices"
        return PrepareError(
            f"{self.loss} expects {self.reads.value}, but output {self.y.name!r} has the "
            f"probabilities of {node.op_type} (node {node.name!r})"
            + (f": {reason}" if reason else "")
            + f"\nhint: {hint}"
        )


def _probabilities(y: ir.Value, depth: int, *, logarithms: bool = False) -> ir.Node | None:
    """Return an activation if ``y`` is computed only from outputs of such nodes.

    Args:
        y: the output.
        depth: largest number of nodes between them.
        logarithms: whether logarithms of probabilities count, too.
    """
    node = y.producer()
    if node is None or not is_standard(node) or depth == 0 or stops_gradient(node):
        return None
    if is_op(node, "Softmax", "Sigmoid", "HardSigmoid", "LogSoftmax"):
        return None if is_op(node, "LogSoftmax") and not logarithms else node
    if is_op(node, "Log") and not logarithms:
        return None
    if _is_written_out(node):
        return node
    if is_op(node, *_MOVES, "Log"):
        operands = [_first(node)] if S.is_float(node.inputs[0]) else []
    elif is_op(node, "If"):
        operands = [body.outputs[y.index() or 0] for body in subgraphs_of(node)]
    elif is_op(node, *_ARITHMETIC):
        operands = [x for x in node.inputs if S.is_float(x) and x is not None and not _is_number(x)]
    else:
        return None
    found = [_probabilities(x, depth - 1, logarithms=logarithms) for x in dict.fromkeys(operands)]
    if found and None not in found:
        return found[0]
    return _hard_sigmoid(node, 1.0)


def _is_written_out(node: ir.Node) -> bool:
    """Return whether a node computes a softmax from Exp, as ``exp(z) / sum(exp(z))``."""
    if is_op(node, "Exp"):
        return _log_softmax_axis(_first(node)) is not None
    share = _share(node) if is_op(node, "Div", "Mul", "LpNormalization") else None
    exp = None if share is None else share[0].producer()
    return exp is not None and is_op(exp, "Exp")


def _hard_sigmoid(node: ir.Node | None, high: float) -> ir.Node | None:
    """Return the Clip of a hard sigmoid that is written out: ``clip(x, 0, high) / high``."""
    if node is None or not is_op(node, "Clip", "Mul", "Div"):
        return None
    if is_op(node, "Clip"):
        bounds = [_number(x) for x in (*node.inputs, None, None)[1:3]]
        low, top = bounds
        return node if low == 0 and top is not None and np.isclose(top, high) else None
    pairs = [(node.inputs[0], node.inputs[1]), (node.inputs[1], node.inputs[0])]
    for x, other in pairs if is_op(node, "Mul") else pairs[:1]:
        number = _number(other)
        if number and x is not None:
            factor = number if is_op(node, "Mul") else 1 / number
            return _hard_sigmoid(x.producer(), high / factor)
    return None


def _before(node: ir.Node, y: ir.Value) -> ir.Value:
    """Return the input of an activation, or a view of it that has the shape of the output."""
    share = _share(node) if is_op(node, "Div", "Mul", "LpNormalization") else None
    inner = _first(node).producer() if share is None else share[0].producer()
    written_out = inner is not None and _is_written_out(node)
    x = view = _first(inner if written_out and inner is not None else node)
    while S.dims_of(view) != S.dims_of(y) or _is_of_converter(view):
        producer = view.producer()
        if producer is None or not is_op(producer, "Reshape", "Flatten", "Transpose", "Cast"):
            return view if _is_of_converter(x) else x
        view = _first(producer)
    return view


def _is_of_converter(x: ir.Value) -> bool:
    """Return whether onnx's version converter made a value: it flattens for an old Softmax."""
    return (x.name or "").startswith("_v_")


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


def _guarded(node: ir.Node) -> ir.Value | None:
    """Return the input of a node that changes probabilities only where they are close to 0 or 1."""
    x = _first(node) if node.inputs and node.inputs[0] is not None else None
    if x is None or is_op(node, "Relu", "Abs"):
        return x
    if is_op(node, "Concat", "Sum", "Mean", "Max", "Min", "Split") and len(node.inputs) == 1:
        return x if len(node.outputs) == 1 else None
    if is_op(node, "Clip"):
        low, high = ((*node.inputs, None, None)[i] for i in (1, 2))
        bounds = [(low, -np.inf), (high, np.inf)]
        lowest, highest = (missing if x is None else _number(x) for x, missing in bounds)
        if lowest is None or highest is None:
            return None
        return x if lowest <= _GUARD and highest >= 1 - _GUARD else None
    neutral = _NEUTRAL.get(node.op_type)
    if neutral is None or len(node.inputs) != 2:
        return None
    pairs = [tuple(node.inputs), tuple(reversed(node.inputs))]
    for p, other in pairs if node.op_type in COMMUTATIVE else pairs[:1]:
        number = _number(other)
        if p is not None and number is not None and neutral(number):
            return p if S.dims_of(p) == S.dims_of(node.outputs[0]) else None
    return None


_NEUTRAL: dict[str, Callable[[float], bool]] = {
    "Max": lambda c: c <= _GUARD,
    "Min": lambda c: c >= 1 - _GUARD,
    "Add": lambda c: abs(c) <= _GUARD,
    "Sub": lambda c: abs(c) <= _GUARD,
    "Mul": lambda c: c == 1,
    "Div": lambda c: c == 1,
}


@pattern
def _quotient_of_exp(op, z):
    e = op.Exp(z)
    return op.Div(e, op.Add(e, 1.0))


@pattern
def _reciprocal_of_exp(op, z):
    return op.Reciprocal(op.Add(op.Exp(z), 1.0))


@pattern
def _one_over_exp(op, z):
    return op.Div(1.0, op.Add(op.Exp(z), 1.0))


@pattern
def _exp_of_softplus(op, z):
    return op.Exp(op.Neg(op.Softplus(z)))


@pattern
def _half_of_tanh(op, z):
    return op.Mul(op.Add(op.Tanh(z), 1.0), 0.5)


@pattern
def _tanh_over_two(op, z):
    return op.Div(op.Add(op.Tanh(z), 1.0), 2.0)


@pattern
def _tanh_plus_half(op, z):
    return op.Add(op.Mul(op.Tanh(z), 0.5), 0.5)


_LOGISTIC = {
    1.0: (_quotient_of_exp,),
    -1.0: (_reciprocal_of_exp, _one_over_exp, _exp_of_softplus),
    2.0: (_half_of_tanh, _tanh_over_two, _tanh_plus_half),
}
"""Forms of ``sigmoid(factor * z)`` by factor."""


def _share(node: ir.Node) -> tuple[ir.Value, list[int]] | None:
    """Return ``u`` and axes if the node computes ``u / sum(u)`` along them."""
    if is_op(node, "LpNormalization"):
        if node.attributes.get_int("p", 2) != 1:
            return None
        return _first(node), [node.attributes.get_int("axis", -1) % S.rank_of(_first(node))]
    pairs = [(_input(node, 0), _input(node, 1))]
    if is_op(node, "Mul"):  # u * (1 / sum(u))
        inverse = [(u, v.producer()) for u, v in (*pairs, pairs[0][::-1])]
        pairs = [(u, _first(r)) for u, r in inverse if r is not None and is_op(r, "Reciprocal")]
    for u, total in pairs:
        axes = _sum_axes(total, u)
        if axes is not None:
            return u, axes
    return None


def _sum_axes(total: ir.Value, u: ir.Value) -> list[int] | None:
    """Return the axes if ``total`` is the sum of ``u >= 0`` along them, possibly made safe."""
    node = total.producer()
    while node is not None and is_op(node, *_AROUND_SUM):
        node = _input(node, 1 if is_op(node, "Where") else 0).producer()  # where(sum > 0, sum, 1)
    if node is None or not is_op(node, "ReduceSum", "ReduceL1"):
        return None
    x = _first(node)
    inner = x.producer()
    if inner is not None and is_op(inner, "Abs"):
        x = _first(inner)
    axes = S.constant_of(node.inputs[1]) if len(node.inputs) > 1 else None
    if axes is None or not (x is u or _is_same_exp(x, u)):
        return None
    have, want = S.dims_of(total), S.dims_of(u)
    found = sorted(int(a) % S.rank_of(u) for a in axes.reshape(-1))
    if not node.attributes.get_int("keepdims", 1) and (
        have is None or want is None or len(have) != len(want) or any(have[a] != 1 for a in found)
    ):
        return None
    return found


def _is_same_exp(x: ir.Value, u: ir.Value) -> bool:
    a, b = x.producer(), u.producer()
    if a is None or b is None or not (is_op(a, "Exp") and is_op(b, "Exp")):
        return False
    return a.inputs[0] is b.inputs[0]


# Nodes between a sum and the division by it: sum + eps, max(sum, eps), the axis of the sum.
_AROUND_SUM = ("Where", "Add", "Max", "Clip", "Identity", "Unsqueeze", "Reshape", "Expand")


def _log_softmax_axis(u: ir.Value) -> int | None:
    """Return the axis if ``u`` is ``log_softmax(z)``, also written ``z - log_sum_exp(z)``."""
    node = u.producer()
    if node is None or not is_standard(node):
        return None
    rank = S.rank_of(u)
    if is_op(node, "LogSoftmax"):
        return node.attributes.get_int("axis", -1) % rank
    if not is_op(node, "Sub"):
        return None
    z, total = _input(node, 0), _input(node, 1).producer()
    if total is not None and is_op(total, "ReduceLogSumExp"):
        constant = S.constant_of(total.inputs[1]) if len(total.inputs) > 1 else None
        axes = None if constant is None or _first(total) is not z else constant.reshape(-1)
        axes = axes if total.attributes.get_int("keepdims", 1) else None
    elif total is not None and is_op(total, "Log"):
        axes = next((_sum_axes(_first(total), e) for e in _users(z, "Exp")), None)
    else:
        return None
    return int(axes[0]) % rank if axes is not None and len(axes) == 1 else None


def _users(x: ir.Value, op_type: str) -> list[ir.Value]:
    return [use.node.outputs[0] for use in x.uses() if is_op(use.node, op_type)]


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
