"""Scores of attention: a softmax over a product of queries and keys, scaled and masked."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_op
from onnxtrain.graph.shapes.dims import Dim

FUSED_ATTENTION_DTYPES = (ir.DataType.BFLOAT16,)
"""Types of attention that CUDA has a fast operator for."""
_MAX_HEAD_SIZE = 256
PADDED_ATTENTION = "counted keys and features"
"""What the node of a softmax knows if others of its keys are closed, and nothing else masks any."""


@dataclasses.dataclass(frozen=True)
class AttentionScores:
    """How the weights of attention are made.

    Attributes:
        nodes: from the product to the softmax.
        operands: all that these read of others.
    """

    nodes: tuple[ir.Node, ...]
    operands: tuple[ir.Value, ...]

    @property
    def query(self) -> ir.Value:
        """The left side of the product."""
        x = self.nodes[0].inputs[0]
        assert x is not None
        return x

    @property
    def key(self) -> ir.Value:
        """The right side of the product, transposed already."""
        x = self.nodes[0].inputs[1]
        assert x is not None
        return x

    @property
    def counted(self) -> tuple[int, int] | None:
        """How many keys and features count, if there are others, which are closed."""
        return self.nodes[-1].meta.get(PADDED_ATTENTION)

    @property
    def width(self) -> Dim:
        """How many features count."""
        return (S.dims_of(self.query) or (None,))[-1] if self.counted is None else self.counted[1]

    @property
    def is_long(self) -> bool:
        """Whether a row of scores is much longer than what it is made of."""
        width = (S.dims_of(self.query) or (None,))[-1]
        length = (S.dims_of(self.key) or (None,))[-1]
        if not isinstance(width, int) or not isinstance(length, int):
            return False
        return length >= T.LONG_ATTENTION_RATIO * width

    @property
    def fits_fused_attention(self) -> bool:
        """Whether CUDA's operator for attention can make its result: 16 bits, without a mask."""
        query, key = S.dims_of(self.query), S.dims_of(self.key)
        if self.query.dtype not in FUSED_ATTENTION_DTYPES or query is None or key is None:
            return False
        width = self.width
        whole = len(query) == 4 and query[:2] == key[:2]
        whole = whole and sum(not isinstance(d, int) for d in key) < 2 and None not in query
        fits = isinstance(width, int) and width % 8 == 0 and width <= _MAX_HEAD_SIZE
        return whole and fits and attention_scale(self) is not None


def attention_scale(scores: AttentionScores) -> float | None:
    """Return what scores are multiplied by, if nothing else happens to them."""
    factor = 1.0
    for node in scores.nodes[1:-1]:
        if scores.counted is not None and is_op(node, "Add"):  # closes other keys
            continue
        x, number = node.inputs[0], S.constant_of(node.inputs[1])
        if not is_op(node, "Mul", "Div") or x is None or number is None or number.size != 1:
            return None
        if not S.same_shape(x, node.outputs[0]) or not float(number.item()):
            return None
        value = float(number.item())
        factor = factor * value if is_op(node, "Mul") else factor / value
    return factor


def match_attention_scores(softmax: ir.Node) -> AttentionScores | None:
    """Return what a softmax over the last axis is made of, if that is a product of matrices."""
    x, y = softmax.inputs[0], softmax.outputs[0]
    rank, axis = len(S.dims_of(y) or ()), softmax.attributes.get("axis")
    if rank < 3 or (axis is not None and axis.as_int() not in (-1, rank - 1)):
        return None
    nodes, operands = [softmax], list[ir.Value]()
    while x is not None:
        node = x.producer()
        if node is None or not S.same_shape(x, y) or node.graph is not softmax.graph:
            return None
        if len(live_uses(x)) != 1 or x.is_graph_output():
            return None
        nodes.append(node)
        if is_op(node, "MatMul"):
            sides = [v for v in node.inputs if v is not None]
            if any(len(S.dims_of(v) or ()) != rank for v in sides):
                return None
            return AttentionScores(tuple(reversed(nodes)), (*sides, *operands))
        x = _scores_operand(node, y)
        operands += [v for v in node.inputs if v is not None and v is not x]
    return None


def live_uses(x: ir.Value) -> list[tuple[ir.Node, int]]:
    """Return the uses of a value, without nodes that nothing reads."""
    return [
        (node, i)
        for node, i in x.uses()
        if any(y.uses() or y.is_graph_output() for y in node.outputs)
    ]


def _scores_operand(node: ir.Node, scores: ir.Value) -> ir.Value | None:
    """Return the one operand of a sum, a factor or a mask that is as large as the scores."""
    if not is_op(node, "Add", "Sub", "Mul", "Div", "Where"):
        return None
    numbers = [x for x in node.inputs if x is not None and x.dtype == scores.dtype]
    large = [x for x in numbers if S.same_shape(x, scores)]
    if len(large) > 1:  # a mask of each head: the product is the one to go on with
        large = [x for x in large if (p := x.producer()) is not None and is_op(p, "MatMul")]
    return large[0] if len(large) == 1 else None


__all__ = [
    "FUSED_ATTENTION_DTYPES",
    "PADDED_ATTENTION",
    "AttentionScores",
    "attention_scale",
    "live_uses",
    "match_attention_scores",
]
