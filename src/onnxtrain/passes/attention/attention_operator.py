"""Attention in 16 bits by its own operator, where the backward pass makes its scores again.

CUDA's kernel for it writes no scores at all, and takes a fraction of the time of two products and a
softmax. It has no gradient of its own, so it stands for the forward pass alone: where nothing but
that reads the scores, which is what ``make_again`` leaves.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.memory.scores import Scores, plain_factor, read_by, scores_of
from onnxtrain.graph.modes.raise_opset import ATTENTION_SINCE, can_be_raised, raise_opset
from onnxtrain.graph.nodes import is_op, nodes


def attention_operator(model: ir.Model, op: OpBuilder) -> int:
    """Replace attention whose scores nothing else reads, in place; return how often."""
    plain: list[tuple[Scores, ir.Node]] = []
    for node in nodes(model.graph, "Softmax"):
        scores = scores_of(node)
        product = None if scores is None else _result(scores)
        if scores is not None and product is not None:
            plain.append((scores, product))
    if not plain or not can_be_raised(model, ATTENTION_SINCE):
        return 0
    raise_opset(model, ATTENTION_SINCE)
    op.opset = model.opset_imports[""]
    for scores, product in plain:
        op.position = product
        y, values = product.outputs[0], product.inputs[1]
        query, keys = scores.query, _turned(op, scores)
        if scores.counted is not None:
            length, width = scores.counted
            query = query if op.dims(query)[-1] == width else op.Slice(query, [0], [width], [3])
            keys = op.Slice(keys, [0, 0], [length, width], [2, 3])
            values = op.Slice(values, [0], [length], [2])
        again = op.Attention(query, keys, values, scale=plain_factor(scores))
        replace_value(y, again, list(y.uses()))
    return len(plain)


def _turned(op: OpBuilder, scores: Scores) -> ir.Value:
    """Return the keys as rows.

    The backward pass has the same transpose inside its products. If it were the same node, its
    result would be kept until then.
    """
    shape = [d if isinstance(d, int) else -1 for d in S.dims_of(scores.key) or ()]
    turned = op.Transpose(op.Reshape(scores.key, [1, *shape]), perm=[0, 1, 2, 4, 3])
    return op.Reshape(turned, [*shape[:2], shape[3], shape[2]])


def _result(scores: Scores) -> ir.Node | None:
    """Return the product that reads attention's weights, if the operator can stand for all."""
    p = scores.nodes[-1].outputs[0]
    uses = read_by(p)
    if not scores.is_plain or len(uses) != 1 or p.is_graph_output():
        return None
    node, place = uses[0]
    if not is_op(node, "MatMul") or place != 0 or node.inputs[1] is None:
        return None
    query, values = S.dims_of(scores.query), S.dims_of(node.inputs[1])
    if query is None or values is None or len(values) != 4:
        return None
    return node if (*values[:2], values[3]) == (*query[:2], scores.width) else None


__all__ = ["attention_operator"]
