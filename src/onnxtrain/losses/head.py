"""The last layer of a language model: what makes scores of hidden rows, each row by itself."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.copy_nodes import copy_node

_ALONE = ("Cast", "Identity", "Neg", "Sigmoid", "Tanh")
_PAIRS = ("Add", "Div", "Mul", "Sub")
_PRODUCTS = ("MatMul", "MatMulNBits")


@dataclasses.dataclass(frozen=True)
class Head:
    """Nodes that turn rows of ``hidden`` into rows of scores; without any, the scores are it."""

    hidden: ir.Value
    nodes: tuple[ir.Node, ...]
    scores: ir.Value

    def apply(self, op: OpBuilder, rows: ir.Value) -> ir.Value:
        """Emit the scores of some rows ``[R, H]``."""
        made = {self.hidden: rows}
        for node in self.nodes:
            inputs = [None if x is None else made.get(x, x) for x in node.inputs]
            made[node.outputs[0]] = copy_node(op, node, inputs)
            _set_rows(made[node.outputs[0]], node.outputs[0], rows)
        return made[self.scores]


def _set_rows(copy: ir.Value, original: ir.Value, rows: ir.Value) -> None:
    dims, count = S.dims_of(original), S.dims_of(rows)
    copy.type = original.type
    if dims is not None and count is not None:
        S.set_dims(copy, [count[0], dims[-1]])


def head_of(scores: ir.Value) -> Head:
    """Return the nodes from the last hidden rows to the scores ``[..., V]``, as far as they go.

    They are followed backwards until one value is left that leads to the scores through a product.
    A node that looks at several rows at once ends the search without a result.
    """
    open_values, nodes, product = [scores], list[ir.Node](), False
    while len(open_values) > 1 or not product:
        value = _last_made(open_values)
        node = None if value is None else value.producer()
        sources = None if node is None else _row_inputs(node)
        if node is None or sources is None:
            return Head(scores, (), scores)
        open_values.remove(node.outputs[0])
        open_values += [x for x in sources if x not in open_values]
        nodes.append(node)
        product = product or node.op_type in _PRODUCTS
    (hidden,) = open_values
    dims, wide = S.dims_of(hidden), S.dims_of(scores)
    if dims is None or wide is None or dims[:-1] != wide[:-1] or not isinstance(dims[-1], int):
        return Head(scores, (), scores)
    return Head(hidden, tuple(reversed(nodes)), scores)


def _last_made(values: list[ir.Value]) -> ir.Value | None:
    """Return the value that the graph computes last: nothing else of them can depend on it."""
    graph = values[0].graph
    made = {x.producer(): x for x in values if x.producer() is not None}
    if len(made) < len(values) or graph is None:
        return None
    if len(values) == 1:
        return values[0]
    return next((made[node] for node in reversed(graph) if node in made), None)


def _row_inputs(node: ir.Node) -> list[ir.Value] | None:
    """Return the inputs that rows of the output come from; ``None`` if rows are mixed."""
    inputs = [x for x in node.inputs if x is not None]
    if len(node.outputs) != 1 or not inputs:
        return None
    if node.op_type in _ALONE:
        return inputs
    if node.op_type in _PRODUCTS:
        flat = node.op_type == "MatMulNBits" or len(S.dims_of(inputs[1]) or ()) == 2
        return inputs[:1] if flat and _from_weights(inputs[1]) else None
    if node.op_type in _PAIRS:
        rank = len(S.dims_of(node.outputs[0]) or ())
        rows = [x for x in inputs if len(S.dims_of(x) or ()) == rank]
        others = [x for x in inputs if x not in rows]
        same = all((S.dims_of(x) or ())[:-1] == (S.dims_of(inputs[0]) or ())[:-1] for x in rows)
        narrow = all(S.dims_of(x) is not None and len(S.dims_of(x) or ()) <= 1 for x in others)
        if rows and narrow and (same or len(rows) == 1) and rank > 1:
            return rows
    return None


def _from_weights(x: ir.Value) -> bool:
    """Return whether a value is a weight, or a weight in another layout or type."""
    seen: ir.Value | None = x
    while seen is not None and seen.producer() is not None:
        node = seen.producer()
        assert node is not None
        if node.op_type not in ("Cast", "DequantizeLinear", "Identity", "Reshape", "Transpose"):
            return False
        seen = node.inputs[0]
    return seen is not None and seen.is_initializer()


__all__ = ["Head", "head_of"]
