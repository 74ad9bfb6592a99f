"""Random operators rewritten into arithmetic on an input: the same masks everywhere, and again.

A runtime's own random operators give other numbers in every session, and some backends have none.
After this pass the numbers are a function of the input ``rng`` = (seed, step), of the node and of
the element.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.captured_values import subgraphs_of
from onnxtrain.graph.modes.random_numbers import SOURCES, RandomStream, uniform_mask
from onnxtrain.graph.nodes import is_standard
from onnxtrain.graph.prepare import mark_constants
from onnxtrain.targets import Target

__all__ = ["portable_dropout", "uniform_mask"]

_IDS = 4  # how many streams a node may use


def portable_dropout(
    model: ir.Model, rng_input_name: str = "rng", *, target: str | Target = "cpu"
) -> ir.Model:
    """Rewrite Dropout in training and the random operators, in place; return the model.

    If there are any, the model gets an input ``rng``: float32 [2] = (seed, step), whole numbers
    below 2^24. Dropout out of training is left alone.

    Args:
        model: a prepared model, with shapes inferred.
        rng_input_name: the name of the new input.
        target: which form to choose; the numbers are the same.

    Raises:
        PrepareError: if the name is taken, or a random node stands in a Scan.
    """
    if not any(_is_random(n) for n in model.graph.all_nodes()):
        return model
    op = OpBuilder(model.graph, prefix="random/", target=target)
    if rng_input_name in op.names.taken:
        raise PrepareError(
            f"the model has a value called {rng_input_name!r}\n"
            "hint: choose another name for the input that makes it random"
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
    """Walks graphs in order, and counts the random nodes."""

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
                self.next_id += _IDS
                _replace(graph, stream.op, node, values)

    def _inner(self, node: ir.Node, body: ir.Graph, rng: ir.Value) -> ir.Value:
        """Return the ``rng`` of a subgraph: a loop adds its iteration."""
        if node.op_type == "If":
            return rng
        deep = S.dims_of(rng) == (SOURCES,)
        if node.op_type != "Loop" or deep:
            what = f"in {SOURCES - 1} nested loops" if deep else f"in a {node.op_type}"
            raise PrepareError(
                f"a random operator {what}: node {node.name!r} has no iteration to tell its runs "
                "apart\nhint: use the runtime's own random operators (randomness='native')"
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


# -- operators: stream, node, id -> one value per output --------------------------------


def _dropout(stream: RandomStream, node: ir.Node, node_id: int) -> list[ir.Value]:
    """``Where(mask, x / keep, 0)``; at run time, ``keep`` is 1 out of training."""
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
    """Count the classes whose cumulated probability the drawn number has passed."""
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
