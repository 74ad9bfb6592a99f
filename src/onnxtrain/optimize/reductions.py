"""Rewrites of sums and means: precision, fast kernels on CUDA, and constant factors.

- `split_long_sums`: float32 sums of very many elements are computed in stages.
- `column_sums_as_matmul` (CUDA): sums over rows in 16 bits become matmuls with a row of ones.
- `split_noncontiguous_reductions` (CUDA): reductions over axes with a gap become two reductions.
- `fuse_add_chain` (CUDA): `(a + b) + c -> Sum(a, b, c)`.
- `accumulate_in_float32` (CUDA): 16-bit sums over many rows are computed in float32.
- `fold_scalar_factors`: chains of constant factors become one factor.
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

_FLOAT = ir.DataType.FLOAT

# Long sums.

LONG_REDUCTION_ELEMENTS = 1 << 16
"""Elements that one stage adds, with an error below 1e-6."""
_FEW_PER_SAMPLE, _SAMPLE_RATIO = 16, 2  # see `_is_per_sample`
_MIN_STAGE = 32  # elements; shorter rows are not a stage of their own


def split_long_sums(model: ir.Model, op: OpBuilder) -> int:
    """Split float32 reductions over all axes that may be long into stages; return how many.

        before:  ReduceMean(x)                          16 million elements
        after:   ReduceMean(ReduceMean(x, last axes))

    Runtimes add in float32, one element after the other: over 16 million elements the result is off
    by one part in 600. A mean of means of equal parts is exact, and each stage adds few elements.
    If a symbolic size may still make the last stage long, that stage is computed in float64, if the
    target has it.
    """
    count = 0
    for node in nodes(op.graph, "ReduceMean", "ReduceSum"):
        x = node.inputs[0]
        if x is None or x.dtype != _FLOAT or not _reduces_all(op, node):
            continue
        dims = S.dims_of(x)
        if not dims or _fits_one_stage(dims) or _is_per_sample(op.graph, dims):
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


def _reduces_all(op: OpBuilder, node: ir.Node) -> bool:
    """Return whether a reduction returns a scalar."""
    options = S.attributes_of(node, op.opset)
    if options["keepdims"] or options["noop_with_empty_axes"]:
        return False
    return len(node.inputs) < 2 or node.inputs[1] is None


def _fits_one_stage(dims: Sequence[Dim]) -> bool:
    size = _size(dims)
    return size is not None and size <= LONG_REDUCTION_ELEMENTS


def _is_per_sample(graph: ir.Graph, dims: Sequence[Dim]) -> bool:
    """Return whether a value has few elements per sample of the batch, and inputs have more.

    Batches have far fewer than millions of such samples, and stages would slow small nets down.
    """
    first, *rest = dims
    count = _size(rest)
    if isinstance(first, int) or first is None or count is None or count > _FEW_PER_SAMPLE:
        return False
    shapes = (S.dims_of(x) or () for x in graph.inputs)
    sizes = [_size(shape[1:]) for shape in shapes if len(shape) > 1 and shape[0] == first]
    return any(size is None or size >= _SAMPLE_RATIO * count for size in sizes)


def _size(dims: Sequence[Dim]) -> int | None:
    """Return the number of elements, if all sizes are static."""
    sizes = [d for d in dims if isinstance(d, int)]
    return math.prod(sizes) if len(sizes) == len(dims) else None


class _Stages:
    """The stages of one reduction, from the last axis to the first."""

    def __init__(self, op: OpBuilder, *, mean: bool) -> None:
        self.op, self.mean = op, mean

    def reduce(self, x: ir.Value, dims: list[Dim]) -> ir.Value | None:
        """Return the sum or mean of all elements, or None if stages do not help."""
        start = x
        while not _fits_one_stage(dims) and dims:
            count = _stage_axes(dims)
            if count is not None:
                x, dims = self.over(x, len(dims), count), dims[:-count]
                continue
            parts = _split_axis(dims[-1])
            if parts is not None:
                unchanged = [0] * (len(dims) - 1)
                x = self.op.Reshape(x, [*unchanged, *parts])
                dims = [*dims[:-1], *parts]
                continue
            break
        if not dims:
            return x
        if _fits_one_stage(dims) or self.op.target.lacks("float64"):
            return None if x is start else self.over(x)
        total = self.over(self.op.Cast(x, to=ir.DataType.DOUBLE))
        return self.op.Cast(total, to=_FLOAT)

    def over(self, x: ir.Value, rank: int = 0, count: int = 0) -> ir.Value:
        """Return the reduction over the last axes, or over all."""
        axes = [list(range(rank - count, rank))] if count else []
        kind = self.op.ReduceMean if self.mean else self.op.ReduceSum
        return kind(x, *axes, keepdims=0)


def _stage_axes(dims: Sequence[Dim]) -> int | None:
    """Return how many of the last axes make a stage that is neither too long nor too short."""
    count, size = 0, 1
    for d in reversed(dims):
        if not isinstance(d, int) or size * d > LONG_REDUCTION_ELEMENTS:
            break
        size, count = size * d, count + 1
    return count if size >= _MIN_STAGE else None


def _split_axis(dim: Dim) -> list[int] | None:
    """Return two factors of the size of a long axis; the second is one stage."""
    if not isinstance(dim, int) or dim <= LONG_REDUCTION_ELEMENTS:
        return None
    for size in range(min(LONG_REDUCTION_ELEMENTS, dim // 2), _MIN_STAGE, -1):
        if dim % size == 0:
            return [dim // size, size]
    return None


# Column sums in 16 bits.

_HALF = frozenset({ir.DataType.BFLOAT16, ir.DataType.FLOAT16})
_ALIGNMENT = 8  # elements; other numbers of rows or columns have slow matmul kernels


def column_sums_as_matmul(model: ir.Model, op: OpBuilder) -> int:
    """Replace 16-bit sums over rows, such as gradients of biases, with matmuls; return how many.

        before:  ReduceSum(x, all axes but the last)
        after:   MatMul(ones, x)

    Tensor cores read 16 bits at memory speed, add in float32 and round once, as the kernel for
    column sums does. That kernel takes up to four times as long.
    """
    return sum(_column_sum_to_matmul(op, node) for node in nodes(op.graph, "ReduceSum"))


def _column_sum_to_matmul(op: OpBuilder, node: ir.Node) -> int:
    x, y = node.inputs[0], node.outputs[0]
    size = None if x is None else _matrix_size(node, x)
    sizes = D.static_sizes(S.dims_of(y) or (None,))
    if x is None or x.dtype not in _HALF or size is None or sizes is None:
        return 0
    rows, width = size
    if rows * width < T.MEMORY_BOUND_ELEMENTS or rows % _ALIGNMENT or width % _ALIGNMENT:
        return 0
    uses = list(y.uses())
    op.position = node
    ones = op.Expand(op.const(1.0, x.dtype), op.const([1, rows]))
    total = op.MatMul(ones, op.Reshape(x, [rows, width]))
    replace_value(y, op.Reshape(total, sizes), uses)
    return 1


def _matrix_size(node: ir.Node, x: ir.Value) -> tuple[int, int] | None:
    """Return rows and columns of what is summed, if only the last axis remains."""
    sizes, axes = D.static_sizes(S.dims_of(x) or (None,)), S.constant_of((*node.inputs, None)[1])
    if sizes is None or axes is None or len(sizes) < 2:
        return None
    if sorted(int(a) % len(sizes) for a in axes.ravel()) != list(range(len(sizes) - 1)):
        return None
    return math.prod(sizes[:-1]), sizes[-1]


# Reductions over axes with a gap.

_REDUCTIONS = ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum")
_Vectors = dict[tuple[int, float], ir.Value]  # constant vectors by length and element


def split_noncontiguous_reductions(model: ir.Model, op: OpBuilder) -> int:
    """Reduce the last axes first where a gap separates them from others; return how many.

        before:  ReduceSum(x, [0, 2, 3])
        after:   ReduceSum(ReduceSum(x, [2, 3]), 0)

    For sums per channel, CUDA's general kernel takes six times as long as a sum over positions,
    which are contiguous, and one over the batch. The first is fastest as a matmul with a vector, or
    for small images as GlobalAveragePool. The factor of a mean becomes part of the vector.
    """
    vectors: _Vectors = {}
    return sum(_split_reduction(op, node, vectors) for node in nodes(op.graph, *_REDUCTIONS))


def _split_reduction(op: OpBuilder, node: ir.Node, vectors: _Vectors) -> int:
    x, axes = node.inputs[0], S.constant_of((*node.inputs, None)[1])
    dims = None if x is None else S.dims_of(x)
    if x is None or axes is None or dims is None or not axes.size:
        return 0
    rank = len(dims)
    reduced = sorted({int(a) % rank for a in axes.ravel()})
    last = [a for a in reduced if set(range(a, reduced[-1])) <= set(reduced)]
    first = [a for a in reduced if a not in last]
    if not first or last[-1] != rank - 1:
        return 0
    keepdims = S.attributes_of(node, op.opset)["keepdims"]
    y = node.outputs[0]
    uses = list(y.uses())
    op.position = node
    reduce = getattr(op, op_key(node))
    count = math.prod(D.static_sizes(dims[2:]) or (0,))
    is_image = count > 0 and x.dtype == _FLOAT and _reduces_positions(node, last, rank)
    if is_image and count >= T.NORM_KERNEL_POSITIONS and isinstance(dims[1], int):
        outer = _reduce_by_matmul(op, node, count, vectors)
        outer = op.Reshape(outer, [1, -1, 1, 1]) if keepdims else outer
    elif is_image:
        means = reduce(op.GlobalAveragePool(x), first, keepdims=1)
        inner = means if is_op(node, "ReduceMean") else op.Mul(means, float(count))
        outer = inner if keepdims else op.Squeeze(inner, reduced)
    else:
        inner = reduce(x, last, keepdims=keepdims)
        if x.dtype == ir.DataType.BFLOAT16:  # a single kernel would also add in float32
            inner = op.Cast(inner, to=_FLOAT)
        outer = op.cast(reduce(inner, first, keepdims=keepdims), x.dtype)
    replace_value(y, outer, uses)
    return 1


def _reduces_positions(node: ir.Node, last: list[int], rank: int) -> bool:
    """Return whether the positions of images are reduced first."""
    return is_op(node, "ReduceMean", "ReduceSum") and rank == 4 and last == [2, 3]


def _reduce_by_matmul(op: OpBuilder, node: ir.Node, count: int, vectors: _Vectors) -> ir.Value:
    """Return the sum or mean of each channel, ``[channels]``."""
    x, mean = node.inputs[0], is_op(node, "ReduceMean")
    assert x is not None
    batch, channels = op.dims(x)[:2]
    batch_in_factor = mean and isinstance(batch, int)
    factor = 1.0 / (count * (batch if isinstance(batch, int) else 1)) if mean else 1.0
    if (count, factor) not in vectors:
        vectors[count, factor] = op.const(np.full((count, 1), factor), _FLOAT)
    sums = op.MatMul(op.Reshape(x, [-1, count]), vectors[count, factor])
    table = op.Reshape(sums, [-1, channels])
    last = op.ReduceMean if mean and not batch_in_factor else op.ReduceSum
    return last(table, [0], keepdims=0)


# Chains of additions.

_MIN_TERMS = 3
_MAX_TERMS = 8  # CUDA's Sum kernel takes eight inputs; more take a second kernel
_MAX_DISTANCE = 200  # nodes from the first addition to the last; about a transformer block


def fuse_add_chain(model: ir.Model, op: OpBuilder) -> int:
    """Replace chains of additions of equal shapes with Sum; return how many.

        before:  (a + b) + c
        after:   Sum(a, b, c)

    Gradients of values with several readers, such as the input of queries, keys, values and the
    residual, form such chains. Each Add reads two tensors and writes one. Sum reads each tensor
    once and writes once, and adds in the same order. The first terms live until the last is
    computed, hence the limit on distance. Only float32: for 16 bits the kernel of Sum takes longer
    than the additions.
    """
    position = {node: i for i, node in enumerate(op.graph)}
    fused: set[ir.Node] = set()
    count = 0
    for node in reversed(nodes(op.graph, "Add")):
        terms, inner = _add_chain(node, position)
        if node in fused or len(terms) < _MIN_TERMS:
            continue
        op.position, y = node, node.outputs[0]
        replace_value(y, op.Sum(*terms), list(y.uses()))
        fused |= inner
        count += 1
    return count


def _add_chain(node: ir.Node, position: dict[ir.Node, int]) -> tuple[list[ir.Value], set[ir.Node]]:
    """Return the terms of a chain of additions in order, and its additions except the last."""
    terms, inner = _unbroadcast_terms(node), set[ir.Node]()
    first, i = position[node] - _MAX_DISTANCE, 0
    while i < len(terms):
        addition = _inner_addition(terms[i], node)
        if addition is None or position[addition] < first or len(terms) == _MAX_TERMS:
            i += 1
        else:
            terms[i : i + 1] = _unbroadcast_terms(addition)
            inner.add(addition)
    return terms, inner


def _inner_addition(x: ir.Value, node: ir.Node) -> ir.Node | None:
    """Return the addition that computes a term with no other readers."""
    addition = x.producer()
    if addition is None or not is_op(addition, "Add") or addition.graph is not node.graph:
        return None
    is_used_once = len(x.uses()) == 1 and not x.is_graph_output()
    return addition if is_used_once and _unbroadcast_terms(addition) else None


def _unbroadcast_terms(node: ir.Node) -> list[ir.Value]:
    """Return the two terms of an addition in float32, if neither is broadcast."""
    y, terms = node.outputs[0], [x for x in node.inputs if x is not None]
    fits = y.dtype == _FLOAT and all(S.same_shape(x, y) for x in terms)
    return terms if fits and S.rank_of(y) > 0 else []


# Sums over many rows in 16 bits.


def accumulate_in_float32(model: ir.Model, op: OpBuilder) -> int:
    """Compute 16-bit sums over rows in float32; return how many.

        before:  ReduceSum(x, rows)                x: 16 bits
        after:   Cast(ReduceSum(Cast(x, float32), rows))

    CUDA's kernel adds the partial sums of its blocks with atomics. GPUs have no fast 16-bit atomic
    addition: over 100,000 rows it takes thirty times as long as in float32. Where `x` is a cast of
    a float32 value, that value is summed, whatever the number of rows; this is also more exact.
    """
    return sum(_reduce_in_float32(op, node) for node in nodes(op.graph, "ReduceSum"))


def _reduce_in_float32(op: OpBuilder, node: ir.Node) -> int:
    x, y = node.inputs[0], node.outputs[0]
    size = None if x is None or x.dtype not in _HALF else _row_count(node, x)
    if x is None or x.dtype is None or size is None or y.is_graph_output():
        return 0
    source = _float32_source(x)
    if source is None and size < T.FLOAT32_ACCUMULATION_ROWS:
        return 0
    uses = list(y.uses())
    op.position = node
    source = op.Cast(x, to=_FLOAT) if source is None else source
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


def _row_count(node: ir.Node, x: ir.Value) -> int | None:
    """Return how many rows are summed, if only the last axis remains."""
    dims, axes = S.dims_of(x), S.constant_of((*node.inputs, None)[1])
    if dims is None or axes is None or len(dims) < 2:
        return None
    if sorted(int(a) % len(dims) for a in axes.ravel()) != list(range(len(dims) - 1)):
        return None
    sizes = D.static_sizes(dims[:-1])
    return None if sizes is None else math.prod(sizes)


def _float32_source(x: ir.Value) -> ir.Value | None:
    """Return the float32 value that a 16-bit value is a cast of."""
    cast = x.producer()
    if cast is None or not is_op(cast, "Cast"):
        return None
    source = cast.inputs[0]
    return source if source is not None and source.dtype == _FLOAT else None


def _is_upcast(node: ir.Node) -> bool:
    y = node.outputs[0]
    return is_op(node, "Cast") and y.dtype == _FLOAT and not y.is_graph_output()


# Constant factors.


def fold_scalar_factors(model: ir.Model, op: OpBuilder) -> int:
    """Fold chains of constant factors in gradients into one; return how many nodes vanish.

        before:  -(u * 0.5) / s * (1 / n) * 2 * x
        after:   u * (-1 / n) / s * x

    The gradient of a root-mean-square normalization takes six nodes instead of thirteen.
    """
    return fold_scale_chains(model, op)
