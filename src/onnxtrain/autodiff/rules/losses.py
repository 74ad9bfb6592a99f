"""Losses with class labels: SoftmaxCrossEntropyLoss and NegativeLogLikelihoodLoss.

Per label: ``loss_n = -w_n logp[n, label_n]``. ``w_n`` is the weight of the label's class, and 0 for
ignored labels. ``mean`` divides by the sum of the ``w_n``.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.rule_registry import (
    Choice,
    Choices,
    Variant,
    Variants,
    select_variant,
    vjp,
    vjp_multi,
)
from onnxtrain.autodiff.rules.reduce import divide
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.optimize.cross_entropy import label_weights


@dataclasses.dataclass(frozen=True)
class _Labels:
    """Labels ``[N, d1, ...]`` for scores ``[N, C, d1, ...]``, prepared for the rules."""

    index: ir.Value
    """Labels with ignored ones replaced by class 0."""
    ignored: ir.Value | None
    """True where a label is ignored."""
    each: ir.Value
    """Gradient of the weighted loss of each label: a scalar, or one per label."""
    scaled: ir.Value
    """``each / w_n``."""

    def column(self, op: OpBuilder, v: ir.Value) -> ir.Value:
        """Reshape one value per label so that it broadcasts against the scores."""
        return op.Unsqueeze(v, [1]) if op.rank(v) else v


def _wide(x: ir.Value) -> ir.DataType:
    """Return the dtype for sums over labels: float32 for the half precisions."""
    return ir.DataType.DOUBLE if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT


def _labels(op, dy, x, labels, weights, ignore_index, reduction) -> _Labels:
    index, ignored, w = label_weights(op, labels, weights, ignore_index, x.dtype)
    wide = _wide(x)
    if reduction == "mean":
        if w is None:
            static = op.static(labels)
            dy = divide(op, dy, op.Size(labels) if static is None else math.prod(static))
        else:
            total = op.ReduceSum(op.cast(w, wide), keepdims=0)
            if ignored is not None:  # all labels may be ignored: zero gradient, as in torch
                total = op.Where(op.Equal(total, 0.0), 1.0, total)
            dy = op.cast(op.Div(op.cast(dy, wide), total), x.dtype)
    return _Labels(index, ignored, dy if w is None else op.Mul(dy, w), dy)


def _dweights(op, picked, logp, loss, weights, at, reduction):
    """Return the gradient of the class weights: sums of ``-logp`` by class."""
    part = op.Neg(op.Squeeze(op.GatherElements(logp, at, axis=1), [1]))
    if reduction == "mean":
        part = op.Sub(part, loss)
    part = op.Mul(picked.scaled, part)
    if picked.ignored is not None:
        part = op.Where(picked.ignored, 0.0, part)
    flat = op.Reshape(op.cast(part, _wide(weights)), [-1])
    zeros = op.zeros_like(op.cast(weights, _wide(weights)))
    index = op.Reshape(picked.index, [-1])
    return op.cast(op.ScatterElements(zeros, index, flat, axis=0, reduction="add"), weights.dtype)


@vjp_multi("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(
    op, dys, scores, labels, weights=None, *, outputs, node, wanted, ignore_index, reduction
):
    """``dscores = each (p - onehot(label)) + dlogp - p sum(dlogp)`` with ``p = e^logp``.

    No one-hot tensor is built where a scatter can update one element per row of ``p``.
    """
    dy, dlogp = (*dys, None)[:2]
    logp = op.extra_output(node, 1)
    p = op.Exp(logp)
    dx = dw = None
    if dy is not None:
        picked = _labels(op, dy, scores, labels, weights, ignore_index, reduction)
        at = op.Unsqueeze(picked.index, [1])
        away = _without_label(op, scores, p, at)
        dx = op.Mul(away, picked.column(op, picked.each))
        if weights is not None and wanted[2]:
            dw = _dweights(op, picked, logp, outputs[0], weights, at, reduction)
    if dlogp is not None:
        through = op.Sub(dlogp, op.Mul(p, op.ReduceSum(dlogp, [1], keepdims=1)))
        dx = through if dx is None else op.Add(dx, through)
    return dx, None, dw


@vjp("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(op, dy, logp, labels, weights=None, *, y, ignore_index, reduction):
    """``dlogp = -each`` at the labels, 0 elsewhere."""
    picked = _labels(op, dy, logp, labels, weights, ignore_index, reduction)
    at = op.Unsqueeze(picked.index, [1])
    value = op.Neg(picked.column(op, picked.each))
    dx = _at_label(op, logp, at, value)
    dw = None if weights is None else _dweights(op, picked, logp, y, weights, at, reduction)
    return dx, None, dw


def _without_label(op, scores, p, at):
    """Return ``p - onehot(label)``."""
    return select_variant(op, None, WITHOUT_LABEL_VARIANTS, BY_LABEL)(op, scores, p, at)


def _replaced(op, scores, p, at):
    missing = op.Sub(op.GatherElements(p, at, axis=1), 1.0)
    return op.ScatterElements(p, at, missing, axis=1)


def _subtracted(op, scores, p, at):
    one, zero = op.const(1.0, p.dtype), op.const(0.0, p.dtype)
    return op.Sub(p, op.Where(_is_label(op, scores, at), one, zero))


def _at_label(op, logp, at, value):
    """Return ``value * onehot(label)``."""
    return select_variant(op, None, AT_LABEL_VARIANTS, BY_LABEL)(op, logp, at, value)


def _scattered(op, logp, at, value):
    return op.ScatterElements(op.zeros_like(logp), at, op.expand_like(value, at), axis=1)


def _selected(op, logp, at, value):
    return op.Where(_is_label(op, logp, at), value, 0.0)


def _is_label(op, x, at):
    """Return the one-hot mask of the labels, by comparison with the class indices."""
    classes = op.size(x, 1)
    if isinstance(classes, int):
        numbers = op.const(np.arange(classes), at.dtype)
    else:
        numbers = op.cast(op.Range(0, op.Squeeze(classes), 1), at.dtype)
    return op.Equal(at, op.reshape(numbers, [-1, *[1] * (op.rank(x) - 2)]))


WITHOUT_LABEL_VARIANTS: Variants[None] = {
    "scatter": Variant(_replaced),
    "compare": Variant(_subtracted),
}
AT_LABEL_VARIANTS: Variants[None] = {"scatter": Variant(_scattered), "compare": Variant(_selected)}
BY_LABEL: Choices[None] = [Choice("compare", lacks="ScatterElements"), Choice("scatter")]
