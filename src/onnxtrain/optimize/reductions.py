"""Sums and means over very many numbers, in stages that lose nothing.

Runtimes add up in float32, one number after the other: over 16 million the result is off by one
part in 600. A mean of means over equal parts is the mean of all, and each stage adds few numbers.
Where the last stage may still be long, because a size is known at run time only, it is computed in
float64, if the runtime has that.

Sums of columns of 16-bit numbers, as gradients of biases are: a product with a row of ones.

``ReduceSum(x, rows) = 1 x``. Units for products read 16 bits at memory speed and add in float32,
as the kernel that sums columns does, and round once, as it does; that kernel takes up to four times
as long.

Sums and means over axes with a gap between them, in two steps.

A channel's sum over batch and positions reads an image here and an image there: on a GPU the
general kernel for that takes six times as long as a sum over the positions of each image, which lie
together, and then one over the batch. Of these two the first is fastest as a product with a vector,
and for small images as the kernel that pools. A mean's factor is part of that vector.

Three or more tensors added by one operator: ``(a + b) + c = Sum(a, b, c)``.

Gradients of what several layers read, as queries, keys, values and the way around them do, are
added as they come. Each addition reads two tensors and writes one. ``Sum`` reads each tensor once
and writes once, in one kernel, and adds in the same order. What is added early waits for the last
one, so additions that lie far apart stay as they are: shared weights would wait for all layers.
In 16 bits the kernel takes longer than the additions.

Sums of 16-bit numbers over many rows, as gradients of biases are, in float32.

A kernel that sums columns adds the parts of its blocks at the same few places, one after the other.
For 16-bit numbers a GPU has no such addition in one instruction: over a hundred thousand rows it
takes thirty times as long as in float32. Where the numbers were float32 before they were rounded,
these are summed, whatever their count; that is more exact, too.

Numbers that gradients are multiplied by one after the other become one number.

``-(u * 0.5) / s * (1 / n) * 2 * x = u * (-1 / n) / s * x``. The gradient of a root-mean-square
normalisation has six nodes instead of thirteen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder, replace_value
from onnxtrain.graph.nodes import is_op, nodes, op_key
from onnxtrain.graph.shapes import dims as D
from onnxtrain.graph.shapes.dims import Dim
from onnxtrain.graph.simplify.factors import fold_scale_chains

LONG_REDUCTION_ELEMENTS = 1 << 16
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
    return size is not None and size <= LONG_REDUCTION_ELEMENTS


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
        if not isinstance(d, int) or size * d > LONG_REDUCTION_ELEMENTS:
            break
        size, count = size * d, count + 1
    return count if size >= _WORTHWHILE else None


def _parts(dim: Dim) -> list[int] | None:
    """Return two factors of a long axis, the second one stage long."""
    if not isinstance(dim, int) or dim <= LONG_REDUCTION_ELEMENTS:
        return None
    for size in range(min(LONG_REDUCTION_ELEMENTS, dim // 2), _WORTHWHILE, -1):
        if dim % size == 0:
            return [dim // size, size]
    return None


_HALF = frozenset({ir.DataType.BFLOAT16, ir.DataType.FLOAT16})
_WORD = 8
"""Columns and rows are multiples of it, or kernels for products are slow."""


def column_sums_as_matmul(model: ir.Model, op: OpBuilder) -> int:
    """Write sums of columns as products, in place; return how many."""
    return sum(_rewrite(op, node) for node in nodes(op.graph, "ReduceSum"))


def _rewrite(op: OpBuilder, node: ir.Node) -> int:
    x, y = node.inputs[0], node.outputs[0]
    size = None if x is None else _matrix(node, x)
    sizes = D.static_sizes(S.dims_of(y) or (None,))
    if x is None or x.dtype not in _HALF or size is None or sizes is None:
        return 0
    rows, width = size
    if rows * width < T.MEMORY_BOUND_ELEMENTS or rows % _WORD or width % _WORD:
        return 0
    uses = list(y.uses())
    op.position = node
    ones = op.Expand(op.const(1.0, x.dtype), op.const([1, rows]))
    total = op.MatMul(ones, op.Reshape(x, [rows, width]))
    replace_value(y, op.Reshape(total, sizes), uses)
    return 1


def _matrix(node: ir.Node, x: ir.Value) -> tuple[int, int] | None:
    """Return rows and columns of what is summed, if nothing but the last axis is left."""
    sizes, axes = D.static_sizes(S.dims_of(x) or (None,)), S.constant_of((*node.inputs, None)[1])
    if sizes is None or axes is None or len(sizes) < 2:
        return None
    if sorted(int(a) % len(sizes) for a in axes.ravel()) != list(range(len(sizes) - 1)):
        return None
    return math.prod(sizes[:-1]), sizes[-1]


_KINDS = ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum")
_Vectors = dict[tuple[int, float], ir.Value]
"""What rows are multiplied by: so many equal numbers."""


def split_noncontiguous_reductions(model: ir.Model, op: OpBuilder) -> int:
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
    kind = getattr(op, op_key(node))
    count = math.prod(D.static_sizes(dims[2:]) or (0,))
    pooled = count > 0 and x.dtype == ir.DataType.FLOAT and _pooled(node, last, rank)
    if pooled and count >= T.NORM_KERNEL_POSITIONS and isinstance(dims[1], int):
        outer = _reduce_by_matmul(op, node, count, vectors)
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


def _reduce_by_matmul(op: OpBuilder, node: ir.Node, count: int, vectors: _Vectors) -> ir.Value:
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


_FEWEST, _MOST = 3, 8
"""Tensors of one ``Sum``: fewer are an addition, more are a further kernel."""
_MAX_DISTANCE = 200
"""Nodes between the first addition and the last, about a block of a transformer."""


def fuse_add_chain(model: ir.Model, op: OpBuilder) -> int:
    """Write chains of additions of tensors of one shape as sums, in place; return how many."""
    places = {node: i for i, node in enumerate(op.graph)}
    taken: set[ir.Node] = set()
    count = 0
    for node in reversed(nodes(op.graph, "Add")):
        terms, inner = _chain(node, places)
        if node in taken or len(terms) < _FEWEST:
            continue
        op.position, y = node, node.outputs[0]
        replace_value(y, op.Sum(*terms), list(y.uses()))
        taken |= inner
        count += 1
    return count


def _chain(node: ir.Node, places: dict[ir.Node, int]) -> tuple[list[ir.Value], set[ir.Node]]:
    """Return what a chain of additions adds, in its order, and the additions in front of it."""
    terms, inner = _unbroadcast_terms(node), set[ir.Node]()
    first, i = places[node] - _MAX_DISTANCE, 0
    while i < len(terms):
        made = _inner_addition(terms[i], node)
        if made is None or places[made] < first or len(terms) == _MOST:
            i += 1
        else:
            terms[i : i + 1] = _unbroadcast_terms(made)
            inner.add(made)
    return terms, inner


def _inner_addition(x: ir.Value, node: ir.Node) -> ir.Node | None:
    """Return the addition that makes a term which nothing else reads."""
    made = x.producer()
    if made is None or not is_op(made, "Add") or made.graph is not node.graph:
        return None
    return (
        made
        if len(x.uses()) == 1 and not x.is_graph_output() and _unbroadcast_terms(made)
        else None
    )


def _unbroadcast_terms(node: ir.Node) -> list[ir.Value]:
    """Return the two terms of an addition in float32, if neither is broadcast."""
    y, terms = node.outputs[0], [x for x in node.inputs if x is not None]
    fits = y.dtype == ir.DataType.FLOAT and all(S.same_shape(x, y) for x in terms)
    return terms if fits and S.rank_of(y) > 0 else []


FLOAT = ir.DataType.FLOAT


def accumulate_in_float32(model: ir.Model, op: OpBuilder) -> int:
    """Sum rows of 16-bit numbers in float32, in place; return how many sums there were."""
    return sum(_reduce_in_float32(op, node) for node in nodes(op.graph, "ReduceSum"))


def _reduce_in_float32(op: OpBuilder, node: ir.Node) -> int:
    x, y = node.inputs[0], node.outputs[0]
    rows = None if x is None or x.dtype not in _HALF else _rows(node, x)
    if x is None or x.dtype is None or rows is None or y.is_graph_output():
        return 0
    wide = _float32_source(x)
    if wide is None and rows < T.FLOAT32_ACCUMULATION_ROWS:
        return 0
    uses = list(y.uses())
    op.position = node
    source = op.Cast(x, to=FLOAT) if wide is None else wide
    axes = list(range(S.rank_of(x) - 1))
    total = op.ReduceSum(source, axes, keepdims=S.attributes_of(node, op.opset)["keepdims"])
    rounded = [use for use in uses if not _is_upcast(use.node)]
    for use in uses:
        if _is_upcast(use.node):
            new = use.node.outputs[0]
            replace_value(new, total, list(new.uses()))
    if rounded:
        replace_value(y, op.Cast(total, to=x.dtype), rounded)
    return 1


def _rows(node: ir.Node, x: ir.Value) -> int | None:
    """Return how many rows are summed, if nothing but the last axis is left."""
    dims, axes = S.dims_of(x), S.constant_of((*node.inputs, None)[1])
    if dims is None or axes is None or len(dims) < 2:
        return None
    if sorted(int(a) % len(dims) for a in axes.ravel()) != list(range(len(dims) - 1)):
        return None
    sizes = D.static_sizes(dims[:-1])
    return None if sizes is None else math.prod(sizes)


def _float32_source(x: ir.Value) -> ir.Value | None:
    """Return the float32 tensor that 16-bit numbers were made of."""
    cast = x.producer()
    if cast is None or not is_op(cast, "Cast"):
        return None
    source = cast.inputs[0]
    return source if source is not None and source.dtype == FLOAT else None


def _is_upcast(node: ir.Node) -> bool:
    """Return whether a node only makes float32 of a sum."""
    return is_op(node, "Cast") and node.outputs[0].dtype == FLOAT and not _is_output(node)


def _is_output(node: ir.Node) -> bool:
    return node.outputs[0].is_graph_output()


def fold_scalar_factors(model: ir.Model, op: OpBuilder) -> int:
    """Join the factors of gradients, in place; return how many nodes became needless."""
    return fold_scale_chains(model, op)
