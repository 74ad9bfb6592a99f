"""The bias of a layer added by its product, where a branch stands beside the product.

``(x W + z) + b = (x W + b) + z``: a layer with an adapter adds the branch ``z`` before the bias. A
Gemm takes ``b`` along for free, and a pass over the result is saved.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import is_op, nodes


def bias_into_gemm(model: ir.Model, op: OpBuilder) -> int:
    """Move biases into the products of their layers; return how many."""
    return sum(_move(op, node) for node in nodes(model.graph, "Add"))


def _move(op: OpBuilder, node: ir.Node) -> int:
    for total, bias in (tuple(node.inputs), tuple(reversed(node.inputs))):
        if total is None or bias is None or bias.producer() is not None:
            continue
        inner = _only_for(total, "Add")
        products = [] if inner is None else [_only_for(x, "Gemm") for x in inner.inputs]
        gemm = next((n for n in products if n is not None and _takes(n, bias)), None)
        if gemm is None or node.outputs[0].is_graph_output():
            continue
        op.position = gemm
        product, result = gemm.outputs[0], node.outputs[0]
        a, b = gemm.inputs[:2]
        attributes = {n: gemm.attributes[n].as_int() for n in _turns(gemm)}
        replace_value(product, op.Gemm(a, b, bias, **attributes), list(product.uses()))
        replace_value(result, total, list(result.uses()))
        return 1
    return 0


def _takes(gemm: ir.Node, bias: ir.Value) -> bool:
    """Return whether a product has no summand yet and a column for each number of a bias."""
    if len(gemm.inputs) > 2 and gemm.inputs[2] is not None:
        return False
    if set(gemm.attributes) - {"transA", "transB"}:  # a factor, which the bias must not get
        return False
    width = (S.dims_of(gemm.outputs[0]) or (None,))[-1]
    return isinstance(width, int) and S.dims_of(bias) == (width,)


def _turns(gemm: ir.Node) -> list[str]:
    return [n for n in ("transA", "transB") if n in gemm.attributes]


def _only_for(x: ir.Value | None, kind: str) -> ir.Node | None:
    """Return the node that makes a value for a single reader, if it is of this kind."""
    node = None if x is None else x.producer()
    if x is None or node is None or not is_op(node, kind):
        return None
    return node if len(list(x.uses())) == 1 and not x.is_graph_output() else None


__all__ = ["bias_into_gemm"]
