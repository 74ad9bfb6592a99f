"""Biases of wide linear layers as one more column of their weights.

onnxruntime's CPU kernel writes the bias into the result first, and then adds the product to it:
a pass over the result that costs 10 to 15 % of a product much wider than its input. ``x W + b`` is
``[x, 1] [W; b]``, where only the smaller input and the weight are copied.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import is_op, nodes

_MOST_ROWS = 1 << 24  # the column of ones is a constant of the model


@dataclasses.dataclass(frozen=True)
class _Layer:
    """``x W + b`` for ``x`` of ``lead`` rows; ``weight`` lies as ``[out, in]`` if ``turned``."""

    x: ir.Value
    weight: ir.Value
    bias: ir.Value
    turned: bool
    lead: tuple[int, ...]


def bias_as_weight_column(model: ir.Model, op: OpBuilder) -> int:
    """Put biases into the weights where that saves time; return how many."""
    changed = 0
    for node in nodes(op.graph, "Gemm", "Add"):
        layer = _layer(node)
        if layer is None:
            continue
        y = node.outputs[0]
        uses = list(y.uses())
        op.position = node
        one = op.const(np.ones((*layer.lead, 1), np.float32))
        x = op.Concat(layer.x, one, axis=len(layer.lead))
        if layer.turned:
            bias = op.Unsqueeze(layer.bias, [1])
            weight = op.Transpose(op.Concat(layer.weight, bias, axis=1), perm=[1, 0])
        else:
            weight = op.Concat(layer.weight, op.Unsqueeze(layer.bias, [0]), axis=0)
        replace_value(y, op.MatMul(x, weight), uses)
        changed += 1
    return changed


def _layer(node: ir.Node) -> _Layer | None:
    layer = None
    if is_op(node, "Gemm"):
        layer = _gemm(node)
    elif is_op(node, "Add"):
        layer = _sum(node, 0) or _sum(node, 1)
    if layer is None or layer.x.dtype != ir.DataType.FLOAT:
        return None
    x, weight = S.dims_of(layer.x), S.dims_of(layer.weight)
    if x is None or weight is None or len(weight) != 2 or not all(isinstance(d, int) for d in x):
        return None
    lead = tuple(d for d in x[:-1] if isinstance(d, int))
    if math.prod(lead) > _MOST_ROWS:
        return None
    width, out = (weight[1], weight[0]) if layer.turned else weight
    if not isinstance(width, int) or not isinstance(out, int) or S.dims_of(layer.bias) != (out,):
        return None
    rows = math.prod(lead)
    if rows < T.BIAS_COLUMN_ROWS or rows * out < T.BIAS_COLUMN_ELEMENTS:
        return None
    if out < T.BIAS_COLUMN_RATIO * width:
        return None
    return dataclasses.replace(layer, lead=lead)


def _gemm(node: ir.Node) -> _Layer | None:
    x, weight, bias = (*node.inputs, None)[:3]
    options = S.attributes_of(node, node.version or 21)
    if x is None or weight is None or bias is None or options["transA"]:
        return None
    if options["alpha"] != 1.0 or options["beta"] != 1.0:
        return None
    return _Layer(x, weight, bias, bool(options["transB"]), ())


def _sum(node: ir.Node, at: int) -> _Layer | None:
    """Return the layer if input ``at`` is a product that nothing else reads."""
    z, bias = node.inputs[at], node.inputs[1 - at]
    product = None if z is None else z.producer()
    if z is None or bias is None or product is None or not is_op(product, "MatMul"):
        return None
    if product.graph is not node.graph or len(z.uses()) > 1 or z.is_graph_output():
        return None
    x, weight = product.inputs
    if x is None or weight is None:
        return None
    turn = weight.producer()
    if turn is not None and is_op(turn, "Transpose") and turn.graph is node.graph:
        stored = turn.inputs[0]
        if stored is not None and len(S.dims_of(stored) or ()) == 2:
            return _Layer(x, stored, bias, True, ())
    return _Layer(x, weight, bias, False, ())
