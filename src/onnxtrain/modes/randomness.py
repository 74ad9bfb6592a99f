"""Random operators as arithmetic on an input: the same masks on every backend, reproducibly.

A runtime's own random operators give different values in every session, and some backends have
none. After ``portable_dropout`` they are a pure function of the input ``rng`` = (seed, step), the
node and the element, with the same bits everywhere.

Only exact operations are used: products and sums of integers below 2^24, scaling by powers of two,
and Floor. So order, fusion and reduced-precision matrix units cannot change a bit, and no integer
or bitwise operators are needed.

The elements of a tensor fill rows of 1024. Each row has a 16-byte key, hashed at run time from
(seed, step, row); each column has a fixed random 16-byte key, whose order depends on the node. An
element is the fractional part of their inner product over 2^14. Compared with a threshold, such
numbers are as good as independent (tests/graph/test_randomness.py). They cost one matmul and three
cheap operators.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, Size
from onnxtrain.graph.nodes import is_standard, subgraphs_of
from onnxtrain.graph.shapes import dims as D
from onnxtrain.importer import mark_constants
from onnxtrain.targets import Target

COLUMNS = 1024
LANES = 16
BITS = 14
"""Resolution of a probability: 2^-14."""
SOURCES = 4
"""Most elements of ``rng``: seed, step, and the iterations of enclosing loops."""

Shape = ir.Value | Sequence[Size]
"""A value with the wanted shape, or sizes."""


def uniform_mask(
    op: OpBuilder, shape: Shape, rng: ir.Value, node_id: int, keep_probability: float | ir.Value
) -> ir.Value:
    """Return a bool tensor that is true with ``keep_probability``, to the nearest 2^-14.

    Args:
        op: the builder.
        shape: a value of the wanted shape, or its sizes.
        rng: float32 [2] = (seed, step), integers from 0 to 2^24 - 1.
        node_id: a small integer, unique among the random nodes of the model.
        keep_probability: a float, or a float32 scalar computed at run time.
    """
    return RandomStream(op, rng).mask(shape, node_id, keep_probability)


class RandomStream:
    """Random numbers from one ``rng``; nodes share the row keys.

    Args:
        op: the builder; replaced while the graph is walked in order.
        rng: float32 [n], n up to 4: seed, step, and the iterations of enclosing loops.
    """

    def __init__(self, op: OpBuilder, rng: ir.Value) -> None:
        self.op = op
        self.rng = rng
        self._lanes: tuple[ir.Value, ir.Value] | None = None
        self._keys: dict[D.Dim, ir.Value] = {}

    def mask(self, shape: Shape, node_id: int, keep: float | ir.Value) -> ir.Value:
        """Return a bool tensor that is true with probability ``keep``."""
        op = self.op
        if not isinstance(keep, ir.Value):
            keep = op.const(round(keep * 2**BITS) / 2**BITS, ir.DataType.FLOAT)
        total = _total(op, shape)
        fractions = _fractions(op, self._row_keys(shape, total), node_id, total)
        if op.target.lacks("Slice.bool"):
            return op.Less(_shaped(op, fractions, shape, total), keep)
        return _shaped(op, op.Less(fractions, keep), shape, total)

    def uniform(self, shape: Shape, node_id: int) -> ir.Value:
        """Return uniform float32 multiples of 2^-24 in [0, 1); uses two ids from ``node_id`` on."""
        op, total = self.op, _total(self.op, shape)
        keys = self._row_keys(shape, total)
        high, low = (
            op.Floor(op.Mul(_fractions(op, keys, node_id + i, total), 4096.0)) for i in (0, 1)
        )
        joined = op.Add(op.Mul(high, 2.0**-12), op.Mul(low, 2.0**-24))
        return _shaped(op, joined, shape, total)

    def normal(self, shape: Shape, node_id: int) -> ir.Value:
        """Return standard normal float32 numbers; uses four ids from ``node_id`` on.

        Log and Cos are not exact, so backends agree up to rounding, not bit for bit.
        """
        op = self.op
        distance = op.Sqrt(op.Mul(op.Log(op.Sub(1.0, self.uniform(shape, node_id))), -2.0))
        angle = op.Mul(self.uniform(shape, node_id + 2), 2.0 * math.pi)
        return op.Mul(distance, op.Cos(angle))

    def _row_keys(self, shape: Shape, total: D.Dim) -> ir.Value:
        """Return a 16-byte key per row, hashed from ``rng`` and its index: float32 [rows, 16]."""
        if total is not None and total in self._keys:
            return self._keys[total]
        op = self.op
        if self._lanes is None:
            self._lanes = _absorb(op, self.rng)
        left, right = self._lanes
        number = op.Mul(op.Unsqueeze(_row_numbers(op, shape, total), [1]), 2.0**-12)
        high = op.Floor(number)
        left = _fraction(op, op.Add(left, op.Sub(number, high)))
        right = _fraction(op, op.Add(right, op.Mul(high, 2.0**-12)))
        for _ in range(4):
            left, right = _round(op, left, right)
        keys = op.Floor(op.Mul(right, 256.0))
        if total is not None:
            self._keys[total] = keys
        return keys


def _absorb(op: OpBuilder, rng: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return two numbers per lane, multiples of 2^-12 in [0, 1), hashed from ``rng``: [16] each."""
    (count,) = op.dims(rng)
    if not isinstance(count, int) or count > SOURCES:
        raise AssertionError(f"rng has {count} numbers, not up to {SOURCES}")
    high = op.Floor(op.Mul(rng, 2.0**-12))
    low = op.Sub(rng, op.Mul(high, 4096.0))
    # Products are below 2^22, so that four of them are below 2^24.
    halves = op.Reshape(op.Concat(low, high, axis=0), [2, count, 1])
    spread = op.Mul(halves, op.const(_multipliers()[:, :count] * 2.0**-12, ir.DataType.FLOAT))
    mixed = op.Add(op.ReduceSum(spread, [1], keepdims=0), op.const(_origins(), ir.DataType.FLOAT))
    mixed = _fraction(op, mixed)
    left, right = op.Gather(mixed, 0, axis=0), op.Gather(mixed, 1, axis=0)
    for _ in range(4):
        left, right = _round(op, left, right)
    return left, right


def _round(op: OpBuilder, left: ir.Value, right: ir.Value) -> tuple[ir.Value, ir.Value]:
    """One round of a Feistel network on two numbers of 12 bits; it adds middle bits of a square."""
    middle = op.Mul(op.Floor(op.Mul(op.Mul(right, right), 2.0**18)), 2.0**-12)
    return right, _fraction(op, op.Add(left, middle))


def _fraction(op: OpBuilder, x: ir.Value) -> ir.Value:
    return op.Sub(x, op.Floor(x))


def _fractions(op: OpBuilder, keys: ir.Value, node_id: int, total: D.Dim) -> ir.Value:
    """Return one number per element, multiples of 2^-14 in [0, 1): [rows, columns]."""
    table = op.Mul(op.Cast(op.const(_column_keys()), to=ir.DataType.FLOAT), 2.0**-BITS)
    table = op.Gather(table, op.const(_order(node_id)), axis=0)
    if isinstance(total, int) and total < COLUMNS:
        table = op.Slice(table, [0], [total], [1])
    return _fraction(op, op.MatMul(keys, table))


def _total(op: OpBuilder, shape: Shape) -> D.Dim:
    """Return the number of elements: an int, a symbolic expression, or ``None``."""
    if isinstance(shape, ir.Value):
        return D.product(op.dims(shape))
    return D.product(s if isinstance(s, int) else None for s in shape)


def _size(op: OpBuilder, shape: Shape, total: D.Dim) -> Size:
    """Return the number of elements, as an int64 value of shape [1] if it is not static."""
    if isinstance(total, int):
        return total
    if isinstance(shape, ir.Value):
        return op.Unsqueeze(op.Size(shape), [0])
    return op.ReduceProd(op.vector(shape), [0], keepdims=1)


def _row_numbers(op: OpBuilder, shape: Shape, total: D.Dim) -> ir.Value:
    """Return 0, 1, 2 ... as float32, one for each row."""
    size = _size(op, shape, total)
    if isinstance(size, int):
        rows = -(-size // COLUMNS)
        return op.Range(op.const(0.0), op.const(float(rows)), op.const(1.0))
    rows = op.Div(op.Add(size, COLUMNS - 1), COLUMNS)
    scalar = op.Reshape(rows, op.const([], ir.DataType.INT64))
    if op.target.lacks("Range.int64"):  # a scalar on the CPU can be cast
        limit = op.Cast(scalar, to=ir.DataType.FLOAT)
        return op.Range(op.const(0.0), limit, op.const(1.0))
    return op.Cast(op.Range(0, scalar, 1), to=ir.DataType.FLOAT)


def _shaped(op: OpBuilder, x: ir.Value, shape: Shape, total: D.Dim) -> ir.Value:
    """Return the leading elements of ``x`` in the wanted shape."""
    if not _fills(total):
        size = _size(op, shape, total)
        x = op.Slice(op.Reshape(x, [-1]), [0], op.vector([size]))
    return op.reshape_like(x, shape) if isinstance(shape, ir.Value) else op.reshape(x, shape)


def _fills(total: D.Dim) -> bool:
    """Return whether the last row is certainly full."""
    if isinstance(total, int):
        return total < COLUMNS or total % COLUMNS == 0
    return total is not None and D.mul(D.floordiv(total, COLUMNS), COLUMNS) == total


def _hashes(start: int, count: int) -> list[int]:
    """Return 64-bit numbers by SplitMix64, independent of any library version."""
    mask, state, hashes = 2**64 - 1, start, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        hashes.append(z ^ (z >> 31))
    return hashes


@functools.cache
def _column_keys() -> np.ndarray:
    """The column keys, uint8 [16, 1024]."""
    numbers = [z >> 56 for z in _hashes(1, LANES * COLUMNS)]
    return np.asarray(numbers, np.uint8).reshape(LANES, COLUMNS)


@functools.cache
def _multipliers() -> np.ndarray:
    """Odd integers below 2^10, by half, source and lane."""
    numbers = [(z >> 54) | 1 for z in _hashes(2, 2 * SOURCES * LANES)]
    return np.asarray(numbers, np.float64).reshape(2, SOURCES, LANES)


@functools.cache
def _origins() -> np.ndarray:
    """Initial lanes: multiples of 2^-12 in [0, 1)."""
    numbers = [z >> 52 for z in _hashes(3, 2 * LANES)]
    return np.asarray(numbers, np.float64).reshape(2, LANES) * 2.0**-12


def _order(node_id: int) -> list[int]:
    """Return the order in which a node reads the column keys: a permutation of the lanes."""
    order = list(range(LANES))
    for i, z in zip(range(LANES - 1, 0, -1), _hashes(1000 + node_id, LANES - 1), strict=True):
        j = z % (i + 1)
        order[i], order[j] = order[j], order[i]
    return order


_IDS_PER_NODE = 4


def portable_dropout(
    model: ir.Model, rng_input_name: str = "rng", *, target: str | Target = "cpu"
) -> ir.Model:
    """Rewrite training-mode Dropout and random operators, in place; return the model.

    If there are any, the model gets an input ``rng``: float32 [2] = (seed, step), integers below
    2^24. Inference-mode Dropout is unchanged.

    Args:
        model: a prepared model, with shapes inferred.
        rng_input_name: the name of the new input.
        target: target that the graph is generated for; values do not depend on it.

    Raises:
        PrepareError: if the name is taken, or a random node is inside a Scan.
    """
    if not any(_is_random(n) for n in model.graph.all_nodes()):
        return model
    op = OpBuilder(model.graph, prefix="random/", target=target)
    if rng_input_name in op.names.taken:
        raise PrepareError(
            f"the model has a value called {rng_input_name!r}\nhint: pass another rng_input_name"
        )
    before = set(model.graph.initializers)
    rng = op.input(rng_input_name, ir.DataType.FLOAT, [2])
    _Rewriter(op).walk(model.graph, rng)
    mark_constants(model, set(model.graph.initializers) - before)
    return model


def _is_random(node: ir.Node) -> bool:
    if not is_standard(node) or node.op_type not in _REWRITES:
        return False
    if node.op_type != "Dropout":
        return True
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    constant = S.constant_of(mode)
    return mode is not None and (constant is None or bool(constant.any()))


class _Rewriter:
    """Rewrite graphs in order and number their random nodes."""

    def __init__(self, op: OpBuilder) -> None:
        self.op = op
        self.next_id = 0

    def walk(self, graph: ir.Graph, rng: ir.Value) -> None:
        stream = RandomStream(self.op, rng)
        for node in list(graph):
            for body in subgraphs_of(node):
                if any(_is_random(n) for n in body.all_nodes()):
                    self.walk(body, self._inner(node, body, rng))
            if _is_random(node):
                stream.op = OpBuilder(
                    graph, self.op.prefix, target=self.op.target, before=node, parent=self.op
                )
                values = _REWRITES[node.op_type](stream, node, self.next_id)
                self.next_id += _IDS_PER_NODE
                _replace(graph, stream.op, node, values)

    def _inner(self, node: ir.Node, body: ir.Graph, rng: ir.Value) -> ir.Value:
        """Return the ``rng`` of a subgraph: a Loop appends its iteration."""
        if node.op_type == "If":
            return rng
        deep = S.dims_of(rng) == (SOURCES,)
        if node.op_type != "Loop" or deep:
            what = f"in {SOURCES - 1} nested loops" if deep else f"in a {node.op_type}"
            raise PrepareError(
                f"a random operator {what}: its random numbers would repeat in every iteration "
                f"of node {node.name!r}\n"
                "hint: use the runtime's own random operators (randomness='native')"
            )
        op = OpBuilder(body, self.op.prefix, before=next(iter(body), None), parent=self.op)
        count = op.Reshape(op.Cast(body.inputs[0], to=ir.DataType.FLOAT), [1])
        return op.Concat(rng, count, axis=0)


def _replace(graph: ir.Graph, op: OpBuilder, node: ir.Node, values: list[ir.Value]) -> None:
    for old, new in zip(node.outputs, values, strict=False):
        if not (old.uses() or old.is_graph_output()):
            continue
        if old.is_graph_output():
            new = op.Identity(new)
            new.name, old.name = old.name, op.names.fresh(f"{old.name}.replaced")
        new.type, new.shape = old.type or new.type, old.shape or new.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _dropout(stream: RandomStream, node: ir.Node, node_id: int) -> list[ir.Value]:
    """``Where(mask, x / keep, 0)``; with a run-time mode, ``keep`` is 1 at inference."""
    op = stream.op
    x, ratio, mode = (*node.inputs, None, None)[:3]
    assert x is not None
    drop = 0.5 if ratio is None else S.constant_of(ratio)
    if drop is not None and S.constant_of(mode) is not None:
        keep: float | ir.Value = 1.0 - float(np.asarray(drop).reshape(()))
        if keep == 1.0 and len(node.outputs) == 1:  # nothing is dropped
            return [x]
        scale = op.const(1.0 / keep if keep else 0.0, x.dtype)
    else:
        ratio = op.const(0.5) if ratio is None else op.cast(ratio, ir.DataType.FLOAT)
        chosen = op.Sub(1.0, ratio)
        if S.constant_of(mode) is None:
            chosen = op.Where(mode, chosen, op.const(1.0))
        keep = op.Reshape(chosen, op.const([], ir.DataType.INT64))
        scale = op.cast(op.Reciprocal(keep), x.dtype)
    mask = stream.mask(x, node_id, keep)
    return [op.Where(mask, op.Mul(x, scale), op.const(0.0, x.dtype)), mask]


def _attributes(stream: RandomStream, node: ir.Node) -> dict:
    return S.attributes_of(node, stream.op.opset)


def _target(node: ir.Node, attributes: dict, like: ir.Value | None) -> ir.DataType:
    """Return the dtype of the output."""
    if attributes.get("dtype") is not None:
        return ir.DataType(attributes["dtype"])
    dtype = ir.DataType.FLOAT if like is None else like.dtype
    assert dtype is not None
    return dtype


def _random_uniform(stream: RandomStream, node: ir.Node, node_id: int) -> list[ir.Value]:
    op, a = stream.op, _attributes(stream, node)
    like = node.inputs[0] if node.inputs else None
    u = stream.uniform(a["shape"] if like is None else like, node_id)
    low, high = float(a["low"]), float(a["high"])
    if (low, high) != (0.0, 1.0):
        u = op.Add(op.Mul(u, high - low), low)
    return [op.cast(u, _target(node, a, like))]


def _random_normal(stream: RandomStream, node: ir.Node, node_id: int) -> list[ir.Value]:
    op, a = stream.op, _attributes(stream, node)
    like = node.inputs[0] if node.inputs else None
    z = stream.normal(a["shape"] if like is None else like, node_id)
    mean, scale = float(a["mean"]), float(a["scale"])
    if (mean, scale) != (0.0, 1.0):
        z = op.Add(op.Mul(z, scale), mean)
    return [op.cast(z, _target(node, a, like))]


def _bernoulli(stream: RandomStream, node: ir.Node, node_id: int) -> list[ir.Value]:
    op, p = stream.op, node.inputs[0]
    assert p is not None
    drawn = op.Less(stream.uniform(p, node_id), op.cast(p, ir.DataType.FLOAT))
    return [op.Cast(drawn, to=_target(node, _attributes(stream, node), p))]


def _multinomial(stream: RandomStream, node: ir.Node, node_id: int) -> list[ir.Value]:
    """The number of classes whose cumulative probability is at most a uniform draw."""
    op, x = stream.op, node.inputs[0]
    assert x is not None
    a = _attributes(stream, node)
    cumulated = op.CumSum(op.Softmax(op.cast(x, ir.DataType.FLOAT), axis=1), 1)
    drawn = stream.uniform([op.size(x, 0), a["sample_size"]], node_id)
    passed = op.GreaterOrEqual(op.Unsqueeze(drawn, [2]), op.Unsqueeze(cumulated, [1]))
    count = op.ReduceSum(op.Cast(passed, to=ir.DataType.INT64), [2], keepdims=0)
    classes = op.size(x, 1)
    last = op.const(classes - 1) if isinstance(classes, int) else op.Sub(classes, 1)
    dtype = ir.DataType(a["dtype"]) if a.get("dtype") else ir.DataType.INT32
    return [op.Cast(op.Min(count, last), to=dtype)]


_REWRITES: dict[str, Callable[[RandomStream, ir.Node, int], list[ir.Value]]] = {
    "Dropout": _dropout,
    "RandomUniform": _random_uniform,
    "RandomUniformLike": _random_uniform,
    "RandomNormal": _random_normal,
    "RandomNormalLike": _random_normal,
    "Bernoulli": _bernoulli,
    "Multinomial": _multinomial,
}
