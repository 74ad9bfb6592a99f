"""Plain descent inside the products that make gradients.

``p - rate * (a @ b)`` is one Gemm that starts from ``p``, with the rate on the smaller factor: the
gradient is never written, read or scaled. Rows that are added to zeros are added to ``p`` likewise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.artifacts.options import BuildOptions
from onnxtrain.artifacts.signature import GraphSignature
from onnxtrain.graph.builder import OpBuilder


def descends(options: BuildOptions, name: str) -> bool:
    """Return whether a parameter's update is ``p - rate * gradient`` and nothing else."""
    plain = options.ema is None and options.clip.norm is None and options.clip.value is None
    return plain and options.optimizer.is_plain_descent(name)


def absorb_descent(
    signature: GraphSignature,
    options: BuildOptions,
    parameters: Mapping[str, ir.Value],
    gradients: Mapping[str, ir.Value],
) -> None:
    """Let outputs be new values of parameters instead of gradients, where that saves a pass.

    Args:
        signature: of the finished graph, which is changed.
        options: what was asked for.
        parameters: inputs of the graph, by name.
        gradients: its outputs, by the name of the parameter.
    """
    plain = [n for n in gradients if descends(options, n)]
    products = {n: way for n in plain if (way := _product(gradients[n], parameters[n]))}
    if not products:
        return
    op, rates = signature.op, _Rates(signature, options)
    for name, product in products.items():
        new = product.emit(op, parameters[name], rates.minus(name, parameters[name]))
        _replace(signature, gradients[name], name, new, parameters[name])
    left = [n for n in gradients if n not in products]
    if len(left) <= T.FUSED_SGD_LEFT_OVER and set(left) <= set(plain):
        for name in left:  # two nodes for each are quicker than another run
            p, g = parameters[name], gradients[name]
            new = op.Add(p, op.Mul(g, rates.minus(name, p)))
            _replace(signature, g, name, new, p)
    signature.sweep()


@dataclasses.dataclass(frozen=True)
class _Product:
    """A node that makes a gradient and could start from the parameter instead."""

    operator: str
    inputs: tuple[ir.Value | None, ...]
    """Those of the node that takes over, ``None`` for the parameter."""
    scaled: int
    """Which of them is to be multiplied with the rate."""
    attributes: tuple[ir.Attr, ...]

    def emit(self, op: OpBuilder, p: ir.Value, rate: ir.Value) -> ir.Value:
        inputs = [p if x is None else x for x in self.inputs]
        inputs[self.scaled] = op.Mul(inputs[self.scaled], rate)
        return op.append(
            ir.Node("", self.operator, inputs, attributes=self.attributes, version=op.opset)
        )


class _Rates:
    """The negative learning rates of parameters, each emitted once."""

    def __init__(self, signature: GraphSignature, options: BuildOptions) -> None:
        self._op, self._optimizer = signature.op, options.optimizer
        self._lr = signature.input("learning_rate", "lr", ir.DataType.FLOAT, [1])
        self._known: dict[tuple[ir.DataType | None, float], ir.Value] = {}

    def minus(self, name: str, like: ir.Value) -> ir.Value:
        factor = self._optimizer.group_of(name).lr_factor
        key = (like.dtype, factor)
        if key not in self._known:
            op = self._op
            rate = op.cast(op.Reshape(self._lr, op.const([])), like.dtype)
            self._known[key] = op.Neg(rate if factor == 1.0 else op.Mul(rate, factor))
        return self._known[key]


def _own_maker(gradient: ir.Value) -> ir.Node | None:
    """Return the node that makes a gradient, if nobody else reads what it makes."""
    node = gradient.producer()
    if node is None or gradient.uses():
        return None
    if node.op_type != "Identity":
        return node
    (x,) = node.inputs
    alone = x is not None and len(x.uses()) == 1 and not x.is_graph_output()
    return x.producer() if x is not None and alone else None


def _product(gradient: ir.Value, p: ir.Value) -> _Product | None:
    """Return what makes a gradient, if it can take the update over."""
    maker = _own_maker(gradient)
    if maker is None:
        return None
    if _is_product(maker):
        assert p.shape is not None
        rows, columns = p.shape.numpy()
        smaller = 0 if rows <= columns else 1
        attributes = tuple(a for a in maker.attributes.values() if a.name != "beta")
        return _Product("Gemm", (*maker.inputs[:2], None), smaller, attributes)
    if _adds_rows(maker):
        attributes = tuple(maker.attributes.values())
        return _Product("ScatterND", (None, *maker.inputs[1:]), 2, attributes)
    return None


def _is_product(node: ir.Node) -> bool:
    if node.op_type == "Gemm":
        return len(node.inputs) == 2 or node.inputs[2] is None
    ranks = [None if x is None or x.shape is None else len(x.shape) for x in node.inputs]
    return node.op_type == "MatMul" and ranks == [2, 2]


def _adds_rows(node: ir.Node) -> bool:
    """Return whether rows are added to zeros."""
    start = node.inputs[0].producer() if node.op_type == "ScatterND" and node.inputs[0] else None
    reduction = node.attributes.get("reduction")
    if start is None or start.op_type != "ConstantOfShape" or reduction is None:
        return False
    value = start.attributes.get("value")
    zeros = value is None or not value.as_tensor().numpy().any()
    return zeros and reduction.as_string() == "add"


def _replace(
    signature: GraphSignature, gradient: ir.Value, name: str, new: ir.Value, p: ir.Value
) -> None:
    new.shape, new.type = p.shape, p.type
    signature.replace_output(gradient, f"{name}.out", "parameter", new, p)
