"""Batching rules: run a part of a graph for all elements along a new axis, without a loop.

Each rule turns a node over elements into nodes over stacked values, whose axis 0 is the new one::

    before:  y = Softmax(x, axis=1)            x: [n, c]
    after:   y = Softmax(stacked, axis=2)      stacked: [elements, n, c]

:func:`batch_nodes` applies them to nodes in order. Where an operator has no rule, it emits nothing,
and the caller loops (``Scan``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import captured, is_standard, subgraphs_of

_UNARY = (
    *("Abs", "Acos", "Asin", "Atan", "Cast", "Ceil", "Celu", "Cos", "Cosh", "Elu", "Erf", "Exp"),
    *(
        "Floor",
        "Gelu",
        "HardSigmoid",
        "HardSwish",
        "Identity",
        "IsInf",
        "IsNaN",
        "LeakyRelu",
        "Log",
    ),
    *(
        "Mish",
        "Neg",
        "Not",
        "Reciprocal",
        "Relu",
        "Round",
        "Selu",
        "Sigmoid",
        "Sign",
        "Sin",
        "Sinh",
    ),
    *("Softplus", "Softsign", "Sqrt", "Tan", "Tanh", "ThresholdedRelu", "Asinh", "Acosh", "Atanh"),
)
_BROADCASTING = (
    *("Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max"),
    *("Mean", "Min", "Mod", "Mul", "Or", "Pow", "Sub", "Sum", "Where", "Xor"),
)
_REDUCTIONS = (
    *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean"),
    *("ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"),
)
_ON_IMAGES = (
    *("AveragePool", "Conv", "ConvTranspose", "GlobalAveragePool", "GlobalMaxPool", "LRN"),
    *("LpPool", "MaxPool", "DepthToSpace", "SpaceToDepth", "InstanceNormalization"),
)


class _NoRuleError(Exception):
    """A node cannot be batched."""


def batch_nodes(
    op: OpBuilder, nodes: Iterable[ir.Node], elements: Mapping[ir.Value, ir.Value]
) -> dict[ir.Value, ir.Value] | None:
    """Append nodes that compute the outputs of ``nodes`` for all elements; return them by value.

    Args:
        op: the builder; its graph contains the nodes.
        nodes: the nodes that depend on the elements, in order.
        elements: the stacked values by the values that stand for one element of them.

    Returns:
        Stacked values, with the new axis first; ``None`` if an operator has no rule.
    """
    last = len(op.graph)
    batch = _Batch(op, dict(elements))
    try:
        for node in nodes:
            batch.add(node)
    except (_NoRuleError, *S.INVALID_NODE_ERRORS):
        for node in reversed(list(op.graph)[last:]):
            op.graph.remove(node, safe=True)
        return None
    return batch.stacked


class _Batch:
    """The values found so far: stacked ones, and those that are the same for all elements."""

    def __init__(self, op: OpBuilder, stacked: dict[ir.Value, ir.Value]) -> None:
        self.op, self.stacked = op, stacked
        self.same: dict[ir.Value, ir.Value] = {}  # shapes of stacked values, without the new axis
        self.count = op.size(next(iter(stacked.values())), 0)

    def add(self, node: ir.Node) -> None:
        if not is_standard(node) or list(subgraphs_of(node)) or list(captured(node)):
            raise _NoRuleError
        if not any(x in self.stacked for x in node.inputs if x is not None):
            results = self.emit(node, [self.read(x) for x in node.inputs])
            self.same.update(zip(node.outputs, results, strict=True))
            return
        rule = _RULES.get(node.op_type)
        if rule is None:
            raise _NoRuleError
        results = rule(self, node)
        if results is None:  # the rule has recorded the result
            return
        for old, new in zip(node.outputs, results, strict=True):
            new.type = old.type
            S.set_dims(new, [S.dims_of(next(iter(self.stacked.values())))[0], *self.op.dims(old)])  # type: ignore[index]
            self.stacked[old] = new

    def emit(self, node: ir.Node, inputs: Sequence[Any], **changes: Any) -> list[ir.Value]:
        """Append the node with other inputs and attributes; return its outputs."""
        attributes = {n: S.python_value(a) for n, a in node.attributes.items()}
        given = {n: v for n, v in {**attributes, **changes}.items() if v is not None}
        results = self.op.emit(node.op_type, *inputs, _outputs=len(node.outputs), **given)
        return list(results) if isinstance(results, tuple) else [results]

    def read(self, x: ir.Value | None) -> ir.Value | None:
        """Return a value that is the same for all elements."""
        if x in self.stacked:
            raise _NoRuleError
        return None if x is None else self.same.get(x, x)

    def mapped(self, x: ir.Value) -> ir.Value:
        """Return a value that differs by element, stacked."""
        if x not in self.stacked:
            raise _NoRuleError
        return self.stacked[x]

    def whole(self, x: ir.Value | None) -> ir.Value:
        """Return a value for all elements, expanded if it is the same for them."""
        if x is None:
            raise _NoRuleError
        if x in self.stacked:
            return self.stacked[x]
        own = self.read(x)
        shape = self.op.vector([self.count, *[1] * self.op.rank(x)])
        return self.op.Expand(own, shape)

    def aligned(self, x: ir.Value | None, rank: int) -> ir.Value | None:
        """Return a value that broadcasts with others of a rank, without the new axis."""
        if x not in self.stacked or x is None:
            return self.read(x)
        missing = rank - self.op.rank(x)
        stacked = self.stacked[x]
        return self.op.Unsqueeze(stacked, list(range(1, missing + 1))) if missing else stacked

    def axis(self, node: ir.Node, default: int) -> int:
        """Return a node's axis among those of the stacked values."""
        x = node.inputs[0]
        assert x is not None
        return node.attributes.get_int("axis", default) % self.op.rank(x) + 1

    def axes(self, x: ir.Value | None, rank: int) -> list[int]:
        """Return constant axes among those of the stacked values."""
        found = S.constant_of(self.read(x))
        if found is None:
            raise _NoRuleError
        return [int(a) % rank + 1 for a in found.reshape(-1)]


_Rule = Callable[[_Batch, ir.Node], list[ir.Value] | None]
_RULES: dict[str, _Rule] = {}


def _rule(*op_types: str) -> Callable[[_Rule], _Rule]:
    def register(function: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(op_types, function))
        return function

    return register


def _first(node: ir.Node) -> ir.Value:
    x = node.inputs[0]
    assert x is not None
    return x


@_rule(*_UNARY)
def _unary(b: _Batch, node: ir.Node) -> list[ir.Value]:
    return b.emit(node, [b.mapped(_first(node))])


@_rule("Clip", "Trilu")
def _first_alone(b: _Batch, node: ir.Node) -> list[ir.Value]:
    return b.emit(node, [b.whole(_first(node)), *map(b.read, node.inputs[1:])])


@_rule(*_BROADCASTING)
def _broadcasting(b: _Batch, node: ir.Node) -> list[ir.Value]:
    rank = max(b.op.rank(x) for x in node.inputs if x is not None)
    return b.emit(node, [b.aligned(x, rank) for x in node.inputs])


@_rule("MatMul")
def _matmul(b: _Batch, node: ir.Node) -> list[ir.Value]:
    op, (x, y) = b.op, node.inputs
    assert x is not None
    assert y is not None
    rank = max(op.rank(x), op.rank(y), 2)
    left, right = _matrix(b, x, rank, row=True), _matrix(b, y, rank, row=False)
    z = op.MatMul(left, right)
    vectors = [a for a, v in ((rank - 1, x), (rank, y)) if op.rank(v) == 1]
    return [op.Squeeze(z, vectors) if vectors else z]


def _matrix(b: _Batch, x: ir.Value, rank: int, *, row: bool) -> ir.Value:
    """Return an operand of a matmul with leading axes that broadcast, vectors as matrices."""
    op, stacked = b.op, x in b.stacked
    value = b.mapped(x) if stacked else b.read(x)
    assert value is not None
    own = op.rank(x)
    if own == 1:
        value, own = op.Unsqueeze(value, [(1 if row else 2) - (not stacked)]), 2
    missing = rank - own
    return op.Unsqueeze(value, list(range(1, missing + 1))) if stacked and missing else value


@_rule("Gemm")
def _gemm(b: _Batch, node: ir.Node) -> list[ir.Value]:
    op = b.op
    operands = []
    for x, name in zip(node.inputs[:2], ("transA", "transB"), strict=True):
        assert x is not None
        value = b.mapped(x) if x in b.stacked else b.same.get(x, x)
        operands.append(op.mT(value) if node.attributes.get_int(name, 0) else value)
    z = op.MatMul(*operands)
    scales = [node.attributes.get_float(n, 1.0) for n in ("alpha", "beta")]
    z = z if scales[0] == 1 else op.Mul(z, scales[0])
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return [z]
    c = b.aligned(node.inputs[2], 2)
    return [op.Add(z, c if scales[1] == 1 else op.Mul(c, scales[1]))]


@_rule("Transpose")
def _transpose(b: _Batch, node: ir.Node) -> list[ir.Value]:
    rank = b.op.rank(_first(node))
    perm = node.attributes.get_ints("perm") or range(rank)[::-1]
    return b.emit(node, [b.mapped(_first(node))], perm=[0, *(p + 1 for p in perm)])


@_rule(*_REDUCTIONS)
def _reduce(b: _Batch, node: ir.Node) -> list[ir.Value]:
    x, rank = _first(node), b.op.rank(_first(node))
    given = node.inputs[1] if len(node.inputs) > 1 else None
    axes = list(range(1, rank + 1)) if given is None else b.axes(given, rank)
    if not axes or (given is None and node.attributes.get_int("noop_with_empty_axes", 0)):
        raise _NoRuleError
    return b.emit(node, [b.mapped(x), b.op.const(np.asarray(axes, np.int64))])


@_rule("Softmax", "LogSoftmax", "Hardmax", "LpNormalization", "Split")
def _along_axis(b: _Batch, node: ir.Node) -> list[ir.Value]:
    axis = b.axis(node, 0 if node.op_type == "Split" else -1)
    return b.emit(node, [b.whole(_first(node)), *map(b.read, node.inputs[1:])], axis=axis)


@_rule("ArgMax", "ArgMin", "TopK", "LayerNormalization")
def _along_one_axis(b: _Batch, node: ir.Node) -> list[ir.Value]:
    axis = b.axis(node, 0 if node.op_type.startswith("Arg") else -1)
    return b.emit(node, [b.whole(_first(node)), *map(b.read, node.inputs[1:])], axis=axis)


@_rule("CumSum")
def _cumsum(b: _Batch, node: ir.Node) -> list[ir.Value]:
    (axis,) = b.axes(node.inputs[1], b.op.rank(_first(node)))
    return b.emit(node, [b.mapped(_first(node)), b.op.const(np.asarray(axis, np.int64))])


@_rule("Squeeze", "Unsqueeze")
def _insert_or_remove(b: _Batch, node: ir.Node) -> list[ir.Value]:
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    rank = b.op.rank(node.outputs[0] if node.op_type == "Unsqueeze" else _first(node))
    return b.emit(node, [b.mapped(_first(node)), b.op.const(b.axes(axes, rank), ir.DataType.INT64)])


@_rule("Reshape")
def _reshape(b: _Batch, node: ir.Node) -> list[ir.Value]:
    op, shape = b.op, b.read(node.inputs[1])
    first = b.count if node.attributes.get_int("allowzero", 0) else 0
    sizes = op.Concat(op.vector([first]), shape, axis=0)
    return b.emit(node, [b.mapped(_first(node)), sizes])


@_rule("Expand")
def _expand(b: _Batch, node: ir.Node) -> list[ir.Value]:
    rank = b.op.rank(node.outputs[0])
    return b.emit(node, [b.aligned(_first(node), rank), b.read(node.inputs[1])])


@_rule("Tile")
def _tile(b: _Batch, node: ir.Node) -> list[ir.Value]:
    repeats = b.op.Concat(b.op.vector([1]), b.read(node.inputs[1]), axis=0)
    return b.emit(node, [b.mapped(_first(node)), repeats])


@_rule("Shape")
def _shape(b: _Batch, node: ir.Node) -> None:
    rank = b.op.rank(_first(node))
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", rank)
    start, end = (min(max(a + rank if a < 0 else a, 0), rank) for a in (start, end))
    (b.same[node.outputs[0]],) = b.emit(
        node, [b.mapped(_first(node))], start=start + 1, end=end + 1
    )


@_rule("Size")
def _size(b: _Batch, node: ir.Node) -> None:
    sizes = b.op.Shape(b.mapped(_first(node)), start=1)
    b.same[node.outputs[0]] = b.op.ReduceProd(sizes, keepdims=0)


@_rule("Concat")
def _concat(b: _Batch, node: ir.Node) -> list[ir.Value]:
    return b.emit(node, [b.whole(x) for x in node.inputs], axis=b.axis(node, 0))


@_rule("Slice")
def _slice(b: _Batch, node: ir.Node) -> list[ir.Value]:
    x, starts, ends, *rest = (*node.inputs, None, None)[:5]
    assert x is not None
    rank, given = b.op.rank(x), S.constant_of(b.read(starts))
    axes = rest[0]
    if (axes is None and given is None) or starts is None or starts.dtype != ir.DataType.INT64:
        raise _NoRuleError
    count = 0 if given is None else given.size
    found = b.axes(axes, rank) if axes is not None else list(range(1, count + 1))
    axes = b.op.const(np.asarray(found, np.int64))
    steps = [b.read(rest[1])] if rest[1] is not None else []
    return b.emit(node, [b.mapped(x), b.read(starts), b.read(ends), axes, *steps])


@_rule("Gather")
def _gather(b: _Batch, node: ir.Node) -> list[ir.Value]:
    op, (x, indices) = b.op, node.inputs
    assert x is not None
    assert indices is not None
    axis = b.axis(node, 0)
    if indices not in b.stacked:
        return b.emit(node, [b.mapped(x), b.read(indices)], axis=axis)
    if x not in b.stacked:
        y = op.Gather(b.read(x), b.mapped(indices), axis=axis - 1)
        return [op.move_axis(y, axis - 1, 0)]
    if axis != 1:
        raise _NoRuleError
    return [op.GatherND(b.mapped(x), op.Unsqueeze(b.mapped(indices), [-1]), batch_dims=1)]


@_rule("GatherElements", "ScatterElements")
def _elements(b: _Batch, node: ir.Node) -> list[ir.Value]:
    return b.emit(node, [b.whole(x) for x in node.inputs], axis=b.axis(node, 0))


@_rule("GatherND")
def _gather_nd(b: _Batch, node: ir.Node) -> list[ir.Value]:
    dims = node.attributes.get_int("batch_dims", 0)
    return b.emit(node, [b.whole(x) for x in node.inputs], batch_dims=dims + 1)


@_rule("ScatterND")
def _scatter_nd(b: _Batch, node: ir.Node) -> list[ir.Value]:
    """The number of the element becomes the first coordinate."""
    op, (data, indices, updates) = b.op, map(b.whole, node.inputs)
    rank = op.rank(indices)
    rows = op.reshape(op.iota(b.count), [-1, *[1] * (rank - 1)])
    shape = op.Concat(op.Shape(indices, end=rank - 1), op.vector([1]), axis=0)
    where = op.Concat(op.Expand(rows, shape), indices, axis=rank - 1)
    return b.emit(node, [data, where, updates])


@_rule("OneHot")
def _one_hot(b: _Batch, node: ir.Node) -> list[ir.Value]:
    axis = node.attributes.get_int("axis", -1)
    indices, depth, values = node.inputs
    inputs = [b.whole(indices), b.read(depth), b.read(values)]
    return b.emit(node, inputs, axis=axis + (axis >= 0))


@_rule("Pad")
def _pad(b: _Batch, node: ir.Node) -> list[ir.Value]:
    x, rank = _first(node), b.op.rank(_first(node))
    pads = S.constant_of(b.read(node.inputs[1]))
    if pads is None or (len(node.inputs) > 3 and node.inputs[3] is not None):
        raise _NoRuleError
    before, after = np.split(pads.reshape(-1), [rank])
    both = b.op.const(np.concatenate([[0], before, [0], after]).astype(np.int64))
    return b.emit(node, [b.mapped(x), both, *map(b.read, node.inputs[2:3])])


@_rule(*_ON_IMAGES)
def _on_images(b: _Batch, node: ir.Node) -> list[ir.Value]:
    """Elements join the batch: [elements * n, c, ...]."""
    op, x = b.op, _first(node)
    if len(node.outputs) > 1:
        raise _NoRuleError
    shape = op.Shape(b.whole(x), start=2)
    images = op.Reshape(b.mapped(x), op.Concat(op.vector([-1]), shape, axis=0))
    (y,) = b.emit(node, [images, *map(b.read, node.inputs[1:])])
    sizes = op.Concat(op.vector([b.count, -1]), op.Shape(y, start=1), axis=0)
    return [op.Reshape(y, sizes)]


__all__ = ["batch_nodes"]
