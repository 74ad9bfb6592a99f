"""Scale and shift of a layer normalisation, moved into the linear layers that read it.

``(s xh + b) W + c = xh (s W) + (b W + c)``. With many more rows than columns ``s W`` costs little,
and so do the gradients of ``s`` and ``b``, which then come from the gradient of ``s W`` and need no
pass over the rows. The normalised ``xh`` is what the gradient of the normalisation wants, too.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.prepare import mark_constants


@dataclasses.dataclass(frozen=True)
class _Linear:
    """A product with a matrix ``[in, out]`` and the sum with a vector that follows."""

    product: ir.Node
    add: ir.Node
    bias: ir.Value
    width: int


def absorb_norm_scale(model: ir.Model, op: OpBuilder) -> int:
    """Absorb where the normalised values feed linear layers only; return how often."""
    graph, known, folded = model.graph, set(model.graph.initializers), 0
    for node in nodes(graph, "LayerNormalization"):
        readers = _readers(node)
        if readers:
            _fold(OpBuilder(graph, "norm/", target=op.target), node, readers)
            folded += 1
    mark_constants(model, set(graph.initializers) - known)
    return folded


def _readers(node: ir.Node) -> list[_Linear] | None:
    """Return the linear layers behind a normalisation of float32 rows that has scale and shift."""
    y, scale = node.outputs[0], node.inputs[1]
    x, dims = node.inputs[0], S.dims_of(y)
    if x is None or scale is None or dims is None or y.dtype != ir.DataType.FLOAT:
        return None
    if len(node.inputs) < 3 or node.inputs[2] is None or y.is_graph_output():
        return None
    if any(o.uses() or o.is_graph_output() for o in node.outputs[1:]):
        return None
    if not all(isinstance(d, int) for d in dims) or S.dims_of(scale) != dims[-1:]:
        return None
    if S.dims_of(node.inputs[2]) != dims[-1:]:
        return None
    readers = [_linear(use.node, use.idx, y) for use in y.uses()]
    if any(f is None for f in readers):
        return None
    layers = [f for f in readers if f is not None]
    rows = math.prod(d for d in dims[:-1] if isinstance(d, int))
    width = sum(f.width for f in layers)
    return layers if rows >= T.NORM_ROWS_PER_COLUMN * width else None


def _linear(node: ir.Node, index: int, y: ir.Value) -> _Linear | None:
    if not is_op(node, "MatMul") or index != 0 or node.graph is not y.graph:
        return None
    weight, product = node.inputs[1], node.outputs[0]
    dims = None if weight is None else S.dims_of(weight)
    if dims is None or len(dims) != 2 or not isinstance(dims[1], int):
        return None
    if len(product.uses()) != 1 or product.is_graph_output():
        return None
    ((add, at),) = product.uses()
    bias = add.inputs[1 - at] if is_op(add, "Add") and add.graph is y.graph else None
    if bias is None or S.dims_of(bias) != dims[1:]:
        return None
    return _Linear(node, add, bias, dims[1])


def _fold(op: OpBuilder, node: ir.Node, layers: list[_Linear]) -> None:
    scale, shift = node.inputs[1:3]
    assert scale is not None
    assert shift is not None
    for layer in layers:
        op.position = layer.product
        weight = layer.product.inputs[1]
        assert weight is not None
        turn = weight.producer()
        if turn is not None and is_op(turn, "Transpose") and turn.graph is op.graph:
            stored = turn.inputs[0]  # [out, in]; the product then still reads a transposed matrix
            scaled = op.Transpose(op.Mul(stored, scale), perm=[1, 0])
            # With a vector onnxruntime takes 25 times as long as with a matrix of one column.
            moved = op.Squeeze(op.MatMul(stored, op.Unsqueeze(shift, [1])), [1])
        else:
            scaled = op.Mul(weight, op.Unsqueeze(scale, [1]))
            moved = op.MatMul(shift, weight)
        layer.product.replace_input_with(1, scaled)
        op.position = layer.add
        at = list(layer.add.inputs).index(layer.bias)
        layer.add.replace_input_with(at, op.Add(layer.bias, moved))
    width = op.static(scale)
    assert width is not None
    node.replace_input_with(1, op.const(np.ones(width, np.float32)))
    node.resize_inputs(2)


__all__ = ["absorb_norm_scale"]
