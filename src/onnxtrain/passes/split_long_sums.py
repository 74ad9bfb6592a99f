"""Sums and means over very many numbers, in stages that lose nothing.

Runtimes add up in float32, one number after the other: over 16 million the result is off by one
part in 600. A mean of means over equal parts is the mean of all, and each stage adds few numbers.
Where the last stage may still be long, because a size is known at run time only, it is computed in
float64, if the runtime has that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.builder.replace_value import replace_value
from onnxtrain.graph.nodes import is_op, nodes
from onnxtrain.graph.shapes.dims import Dim

LONG = 1 << 16
"""So many numbers are added up in one stage, with an error below 1e-6."""
_FEW, _SEVERAL = 16, 2
"""So few numbers per sample, if a sample has several times as many."""
_WORTHWHILE = 32
"""Shorter rows are not added up by themselves."""


def split_long_sums(model: ir.Model, op: OpBuilder) -> int:
    """Split reductions of float32 over all axes that may be long; return how many there were."""
    count = 0
    for node in nodes(op.graph, "ReduceMean", "ReduceSum"):
        x = node.inputs[0]
        if x is None or x.dtype != ir.DataType.FLOAT or not _is_full(op, node):
            continue
        dims = S.dims_of(x)
        if not dims or _fits(dims) or _per_sample(op.graph, dims):
            continue
        old = node.outputs[0]
        new = _Stages(op.before(node), mean=is_op(node, "ReduceMean")).reduce(x, list(dims))
        if new is None:
            continue
        new.type = old.type
        replace_value(old, new, list(old.uses()))
        op.graph.remove(node, safe=True)
        count += 1
    return count


def _is_full(op: OpBuilder, node: ir.Node) -> bool:
    """Return whether a reduction leaves a scalar of all elements."""
    options = S.attributes_of(node, op.opset)
    if options["keepdims"] or options["noop_with_empty_axes"]:
        return False
    return len(node.inputs) < 2 or node.inputs[1] is None


def _fits(dims: Sequence[Dim]) -> bool:
    size = _size(dims)
    return size is not None and size <= LONG


def _per_sample(graph: ir.Graph, dims: Sequence[Dim]) -> bool:
    """Return whether few numbers for each sample of a batch are added up.

    Samples of several numbers do not come by the million, and small nets would notice the time.
    """
    first, *rest = dims
    count = _size(rest)
    if isinstance(first, int) or first is None or count is None or count > _FEW:
        return False
    shapes = (S.dims_of(x) or () for x in graph.inputs)
    sizes = [_size(shape[1:]) for shape in shapes if len(shape) > 1 and shape[0] == first]
    return any(size is None or size >= _SEVERAL * count for size in sizes)


def _size(dims: Sequence[Dim]) -> int | None:
    """Return how many numbers there are, if all sizes are known."""
    sizes = [d for d in dims if isinstance(d, int)]
    return math.prod(sizes) if len(sizes) == len(dims) else None


class _Stages:
    """The stages of one reduction, from the last axis to the first."""

    def __init__(self, op: OpBuilder, *, mean: bool) -> None:
        self.op, self.mean = op, mean

    def reduce(self, x: ir.Value, dims: list[Dim]) -> ir.Value | None:
        """Return the whole sum or mean, or nothing if there is no better way."""
        start = x
        while not _fits(dims) and dims:
            taken = _last_axes(dims)
            if taken is not None:
                x, dims = self.over(x, len(dims), taken), dims[:-taken]
                continue
            parts = _parts(dims[-1])
            if parts is not None:
                whole = [0] * (len(dims) - 1)
                x = self.op.Reshape(x, [*whole, *parts])
                dims = [*dims[:-1], *parts]
                continue
            break
        if not dims:
            return x
        if _fits(dims) or self.op.target.lacks("float64"):
            return None if x is start else self.over(x)
        total = self.over(self.op.Cast(x, to=ir.DataType.DOUBLE))
        return self.op.Cast(total, to=ir.DataType.FLOAT)

    def over(self, x: ir.Value, rank: int = 0, count: int = 0) -> ir.Value:
        """Return the reduction over the last axes, or over all."""
        axes = [list(range(rank - count, rank))] if count else []
        kind = self.op.ReduceMean if self.mean else self.op.ReduceSum
        return kind(x, *axes, keepdims=0)


def _last_axes(dims: Sequence[Dim]) -> int | None:
    """Return how many axes at the end make one stage that is neither long nor short."""
    count, size = 0, 1
    for d in reversed(dims):
        if not isinstance(d, int) or size * d > LONG:
            break
        size, count = size * d, count + 1
    return count if size >= _WORTHWHILE else None


def _parts(dim: Dim) -> list[int] | None:
    """Return two factors of a long axis, the second one stage long."""
    if not isinstance(dim, int) or dim <= LONG:
        return None
    for size in range(min(LONG, dim // 2), _WORTHWHILE, -1):
        if dim % size == 0:
            return [dim // size, size]
    return None
