"""Match the scores of attention: a softmax of a matmul of queries and keys, scaled and masked.

`match_attention_scores` walks up from a softmax, because any number of scales and masks may lie in
between. `attention_scale` and `AttentionScores.fits_fused_attention` decide whether CUDA's fused
operator can replace them.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.nodes import is_op
from onnxtrain.graph.shapes.dims import Dim

FUSED_ATTENTION_DTYPES = (ir.DataType.BFLOAT16,)
"""Types for which CUDA has a fast Attention kernel."""
_MAX_HEAD_SIZE = 256  # of that kernel
PADDED_ATTENTION = "unpadded keys and features"
"""Key in the `meta` of a Softmax node whose keys are padded, and that has no other mask."""


@dataclasses.dataclass(frozen=True)
class AttentionScores:
    """How attention weights are computed.

    Attributes:
        nodes: from the matmul of queries and keys to the softmax.
        operands: all values that these nodes read and do not compute.
    """

    nodes: tuple[ir.Node, ...]
    operands: tuple[ir.Value, ...]

    @property
    def query(self) -> ir.Value:
        """The left operand of the matmul."""
        x = self.nodes[0].inputs[0]
        assert x is not None
        return x

    @property
    def key(self) -> ir.Value:
        """The right operand of the matmul, already transposed."""
        x = self.nodes[0].inputs[1]
        assert x is not None
        return x

    @property
    def unpadded(self) -> tuple[int, int] | None:
        """Numbers of keys and features without padding; None if there is no padding."""
        return self.nodes[-1].meta.get(PADDED_ATTENTION)

    @property
    def width(self) -> Dim:
        """Features of a head without padding."""
        return (S.dims_of(self.query) or (None,))[-1] if self.unpadded is None else self.unpadded[1]

    @property
    def is_long(self) -> bool:
        """Whether rows of scores are much longer than a head is wide."""
        width = (S.dims_of(self.query) or (None,))[-1]
        length = (S.dims_of(self.key) or (None,))[-1]
        if not isinstance(width, int) or not isinstance(length, int):
            return False
        return length >= T.LONG_ATTENTION_RATIO * width

    @property
    def fits_fused_attention(self) -> bool:
        """Whether CUDA's Attention kernel supports it: 16 bits, no mask, narrow heads."""
        query, key = S.dims_of(self.query), S.dims_of(self.key)
        if self.query.dtype not in FUSED_ATTENTION_DTYPES or query is None or key is None:
            return False
        width = self.width
        has_heads = len(query) == 4 and query[:2] == key[:2]
        is_known = sum(not isinstance(d, int) for d in key) < 2 and None not in query
        fits = isinstance(width, int) and width % 8 == 0 and width <= _MAX_HEAD_SIZE
        return has_heads and is_known and fits and attention_scale(self) is not None


def attention_scale(scores: AttentionScores) -> float | None:
    """Return the factor of the scores, or None if they are also masked."""
    scale = 1.0
    for node in scores.nodes[1:-1]:
        if scores.unpadded is not None and is_op(node, "Add"):  # masks the padding
            continue
        x, factor = node.inputs[0], S.constant_of(node.inputs[1])
        if not is_op(node, "Mul", "Div") or x is None or factor is None or factor.size != 1:
            return None
        if not S.same_shape(x, node.outputs[0]) or not float(factor.item()):
            return None
        value = float(factor.item())
        scale = scale * value if is_op(node, "Mul") else scale / value
    return scale


def match_attention_scores(softmax: ir.Node) -> AttentionScores | None:
    """Return how the input of a softmax over the last axis is computed, if by a batched matmul."""
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
    """Return the uses of a value by nodes that are not dead."""
    return [
        (node, i)
        for node, i in x.uses()
        if any(y.uses() or y.is_graph_output() for y in node.outputs)
    ]


def _scores_operand(node: ir.Node, scores: ir.Value) -> ir.Value | None:
    """Return the operand of a scale or a mask that has the shape of the scores."""
    if not is_op(node, "Add", "Sub", "Mul", "Div", "Where"):
        return None
    same_type = [x for x in node.inputs if x is not None and x.dtype == scores.dtype]
    large = [x for x in same_type if S.same_shape(x, scores)]
    if len(large) > 1:  # the mask has a row per head; the scores come from the matmul
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
