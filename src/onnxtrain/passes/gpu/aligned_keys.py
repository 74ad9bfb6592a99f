"""Attention over a few keys more, so many that kernels can read rows of scores in whole words.

Rows of 197 scores have slow kernels on a GPU, in all six products of attention and its gradient;
rows of 200 have fast ones. So keys and values get rows of zeros, and a mask that takes their scores
out: their weight is zero, ``p V = [p, 0] [V; 0]``, and nothing comes back from them. The mask is
infinite, so that keys which a file masks by a large number come before those that were added.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.simplify.redundant import remove_dead_nodes

_WORDS = {ir.DataType.FLOAT: 4, ir.DataType.BFLOAT16: 8, ir.DataType.FLOAT16: 8}


def aligned_keys(model: ir.Model, op: OpBuilder) -> int:
    """Add keys to attention over a number of them that is no whole word; return how often."""
    remove_dead_nodes(op.graph)  # casts that nothing reads
    return sum(_align(op, node) for node in nodes(op.graph, "Softmax"))


@dataclasses.dataclass(frozen=True)
class _Attention:
    """The two products around a softmax, and what lies between them."""

    scores: ir.Node
    between: list[ir.Node]
    """From the scores to what the second product reads, the softmax among them."""
    result: ir.Node
    mask: tuple[ir.Node, int] | None
    """A sum, and which of its operands is no score."""
    more: int


def _align(op: OpBuilder, softmax: ir.Node) -> int:
    attention = _attention(softmax)
    if attention is None:
        return 0
    keys, values = attention.scores.inputs[1], attention.result.inputs[1]
    assert keys is not None
    assert values is not None
    op.position = attention.scores
    attention.scores.replace_input_with(1, _padded(op, keys, -1, attention.more, 0.0))
    op.position = attention.result
    attention.result.replace_input_with(1, _padded(op, values, -2, attention.more, 0.0))
    for node in (attention.scores, *attention.between):
        y = node.outputs[0]
        *lead, last = op.dims(y)
        assert isinstance(last, int)
        S.set_dims(y, [*lead, last + attention.more])
    if attention.mask is not None:
        add, at = attention.mask
        mask = add.inputs[at]
        assert mask is not None
        op.position = add
        add.replace_input_with(at, _padded(op, mask, -1, attention.more, -math.inf))
        return 1
    op.position = softmax
    x = softmax.inputs[0]
    last = 0 if x is None else op.dims(x)[-1]
    assert x is not None
    assert isinstance(last, int)
    low = np.where(np.arange(last) < last - attention.more, 0.0, -math.inf)
    softmax.replace_input_with(0, op.Add(x, op.const(low, x.dtype)))
    return 1


def _padded(op: OpBuilder, x: ir.Value, axis: int, more: int, number: float) -> ir.Value:
    sizes = list(D.numbers(S.dims_of(x)) or ())
    sizes[axis] = more
    return op.Concat(x, op.Expand(op.const(number, x.dtype), sizes), axis=axis)


def _attention(softmax: ir.Node) -> _Attention | None:
    """Return the attention that a softmax over known sizes belongs to."""
    x, y = softmax.inputs[0], softmax.outputs[0]
    sizes, axis = D.numbers(S.dims_of(y)), softmax.attributes.get("axis")
    if x is None or x.dtype not in _WORDS or sizes is None or len(sizes) < 3:
        return None
    if axis is not None and axis.as_int() not in (-1, len(sizes) - 1):
        return None
    above = _to_scores(x, softmax)
    below = _to_result(y)
    if above is None or below is None:
        return None
    between = [*reversed(above[1:]), softmax, *below[:-1]]
    sums = [(n, at) for n in between if is_op(n, "Add") if (at := _other(n, sizes[-1])) is not None]
    more = _more(above[0], below[-1], sizes)
    if more is None or len(sums) != sum(is_op(n, "Add") for n in between) or len(sums) > 1:
        return None
    late = itertools.takewhile(lambda n: not is_op(n, "Add"), above[1:])
    if sums and not all(is_op(n, "Cast") for n in late):
        return None  # infinity times a factor
    return _Attention(above[0], between, below[-1], sums[0] if sums else None, more)


def _to_scores(x: ir.Value, reader: ir.Node) -> list[ir.Node] | None:
    """Return the product that makes scores, and what is done to them, the last first behind it."""
    chain: list[ir.Node] = []
    while (node := _only(x, reader)) is not None:
        if is_op(node, "MatMul"):
            return [node, *chain]
        sides = [z for z in node.inputs if z is not None]
        if is_op(node, "Mul", "Div"):
            factor = S.constant_of(sides[1])
            sides = sides[:1] if factor is not None and factor.size == 1 else []
        whole = [z for z in sides if S.same_shape(z, node.outputs[0])]
        if not is_op(node, "Mul", "Div", "Cast", "Add") or not whole:
            return None
        products = [z for z in whole if z.producer() is not None]
        if len(products) != 1:
            return None
        chain.append(node)
        x, reader = products[0], node
    return None


def _to_result(p: ir.Value) -> list[ir.Node] | None:
    """Return what leads from weights to the product with values, that last."""
    chain: list[ir.Node] = []
    while len(p.uses()) == 1 and not p.is_graph_output():
        ((node, index),) = p.uses()
        chain.append(node)
        if is_op(node, "MatMul"):
            return chain if index == 0 else None
        if not is_op(node, "Cast"):
            return None
        p = node.outputs[0]
    return None


def _only(x: ir.Value, reader: ir.Node) -> ir.Node | None:
    """Return what makes a value that nothing else reads."""
    node = x.producer()
    if node is None or len(x.uses()) != 1 or x.is_graph_output() or node.graph is not reader.graph:
        return None
    return node


def _other(add: ir.Node, keys: int) -> int | None:
    """Return which operand of a sum is a mask with a number for each key."""
    for i, x in enumerate(add.inputs):
        sizes = None if x is None else D.numbers(S.dims_of(x))
        if x is not None and sizes and sizes[-1] == keys and not S.same_shape(x, add.outputs[0]):
            return i
    return None


def _more(scores: ir.Node, result: ir.Node, sizes: list[int]) -> int | None:
    """Return how many keys are added, ``None`` if that does not pay."""
    operands = [*scores.inputs, result.inputs[1]]
    known = [None if x is None else D.numbers(S.dims_of(x)) for x in operands]
    word = _WORDS.get(scores.outputs[0].dtype or ir.DataType.UNDEFINED)
    q, k, v = known
    if word is None or q is None or k is None or v is None or len(k) < 3 or len(v) < 3:
        return None
    keys, more = sizes[-1], -sizes[-1] % word
    if not more or k[-1] != keys or v[-2] != keys or math.prod(sizes) < T.FLAT_ELEMENTS:
        return None
    return more if keys >= T.ALIGNED_KEYS * max(q[-1], more) else None


__all__ = ["aligned_keys"]
