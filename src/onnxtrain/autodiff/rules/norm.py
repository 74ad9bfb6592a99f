"""Normalization over the axes of one example.

Layer, RMS, instance, group, Lp and mean-variance normalization, and LRN across channels.
Most share one formula. With ``xh = (x - mean) * r``, ``r = 1 / sqrt(var + eps)`` and ``g`` the
gradient of ``xh``: ``dx = r * (g - mean(g) - xh * mean(g * xh))``, means over the normalized axes.
Half precision is computed in float32, as the ``stash_type`` of the operators requires.

On GPUs every operator is a pass over memory, so rows use other operators. ``(x - a) * b`` per row
is one pass of BatchNormalization in inference mode, with rows as its channels. Weighted means over
rows are matmuls with a column. ``dx`` is then two such passes and a sum, and the sum also absorbs
other gradients of ``x``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain import thresholds as T
from onnxtrain.autodiff.rule_registry import (
    Choice,
    Choices,
    Gradient,
    Gradients,
    Variant,
    Variants,
    select_variant,
    vjp,
    vjp_multi,
)
from onnxtrain.expand.norms import (
    RowAffine,
    apply_row_affine,
    can_normalize_groups,
    normalize_groups,
    sizes_of,
)
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes import dims as D

_MOST_ROWS = (1 << 16) - 1
"""Maximum number of channels that kernels are known to support."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Values that the gradient of normalized rows reads."""

    x: ir.Value
    dy: ir.Value
    product: ir.Value
    """``dy * xh``."""
    xh: ir.Value
    r: ir.Value
    scale: ir.Value | None
    """``None`` means 1."""
    axes: list[int]

    @property
    def last_axis(self) -> bool:
        """Whether there is a scale along the last axis, the one that is normalized."""
        if self.scale is None or len(self.axes) != 1:  # a constant would be packed in every step
            return False
        return self._fits_scale

    @property
    def _fits_scale(self) -> bool:
        dims = (S.dims_of(self.x) or ())[self.axes[0] :]
        return self.scale is None or S.dims_of(self.scale) == dims != (None,)

    @property
    def long(self) -> bool:
        """Whether normalization kernels pay, with one scale per column."""
        return are_long(self.x, self.axes) and self._fits_scale


def matrix_of(x: ir.Value, axes: list[int]) -> tuple[int, int] | None:
    """Return the number and length of rows, if static."""
    sizes = D.static_sizes(S.dims_of(x) or (None,))
    if not sizes:
        return None
    return math.prod(sizes[: axes[0]]), math.prod(sizes[axes[0] :])


def are_long(x: ir.Value, axes: list[int]) -> bool:
    """Return whether float32 rows are long enough for normalization kernels."""
    rows, length = matrix_of(x, axes) or (0, 0)
    fits = x.dtype == ir.DataType.FLOAT and 0 < rows <= _MOST_ROWS
    return fits and length >= T.NORM_KERNEL_POSITIONS


def row_affine(op: OpBuilder, x: ir.Value, a: ir.Value, b: ir.Value, axes: list[int]) -> ir.Value:
    """Return ``(x - a) * b`` with one ``a`` and one ``b`` per row."""
    rows, length = matrix_of(x, axes) or (0, 0)
    zero = op.full([rows], 0.0, ir.DataType.FLOAT)
    a, b = (op.Reshape(v, [rows]) for v in (a, b))
    flat = op.Reshape(x, [1, rows, length])
    line = op.BatchNormalization(flat, b, zero, a, zero, epsilon=1.0)  # zero + 1 is the variance
    return op.reshape_like(line, x)


def input_grad_by_row_affine(op: OpBuilder, v: Rows) -> ir.Value:
    """Return the gradient of ``x``; the matmul that computes the second mean negates it."""
    rows, length = matrix_of(v.x, v.axes) or (0, 0)
    column = op.const(np.ones((length, 1)), v.dy.dtype)
    if v.scale is not None:
        column = op.Reshape(v.scale, [length, 1])

    def matrix(x: ir.Value) -> ir.Value:
        return op.Reshape(x, [rows, length])

    shift = op.Gemm(matrix(v.dy), column, alpha=1.0 / length)
    tilt = op.Gemm(matrix(v.product), column, alpha=-1.0 / length)
    g = v.dy if v.scale is None else op.Mul(v.dy, v.scale)
    slanted = op.Mul(matrix(v.xh), op.Mul(tilt, op.Reshape(v.r, [rows, 1])))
    return op.Add(row_affine(op, g, shift, v.r, v.axes), op.reshape_like(slanted, v.x))


_FLOAT = ir.DataType.FLOAT


def gradients_by_rows(
    op: OpBuilder, dy: ir.Value, x: ir.Value, scale: ir.Value, groups: int, epsilon: float
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the gradients of ``x``, scale and shift.

    With ``xh = y * gain + level`` of ``normalised_groups``, ``n`` elements in a group, and sums
    over the positions of an image ``s1 = sum(dy)`` and ``s2 = sum(dy * xh) = gain * sum(dy * y) +
    level * s1``: ``dx = k * dy - (mean(k * dy) + xh * mean(k * dy * xh))`` with ``k = scale * r``,
    where the means are sums of ``k * s1 / n`` and ``k * s2 / n`` over a group. So ``dy`` is
    multiplied and ``y`` gets an affine map per row; values are rounded once, at the end.
    """
    channels, positions = sizes_of(op, x)
    width = channels // groups
    parts = normalize_groups(op, x, groups, epsilon)
    dy = op.Reshape(dy, [0, channels, positions])
    s1, s2 = (
        op.Reshape(_image_sums(op, v, positions), [0, groups, width])
        for v in (dy, op.Mul(dy, parts.y))
    )
    if parts.gain is not None:
        s2 = op.Add(op.Mul(s2, parts.gain), op.Mul(parts.level, s1))
    dscale, dbias = (op.Reshape(op.ReduceSum(v, [0], keepdims=0), [-1]) for v in (s2, s1))
    scale = op.Reshape(op.cast(scale, _FLOAT), [groups, width])
    factor = op.cast(op.Mul(parts.r, scale), dy.dtype)
    # Means after multiplying by the rounded factor, so that the subtraction cancels its error.
    weight = op.Mul(op.cast(factor, _FLOAT), 1.0 / positions)
    shift, tilt = (op.ReduceMean(op.Mul(v, weight), [2], keepdims=1) for v in (s1, s2))
    if parts.gain is None:
        ones = op.const(np.ones((1, 1, width)), _FLOAT)
        numbers = op.Mul(tilt, ones), op.Mul(shift, ones)
    else:
        numbers = op.Mul(parts.gain, tilt), op.Add(shift, op.Mul(parts.level, tilt))
    line = apply_row_affine(
        op, parts.y, RowAffine(*(op.Reshape(v, [0, channels, 1]) for v in numbers))
    )
    scaled = op.Mul(op.Reshape(dy, [-1, positions]), op.Reshape(factor, [-1, 1]))
    dx = op.Sub(scaled, op.Reshape(line, [-1, positions]))
    return op.reshape_like(dx, x), dscale, dbias


def _image_sums(op: OpBuilder, x: ir.Value, positions: int) -> ir.Value:
    """Return float32 sums over positions, ``[batch, channels, 1]``, as a matmul with ones."""
    ones = op.const(np.ones((positions, 1)), x.dtype)
    return op.cast(op.MatMul(x, ones), _FLOAT)


_HALF = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def working_dtype(x: ir.Value) -> ir.DataType:
    """Return the dtype in which statistics are computed: float32 for the half precisions."""
    assert x.dtype is not None
    return ir.DataType.FLOAT if x.dtype in _HALF else x.dtype


def center(op: OpBuilder, x: ir.Value, axes: Sequence[int]) -> ir.Value:
    """Return ``x - mean(x)`` over ``axes``."""
    return op.Sub(x, op.ReduceMean(x, axes, keepdims=1))


def inverse_std(op: OpBuilder, centered: ir.Value, axes: Sequence[int], epsilon: float) -> ir.Value:
    """Return ``1 / sqrt(mean(centered^2) + epsilon)`` over ``axes``."""
    variance = op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)
    return op.Reciprocal(op.Sqrt(op.Add(variance, epsilon)))


def per_channel(op: OpBuilder, v: ir.Value, x: ir.Value) -> ir.Value:
    """Reshape a per-channel vector so that it broadcasts against ``x``."""
    spatial = op.rank(x) - 2
    return op.Unsqueeze(v, list(range(1, spatial + 1))) if spatial > 0 else v


@vjp_multi("LayerNormalization")
def layer_normalization(op, dys, x, scale, bias=None, *, y, node, axis, epsilon):
    """With ``g = dy * scale``, and ``dmean`` and ``dr`` for the outputs mean and inverse deviation.

    ``dx = r * (g - mean(g) - xh * mean(g * xh)) + (dmean - xh * r^2 * dr) / size``.
    """
    dy, dmean, dr = (*dys, None, None)[:3]
    axes = list(range(axis % op.rank(x), op.rank(x)))
    dtype = working_dtype(x)
    xw = op.cast(x, dtype)
    plain = bias is None and dtype == x.dtype and _is_one(op, scale)
    xh, r = _normalized(op, xw, axes, epsilon, node, y if plain else None)
    dx = dscale = dbias = None
    if dy is not None:
        dyw = op.cast(dy, dtype)
        product = op.Mul(dyw, xh)
        dscale = op.cast(op.sum_to(product, op.cast(scale, dtype)), scale.dtype)
        dbias = None if bias is None else op.cast(op.sum_to(dyw, op.cast(bias, dtype)), bias.dtype)
        scale_w = None if plain else op.cast(scale, dtype)
        rows = Rows(xw, dyw, product, xh, r, scale_w, axes)
        dx = select_variant(op, rows, INPUT_GRAD_VARIANTS, INPUT_GRAD_CHOICES)(op, rows)
    extra = None
    if dmean is not None:
        extra = op.expand_like(op.cast(dmean, dtype), xw)
    if dr is not None:
        dr_factor = op.Mul(op.Mul(r, r), op.cast(dr, dtype))
        extra = _minus(op, extra, op.Mul(xh, dr_factor))
    if extra is not None:
        extra = op.Div(extra, op.count(xw, axes))
        dx = extra if dx is None else op.Add(dx, extra)
    return None if dx is None else op.cast(dx, x.dtype), dscale, dbias


def _normalized(
    op: OpBuilder, x: ir.Value, axes: list[int], epsilon: float, node: ir.Node, y: Gradient
) -> tuple[ir.Value, ir.Value]:
    """Return ``xh`` and ``r``, from the outputs of the node if they are float32.

    ``y`` is the node's result if that is ``xh``.
    """
    if x.dtype == ir.DataType.FLOAT and _stash(op, node) == ir.DataType.FLOAT:
        mean, r = op.extra_output(node, 1), op.extra_output(node, 2)
        xh = y
        if xh is None:
            given = _RowStatistics(x, mean, r, axes, epsilon)
            xh = select_variant(op, given, RENORMALIZE_VARIANTS, RENORMALIZE_CHOICES)(op, given)
        return xh, r
    centered = center(op, x, axes)
    r = inverse_std(op, centered, axes, epsilon)
    return op.Mul(centered, r), r


@dataclasses.dataclass(frozen=True)
class _RowStatistics:
    """Rows and their statistics."""

    x: ir.Value
    mean: ir.Value
    r: ir.Value
    axes: list[int]
    epsilon: float

    @property
    def sizes(self) -> list[int] | None:
        """Sizes of the normalized axes, if static."""
        return D.static_sizes((S.dims_of(self.x) or (None,))[self.axes[0] :])


def _by_operator(op: OpBuilder, v: _RowStatistics) -> ir.Value:
    """One pass: LayerNormalization without a scale."""
    ones = op.const(np.ones(v.sizes or ()), v.x.dtype)
    return op.LayerNormalization(v.x, ones, axis=v.axes[0], epsilon=v.epsilon)


RENORMALIZE_VARIANTS: Variants[_RowStatistics] = {
    "statistics": Variant(lambda op, v: op.Mul(op.Sub(v.x, v.mean), v.r)),
    "operator": Variant(_by_operator, lambda v: bool(v.sizes)),
    "line": Variant(
        lambda op, v: row_affine(op, v.x, v.mean, v.r, v.axes), lambda v: are_long(v.x, v.axes)
    ),
}
RENORMALIZE_CHOICES: Choices[_RowStatistics] = [
    Choice("line", prefers="fused-row-affine"),
    Choice("operator", prefers="fused-row-affine"),
    Choice("statistics"),
]


def _input_grad_elementwise(op: OpBuilder, rows: Rows) -> ir.Value:
    g = _scaled(op, rows.dy, rows.scale)
    shift, tilt = select_variant(op, rows, MEANS_VARIANTS, MEANS_CHOICES)(op, rows, g)
    return op.Mul(op.Sub(op.Sub(g, shift), op.Mul(rows.xh, tilt)), rows.r)


INPUT_GRAD_VARIANTS: Variants[Rows] = {
    "passes": Variant(_input_grad_elementwise),
    "lines": Variant(input_grad_by_row_affine, lambda rows: rows.long),
}
INPUT_GRAD_CHOICES: Choices[Rows] = [
    Choice("lines", prefers="fused-row-affine"),
    Choice("passes"),
]


def _by_sums(op: OpBuilder, rows: Rows, g: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return the means of ``g`` and of ``g * xh``."""
    tilted = _scaled(op, rows.product, rows.scale)
    shift, tilt = (op.ReduceMean(v, rows.axes, keepdims=1) for v in (g, tilted))
    return shift, tilt


def _by_matmul(op: OpBuilder, rows: Rows, g: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Matmuls with the column ``scale / size``, which save a pass over the rows."""
    column = op.Unsqueeze(op.Div(rows.scale, op.count(rows.x, rows.axes)), [1])
    return op.MatMul(rows.dy, column), op.MatMul(rows.product, column)


MEANS_VARIANTS: Variants[Rows] = {
    "sums": Variant(_by_sums),
    "matmul": Variant(_by_matmul, lambda rows: rows.last_axis),
}
MEANS_CHOICES: Choices[Rows] = [  # not where float32 matmuls use TF32
    Choice("matmul", prefers="means-as-matmul"),
    Choice("sums"),
]


def _scaled(op: OpBuilder, x: ir.Value, scale: Gradient) -> ir.Value:
    return x if scale is None else op.Mul(x, scale)


def _stash(op: OpBuilder, node: ir.Node) -> ir.DataType:
    attribute = node.attributes.get("stash_type")
    return ir.DataType(attribute.as_int()) if attribute is not None else ir.DataType.FLOAT


def _is_one(op: OpBuilder, scale: ir.Value) -> bool:
    """Return whether the scale is a generated constant of ones."""
    array = op.constant(scale) if S.is_generated_constant(scale) else None
    return array is not None and bool((array == 1.0).all())


def _minus(op: OpBuilder, a: Gradient, b: ir.Value) -> ir.Value:
    return op.Neg(b) if a is None else op.Sub(a, b)


@vjp("RMSNormalization")
def rms_normalization(op, dy, x, scale, *, axis, epsilon):
    """``dx = r * (g - xh * mean(g * xh))``, where ``xh = x * r`` has no mean removed."""
    axes = list(range(axis % op.rank(x), op.rank(x)))
    dtype = working_dtype(x)
    xw, dyw, scale_w = (op.cast(v, dtype) for v in (x, dy, scale))
    r = inverse_std(op, xw, axes, epsilon)
    xh = op.Mul(xw, r)
    product = op.Mul(dyw, xh)
    tilt = op.Mul(xh, op.ReduceMean(op.Mul(product, scale_w), axes, keepdims=1))
    dx = op.Mul(op.Sub(op.Mul(dyw, scale_w), tilt), r)
    dscale = op.sum_to(product, scale_w)
    return op.cast(dx, x.dtype), op.cast(dscale, scale.dtype)


@vjp("InstanceNormalization")
def instance_normalization(op, dy, x, scale, bias, *, epsilon):
    """The common formula over spatial axes; the per-channel scale factors out of the means."""
    rank = op.rank(x)
    spatial = list(range(2, rank))
    dtype = working_dtype(x)
    xw, dyw, scale_w = (op.cast(v, dtype) for v in (x, dy, scale))
    centered = center(op, xw, spatial)
    r = inverse_std(op, centered, spatial, epsilon)
    xh = op.Mul(centered, r)
    sums = op.ReduceSum(dyw, spatial, keepdims=1)
    tilts = op.ReduceSum(op.Mul(dyw, xh), spatial, keepdims=1)
    size = op.count(xw, spatial)
    inner = op.Sub(op.Sub(dyw, op.Div(sums, size)), op.Mul(xh, op.Div(tilts, size)))
    dx = op.Mul(inner, op.Mul(r, per_channel(op, scale_w, x)))
    rest = [0, *spatial]
    dscale, dbias = (op.ReduceSum(v, rest, keepdims=0) for v in (tilts, sums))
    return op.cast(dx, x.dtype), op.cast(dscale, scale.dtype), op.cast(dbias, bias.dtype)


@vjp("GroupNormalization")
def group_normalization(op, dy, x, scale, bias, *, num_groups, epsilon):
    """The common formula over the channels and positions of a group, with per-channel scales."""
    form = select_variant(op, (x, num_groups), GROUP_VARIANTS, GROUP_CHOICES)
    dx, dscale, dbias = form(op, dy, x, scale, num_groups, epsilon)
    return dx, op.cast(dscale, scale.dtype), op.cast(dbias, bias.dtype)


def _by_groups(
    op: OpBuilder, dy: ir.Value, x: ir.Value, scale: ir.Value, groups: int, epsilon: float
) -> tuple[ir.Value, ir.Value, ir.Value]:
    rank = op.rank(x)
    dtype = working_dtype(x)
    xw, dyw, scale_w = (op.cast(v, dtype) for v in (x, dy, scale))

    def grouped(v: ir.Value) -> ir.Value:
        return op.Reshape(v, [0, groups, -1])  # 0 keeps the batch

    centered = center(op, grouped(xw), [2])
    r = inverse_std(op, centered, [2], epsilon)
    xh = op.Mul(centered, r)
    g = grouped(op.Mul(dyw, per_channel(op, scale_w, x)))
    tilt = op.Mul(xh, op.ReduceMean(op.Mul(g, xh), [2], keepdims=1))
    dx = op.Mul(op.Sub(op.Sub(g, op.ReduceMean(g, [2], keepdims=1)), tilt), r)
    rest = [0, *range(2, rank)]
    dscale = op.ReduceSum(op.Mul(dyw, op.reshape_like(xh, xw)), rest, keepdims=0)
    dbias = op.ReduceSum(dyw, rest, keepdims=0)
    return op.cast(op.reshape_like(dx, xw), x.dtype), dscale, dbias


GROUP_VARIANTS: Variants[tuple[ir.Value, int]] = {
    "groups": Variant(_by_groups),
    "rows": Variant(gradients_by_rows, lambda v: can_normalize_groups(*v)),
}
GROUP_CHOICES: Choices[tuple[ir.Value, int]] = [
    Choice("rows", prefers="group-norm-via-layer-norm"),
    Choice("groups"),
]


@vjp("LpNormalization")
def lp_normalization(op, dy, x, *, y, axis, p):
    """``dx = (dy - norm' * sum(dy * y)) / norm``; ``norm'`` is ``y`` for p = 2, sign(x) for p = 1.

    Where the norm is zero, the output and the gradient are zero.
    """
    norm_grad = y if p == 2 else op.sign(x)
    # |x| = x * sign(x), so one multiplication serves both norms and their second derivatives.
    if p == 2:
        squares = op.ReduceSum(op.Mul(x, x), [axis], keepdims=1)
        empty = op.Equal(squares, 0.0)
        norm = op.Sqrt(op.Where(empty, 1.0, squares))
    else:
        total = op.ReduceSum(op.Mul(x, norm_grad), [axis], keepdims=1)
        empty = op.Equal(total, 0.0)
        norm = op.Where(empty, 1.0, total)
    weight = op.Where(empty, 0.0, op.Reciprocal(norm))
    projected = op.ReduceSum(op.Mul(dy, y), [axis], keepdims=1)
    return op.Mul(op.Sub(dy, op.Mul(norm_grad, projected)), weight)


@vjp("MeanVarianceNormalization")
def mean_variance_normalization(op, dy, x, *, y, axes) -> Gradients:
    """``dx = (dy - mean(dy) - y * mean(dy * y)) / (std + 1e-9)``.

    ``y`` replaces ``(x - mean) / std``; they differ by a factor of ``1 + 1e-9 / std``.
    """
    axes = op.axes(axes or [0, 2, 3], op.rank(x))
    dtype = working_dtype(x)
    xw, dyw, yw = (op.cast(v, dtype) for v in (x, dy, y))
    centered = center(op, xw, axes)
    variance = op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)
    std = op.Add(op.Sqrt(variance), 1e-9)
    inner = op.Sub(dyw, op.ReduceMean(dyw, axes, keepdims=1))
    inner = op.Sub(inner, op.Mul(yw, op.ReduceMean(op.Mul(dyw, yw), axes, keepdims=1)))
    return op.cast(op.Div(inner, std), x.dtype)


@vjp("LRN")
def lrn(op, dy, x, *, alpha, beta, bias, size):
    """``dx = dy * d^-beta - 2 * alpha * beta * x * mean'(dy * x * d^(-beta - 1))``.

    There ``d = bias + alpha * mean(x^2)``, a mean over a window of channels, zero-padded. The
    window of ``mean'`` is mirrored, which matters for even sizes.
    """
    dtype = working_dtype(x)
    xw, dyw = op.cast(x, dtype), op.cast(dy, dtype)
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    # AveragePool divides by the window size, as the definition of LRN does.
    d = op.Add(op.Mul(_window_mean(op, op.Mul(xw, xw), before, after), alpha), bias)
    power = op.Pow(d, -beta)
    inner = op.Div(op.Mul(op.Mul(dyw, xw), power), d)
    spread = _window_mean(op, inner, after, before)
    dx = op.Sub(op.Mul(dyw, power), op.Mul(op.Mul(xw, spread), 2.0 * alpha * beta))
    return op.cast(dx, x.dtype)


def _window_mean(op: OpBuilder, x: ir.Value, before: int, after: int) -> ir.Value:
    """Return the mean over channels ``c - before .. c + after``, zero-padded."""
    planes = op.Reshape(x, op.vector([0, 1, op.size(x, 1), -1]))  # 0 keeps the batch
    pooled = op.AveragePool(
        planes,
        kernel_shape=[before + after + 1, 1],
        pads=[before, 0, after, 0],
        count_include_pad=1,
    )
    return op.reshape_like(pooled, x)
