"""Normalisation over the axes of one example: layer, RMS, instance, group, Lp and mean-variance.

They share one formula. With ``xh = (x - mean) * r``, ``r = 1 / sqrt(var + eps)`` and ``g`` the
gradient of ``xh``: ``dx = r * (g - mean(g) - xh * mean(g * xh))``, means over the normalised axes.
Half precision is computed in float32, as the operators' ``stash_type`` asks for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.registry import Gradient, Gradients, vjp, vjp_multi
from onnxtrain.autodiff.rules.group_norm_rows import gradients_by_rows
from onnxtrain.autodiff.rules.norm_rows import Rows, are_long, row_line, slope_by_lines
from onnxtrain.autodiff.variants import Choice, Choices, Form, Forms, chosen
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.composed.normalised_groups import can_be_normalised
from onnxtrain.graph.shapes import dims as D

_HALF = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def working_dtype(x: ir.Value) -> ir.DataType:
    """Return the dtype in which statistics are computed: float32 for the half precisions."""
    assert x.dtype is not None
    return ir.DataType.FLOAT if x.dtype in _HALF else x.dtype


def center(op: OpBuilder, x: ir.Value, axes: Sequence[int]) -> ir.Value:
    """Return ``x`` without its mean over ``axes``."""
    return op.Sub(x, op.ReduceMean(x, axes, keepdims=1))


def inverse_std(op: OpBuilder, centered: ir.Value, axes: Sequence[int], epsilon: float) -> ir.Value:
    """Return ``1 / sqrt(mean(centered^2) + epsilon)`` over ``axes``."""
    variance = op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)
    return op.Reciprocal(op.Sqrt(op.Add(variance, epsilon)))


def per_channel(op: OpBuilder, v: ir.Value, x: ir.Value) -> ir.Value:
    """Return a vector of one number per channel so that it broadcasts against ``x``."""
    spatial = op.rank(x) - 2
    return op.Unsqueeze(v, list(range(1, spatial + 1))) if spatial > 0 else v


@vjp_multi("LayerNormalization")
def layer_normalization(op, dys, x, scale, bias=None, *, y, node, axis, epsilon):
    """With ``g = dy * scale``, and gradients of the outputs mean and inverse deviation ``r``, too.

    ``dx = r * (g - mean(g) - xh * mean(g * xh)) + (dmean - xh * r^2 * dr) / size``.
    """
    dy, dmean, dr = (*dys, None, None)[:3]
    axes = list(range(axis % op.rank(x), op.rank(x)))
    dtype = working_dtype(x)
    xw = op.cast(x, dtype)
    plain = bias is None and dtype == x.dtype and _is_one(op, scale)
    xh, r = _normalised(op, xw, axes, epsilon, node, y if plain else None)
    dx = dscale = dbias = None
    if dy is not None:
        dyw = op.cast(dy, dtype)
        product = op.Mul(dyw, xh)
        dscale = op.cast(op.sum_to(product, op.cast(scale, dtype)), scale.dtype)
        dbias = None if bias is None else op.cast(op.sum_to(dyw, op.cast(bias, dtype)), bias.dtype)
        scale_w = None if plain else op.cast(scale, dtype)
        rows = Rows(xw, dyw, product, xh, r, scale_w, axes)
        dx = chosen(op, rows, SLOPE_FORMS, SLOPE_CHOICES)(op, rows)
    extra = None
    if dmean is not None:
        extra = op.expand_like(op.cast(dmean, dtype), xw)
    if dr is not None:
        slope = op.Mul(op.Mul(r, r), op.cast(dr, dtype))
        extra = _minus(op, extra, op.Mul(xh, slope))
    if extra is not None:
        extra = op.Div(extra, op.count(xw, axes))
        dx = extra if dx is None else op.Add(dx, extra)
    return None if dx is None else op.cast(dx, x.dtype), dscale, dbias


def _normalised(
    op: OpBuilder, x: ir.Value, axes: list[int], epsilon: float, node: ir.Node, y: Gradient
) -> tuple[ir.Value, ir.Value]:
    """Return ``xh`` and ``r``, from the node's own outputs where these are float32.

    ``y`` is the node's result if that is ``xh``.
    """
    if x.dtype == ir.DataType.FLOAT and _stash(op, node) == ir.DataType.FLOAT:
        mean, r = op.extra_output(node, 1), op.extra_output(node, 2)
        xh = y
        if xh is None:
            given = _Given(x, mean, r, axes, epsilon)
            xh = chosen(op, given, AGAIN_FORMS, AGAIN_CHOICES)(op, given)
        return xh, r
    centered = center(op, x, axes)
    r = inverse_std(op, centered, axes, epsilon)
    return op.Mul(centered, r), r


@dataclasses.dataclass(frozen=True)
class _Given:
    """Rows and their statistics."""

    x: ir.Value
    mean: ir.Value
    r: ir.Value
    axes: list[int]
    epsilon: float

    @property
    def sizes(self) -> list[int] | None:
        """The sizes of the axes that are normalised over, if they are known."""
        return D.numbers((S.dims_of(self.x) or (None,))[self.axes[0] :])


def _by_operator(op: OpBuilder, v: _Given) -> ir.Value:
    """One pass, by the operator itself, without a scale."""
    ones = op.const(np.ones(v.sizes or ()), v.x.dtype)
    return op.LayerNormalization(v.x, ones, axis=v.axes[0], epsilon=v.epsilon)


AGAIN_FORMS: Forms[_Given] = {
    "statistics": Form(lambda op, v: op.Mul(op.Sub(v.x, v.mean), v.r)),
    "operator": Form(_by_operator, lambda v: bool(v.sizes)),
    "line": Form(
        lambda op, v: row_line(op, v.x, v.mean, v.r, v.axes), lambda v: are_long(v.x, v.axes)
    ),
}
AGAIN_CHOICES: Choices[_Given] = [
    Choice("line", prefers="line-in-one-pass"),
    Choice("operator", prefers="line-in-one-pass"),
    Choice("statistics"),
]


def _slope_by_passes(op: OpBuilder, rows: Rows) -> ir.Value:
    g = _scaled(op, rows.dy, rows.scale)
    shift, tilt = chosen(op, rows, MEANS_FORMS, MEANS_CHOICES)(op, rows, g)
    return op.Mul(op.Sub(op.Sub(g, shift), op.Mul(rows.xh, tilt)), rows.r)


SLOPE_FORMS: Forms[Rows] = {
    "passes": Form(_slope_by_passes),
    "lines": Form(slope_by_lines, lambda rows: rows.long),
}
SLOPE_CHOICES: Choices[Rows] = [
    Choice("lines", prefers="line-in-one-pass"),
    Choice("passes"),
]


def _by_sums(op: OpBuilder, rows: Rows, g: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return the means of ``g`` and of ``g * xh``."""
    tilted = _scaled(op, rows.product, rows.scale)
    shift, tilt = (op.ReduceMean(v, rows.axes, keepdims=1) for v in (g, tilted))
    return shift, tilt


def _by_matmul(op: OpBuilder, rows: Rows, g: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Products with the column ``scale / size``, which saves a pass over the rows."""
    column = op.Unsqueeze(op.Div(rows.scale, op.count(rows.x, rows.axes)), [1])
    return op.MatMul(rows.dy, column), op.MatMul(rows.product, column)


MEANS_FORMS: Forms[Rows] = {
    "sums": Form(_by_sums),
    "matmul": Form(_by_matmul, lambda rows: rows.last_axis),
}
MEANS_CHOICES: Choices[Rows] = [  # not where products of float32 are rounded to TF32
    Choice("matmul", prefers="means-by-matmul"),
    Choice("sums"),
]


def _scaled(op: OpBuilder, x: ir.Value, scale: Gradient) -> ir.Value:
    return x if scale is None else op.Mul(x, scale)


def _stash(op: OpBuilder, node: ir.Node) -> ir.DataType:
    attribute = node.attributes.get("stash_type")
    return ir.DataType(attribute.as_int()) if attribute is not None else ir.DataType.FLOAT


def _is_one(op: OpBuilder, scale: ir.Value) -> bool:
    """Return whether the scale is a constant of ours that changes nothing."""
    array = op.constant(scale) if S.is_own_constant(scale) else None
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
    """The common formula over the spatial axes; one scale per channel comes out of the means."""
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
    """The common formula over the channels and positions of a group; one scale per channel."""
    form = chosen(op, (x, num_groups), GROUP_FORMS, GROUP_CHOICES)
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


GROUP_FORMS: Forms[tuple[ir.Value, int]] = {
    "groups": Form(_by_groups),
    "rows": Form(gradients_by_rows, lambda v: can_be_normalised(*v)),
}
GROUP_CHOICES: Choices[tuple[ir.Value, int]] = [
    Choice("rows", prefers="groups-by-layer-norm"),
    Choice("groups"),
]


@vjp("LpNormalization")
def lp_normalization(op, dy, x, *, y, axis, p):
    """``dx = (dy - norm' * sum(dy * y)) / norm``; ``norm'`` is ``y`` for p = 2, sign(x) for p = 1.

    Where the norm is zero the operator gives zero, and so does its gradient.
    """
    slope = y if p == 2 else op.sign(x)
    # |x| = x * sign(x), so both norms come from one product and differentiate by it.
    if p == 2:
        squares = op.ReduceSum(op.Mul(x, x), [axis], keepdims=1)
        empty = op.Equal(squares, 0.0)
        norm = op.Sqrt(op.Where(empty, 1.0, squares))
    else:
        total = op.ReduceSum(op.Mul(x, slope), [axis], keepdims=1)
        empty = op.Equal(total, 0.0)
        norm = op.Where(empty, 1.0, total)
    weight = op.Where(empty, 0.0, op.Reciprocal(norm))
    projected = op.ReduceSum(op.Mul(dy, y), [axis], keepdims=1)
    return op.Mul(op.Sub(dy, op.Mul(slope, projected)), weight)


@vjp("MeanVarianceNormalization")
def mean_variance_normalization(op, dy, x, *, y, axes) -> Gradients:
    """``dx = (dy - mean(dy) - y * mean(dy * y)) / (std + 1e-9)``.

    ``y`` stands for ``(x - mean) / std``, which differs by a factor of ``1 + 1e-9 / std``.
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
