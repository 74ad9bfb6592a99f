"""Sums and means over axes with a gap between them, in two steps.

A channel's sum over batch and positions reads an image here and an image there: on a GPU the
general kernel for that takes six times as long as a sum over the positions of each image, which lie
together, and then one over the batch. Of these two the first is fastest as a product with a vector,
and for small images as the kernel that pools. A mean's factor is part of that vector.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import is_op, key_of, nodes
from onnxtrain.graph.shapes import dims as D

_KINDS = ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum")
_Vectors = dict[tuple[int, float], ir.Value]
"""What rows are multiplied by: so many equal numbers."""


def split_reductions(model: ir.Model, op: OpBuilder) -> int:
    """Reduce the last axes first where others come after a gap; return how many were split."""
    vectors: _Vectors = {}
    return sum(_split(op, node, vectors) for node in nodes(op.graph, *_KINDS))


def _split(op: OpBuilder, node: ir.Node, vectors: _Vectors) -> int:
    x, axes = node.inputs[0], S.constant_of((*node.inputs, None)[1])
    dims = None if x is None else S.dims_of(x)
    if x is None or axes is None or dims is None or not axes.size:
        return 0
    rank = len(dims)
    wanted = sorted({int(a) % rank for a in axes.ravel()})
    last = [a for a in wanted if set(range(a, wanted[-1])) <= set(wanted)]
    first = [a for a in wanted if a not in last]
    if not first or last[-1] != rank - 1:
        return 0
    keepdims = S.attributes_of(node, op.opset)["keepdims"]
    y = node.outputs[0]
    uses = list(y.uses())
    op.position = node
    kind = getattr(op, key_of(node))
    count = math.prod(D.numbers(dims[2:]) or (0,))
    pooled = count > 0 and x.dtype == ir.DataType.FLOAT and _pooled(node, last, rank)
    if pooled and count >= T.NORMALISED_POSITIONS and isinstance(dims[1], int):
        outer = _by_product(op, node, count, vectors)
        outer = op.Reshape(outer, [1, -1, 1, 1]) if keepdims else outer
    elif pooled:
        means = kind(op.GlobalAveragePool(x), first, keepdims=1)
        inner = means if is_op(node, "ReduceMean") else op.Mul(means, float(count))
        outer = inner if keepdims else op.Squeeze(inner, wanted)
    else:
        inner = kind(x, last, keepdims=keepdims)
        if x.dtype == ir.DataType.BFLOAT16:  # what kernels sum up in float32 is added so, too
            inner = op.Cast(inner, to=ir.DataType.FLOAT)
        outer = op.cast(kind(inner, first, keepdims=keepdims), x.dtype)
    replace_value(y, outer, uses)
    return 1


def _pooled(node: ir.Node, last: list[int], rank: int) -> bool:
    """Return whether what is reduced first are the positions of images."""
    return is_op(node, "ReduceMean", "ReduceSum") and rank == 4 and last == [2, 3]


def _by_product(op: OpBuilder, node: ir.Node, count: int, vectors: _Vectors) -> ir.Value:
    """Return the sum or mean of each channel, ``[channels]``."""
    x, mean = node.inputs[0], is_op(node, "ReduceMean")
    assert x is not None
    batch, channels = op.dims(x)[:2]
    of_all = mean and isinstance(batch, int)
    factor = 1.0 / (count * (batch if isinstance(batch, int) else 1)) if mean else 1.0
    if (count, factor) not in vectors:
        vectors[count, factor] = op.const(np.full((count, 1), factor), ir.DataType.FLOAT)
    sums = op.MatMul(op.Reshape(x, [-1, count]), vectors[count, factor])
    table = op.Reshape(sums, [-1, channels])
    last = op.ReduceMean if mean and not of_all else op.ReduceSum
    return last(table, [0], keepdims=0)
