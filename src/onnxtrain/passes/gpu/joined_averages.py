"""Running averages of many small vectors, updated as one.

``new = old * kept + batch * part`` is three kernels for each mean and each variance of a net, and
each of them takes as long as its start. Vectors of one length are joined, averaged and split again:
six kernels for up to 32 of them. Only what is an output of the graph is joined, as what other nodes
read would have to wait for the last of the others.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes import dims as D


class _Average(NamedTuple):
    """An output that is a sum of two scaled vectors."""

    new: ir.Value
    vectors: tuple[ir.Value, ir.Value]
    factors: tuple[float, float]


def joined_averages(model: ir.Model, op: OpBuilder) -> int:
    """Join averages of vectors of one length and type; return how many were joined."""
    alike: dict[tuple[ir.DataType | None, int], list[_Average]] = defaultdict(list)
    for node in nodes(op.graph, "Add"):
        average = _average(node)
        if average is not None:
            sizes = D.numbers(S.dims_of(average.new) or (None,)) or [0]
            alike[average.new.dtype, sizes[0]].append(average)
    most, count = T.CAPTURED_CONCAT_INPUTS, 0
    for group in alike.values():
        for first in range(0, len(group), most):
            part = group[first : first + most]
            if len(part) >= T.JOINED_AVERAGES:
                _join(op.before(None), part)
                count += len(part)
    return count


def _average(node: ir.Node) -> _Average | None:
    """Return what a sum averages, if that is two vectors that it scales by numbers."""
    new = node.outputs[0]
    sizes = D.numbers(S.dims_of(new) or (None,))
    if not new.is_graph_output() or new.uses() or sizes is None or len(sizes) != 1:
        return None
    parts = [_scaled(x) for x in node.inputs]
    if any(p is None or S.dims_of(p[0]) != S.dims_of(new) for p in parts):
        return None
    (a, fa), (b, fb) = (p for p in parts if p is not None)
    return _Average(new, (a, b), (fa, fb))


def _scaled(x: ir.Value | None) -> tuple[ir.Value, float] | None:
    product = None if x is None else x.producer()
    if product is None or not is_op(product, "Mul"):
        return None
    vector, factor = product.inputs[0], S.constant_of(product.inputs[1])
    if vector is None or factor is None or factor.size != 1:
        return None
    return vector, float(factor.ravel()[0])


def _join(op: OpBuilder, group: list[_Average]) -> None:
    sides = []
    for side in (0, 1):
        rows = op.Concat(*(a.vectors[side] for a in group), axis=0)
        factors = np.array([[a.factors[side]] for a in group])
        dtype = group[0].new.dtype
        if len(set(factors.ravel())) == 1:
            sides.append(op.Mul(rows, op.const(factors[0, 0], dtype)))
        else:
            table = op.Reshape(rows, [len(group), -1])
            sides.append(op.Reshape(op.Mul(table, op.const(factors, dtype)), [-1]))
    parts = op.Split(op.Add(*sides), axis=0, num_outputs=len(group), _outputs=len(group))
    for average, part in zip(group, parts, strict=True):
        part.type = average.new.type
        replace_value(average.new, part, [])
