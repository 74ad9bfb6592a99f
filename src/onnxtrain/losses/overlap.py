"""Losses of overlap: dice of masks, and IoU of boxes.

``p`` and ``t`` are masks, ``a`` and ``b`` boxes; ``|a & b|`` is the area that they share::

    dice = 1 - 2 sum(p t) / (sum(p) + sum(t))
    IoU  = |a & b| / |a or b|
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import PrepareError, ShapeError, expected_one_of
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes import dims as D
from onnxtrain.losses.classification import (
    class_axis,
    in_range_labels,
    is_label,
    to_rows,
)
from onnxtrain.losses.logits import Reads
from onnxtrain.losses.loss import (
    FLOAT,
    LOSSES,
    Loss,
    TargetSpec,
    as_tuples,
    check_same_rank,
    class_weights,
    labels_for,
    reduce,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DiceLoss(Loss):
    """Base of the dice losses: one loss per row and class."""

    smooth: float = 1.0
    weight: Sequence[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "weight", as_tuples(self.weight))
        if not self.smooth >= 0:
            raise PrepareError(f"{type(self).__name__}: smooth must not be negative: {self.smooth}")

    def of_masks(self, op: OpBuilder, p: ir.Value, t: ir.Value) -> ir.Value:
        """Emit the loss of masks ``[N, C, ...]``."""
        if op.rank(p) < 3:
            raise ShapeError(
                f"{type(self).__name__} does not accept {S.describe_value(p)}\n"
                "hint: it expects [N, C, d1, ...]"
            )
        axes = list(range(2, op.rank(p)))
        shared = op.ReduceSum(op.Mul(p, t), axes, keepdims=0)
        total = op.ReduceSum(op.Add(p, t), axes, keepdims=0)
        # Without smooth, a class that neither mask has is 0 / 0.
        smooth = max(self.smooth, 1e-7)
        share = op.Div(op.Add(op.Mul(shared, 2.0), smooth), op.Add(total, smooth))
        each = op.Sub(1.0, share)
        weights = class_weights(self, op, self.weight, p, 1)
        if weights is None or self.weight is None:
            return reduce(op, each, self.reduction)
        each = op.Mul(each, weights)
        if self.reduction != "mean":
            return reduce(op, each, self.reduction)
        total_weight = op.Mul(op.count(each, [0]), float(np.sum(self.weight)))
        return op.Div(reduce(op, each, "sum"), total_weight)


@LOSSES.named("dice")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dice(_DiceLoss):
    """``1 - 2 sum(p t) / (sum(p) + sum(t))`` of every row and class, ``p`` the softmax of logits.

    Args:
        smooth: added to numerator and denominator; a class that is absent from the labels and from
            the prediction has loss 0.
        weight: one weight per class; ``mean`` divides by their sum. 0 leaves out the background.
        ignore_index: label of positions to ignore; ``None`` ignores none.
        axis: class axis: 1 as in torch, or -1.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for ``[N, C]``.
    """

    ignore_index: int | None = -100
    axis: int = 1

    reads = Reads.SOFTMAX_LOGITS

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return class indices in the shape of the prediction without the class axis."""
        return [labels_for("labels", prediction, class_axis(self, prediction, self.axis))]

    def normalized_axis(self, prediction: ir.Value) -> int | None:
        """Return the class axis."""
        return class_axis(self, prediction, self.axis)

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the loss."""
        axis = class_axis(self, prediction, self.axis)
        x, (labels,) = op.move_axis(prediction, axis, 1), targets
        if op.rank(x) < 3 or op.rank(labels) != op.rank(x) - 1:
            to_rows(self, op, prediction, labels, axis)
        p, zero, one = op.Softmax(x, axis=1), op.const(0.0, x.dtype), op.const(1.0, x.dtype)
        labels = in_range_labels(op, labels, self.ignore_index)
        known = labels
        if self.ignore_index is not None:
            ignored = op.Equal(labels, self.ignore_index)
            known = op.Where(ignored, op.const(0, labels.dtype), labels)
            labels = op.Where(ignored, op.const(-1, labels.dtype), labels)
            p = op.Where(op.Unsqueeze(ignored, [1]), zero, p)
        t = op.Where(is_label(op, x, labels), one, zero)
        # Gather fails for a label that is not a class; a comparison would not notice it.
        ones = op.Gather(op.full([op.size(x, 1)], 1.0, x.dtype or FLOAT), known)
        return self.of_masks(op, op.Mul(p, op.Unsqueeze(ones, [1])), t)


@LOSSES.named("sigmoid_dice")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SigmoidDice(_DiceLoss):
    """:class:`Dice` of masks that may overlap, or of one class: ``p`` is the sigmoid of logits.

    The prediction ``[N, C, ...]`` has a mask per class, the target has 0 and 1 in its shape.

    Args:
        smooth: added to numerator and denominator.
        weight: one weight per class; ``mean`` divides by their sum.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for ``[N, C]``.
    """

    reads = Reads.SIGMOID_LOGITS

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the loss."""
        check_same_rank(self, prediction, *targets)
        return self.of_masks(op, op.Sigmoid(prediction), *targets)


# -- boxes ---------------------------------------------------------------------------------

BOX_FORMATS = ("xyxy", "xywh", "cxcywh")


class Corners(NamedTuple):
    """The sides of boxes, one tensor each."""

    left: ir.Value
    top: ir.Value
    right: ir.Value
    bottom: ir.Value

    def area(self, op: OpBuilder) -> ir.Value:
        """Emit the areas."""
        return op.Mul(op.Sub(self.right, self.left), op.Sub(self.bottom, self.top))


def corners(op: OpBuilder, boxes: ir.Value, format: str = "xyxy") -> Corners:
    """Return the sides of boxes ``[..., 4]``."""
    a, b, c, d = (op.Squeeze(op.Slice(boxes, [i], [i + 1], [-1]), [-1]) for i in range(4))
    if format == "xyxy":
        return Corners(a, b, c, d)
    if format == "xywh":
        return Corners(a, b, op.Add(a, c), op.Add(b, d))
    x, y = op.Mul(c, 0.5), op.Mul(d, 0.5)
    return Corners(op.Sub(a, x), op.Sub(b, y), op.Add(a, x), op.Add(b, y))


def larger(op: OpBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Return the larger of two values; WebGPU lacks Max."""
    return op.Where(op.Greater(a, b), a, b)


def smaller(op: OpBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Return the smaller of two values; WebGPU lacks Min."""
    return op.Where(op.Less(a, b), a, b)


_EPSILON = 1e-7  # added to areas, as in torchvision


def overlap(op: OpBuilder, a: Corners, b: Corners) -> tuple[ir.Value, ir.Value]:
    """Return the IoU of boxes, and the area that either covers."""
    zero = op.const(0.0, a.left.dtype)
    width = op.Sub(smaller(op, a.right, b.right), larger(op, a.left, b.left))
    height = op.Sub(smaller(op, a.bottom, b.bottom), larger(op, a.top, b.top))
    shared = op.Mul(op.Clip(width, zero), op.Clip(height, zero))
    union = op.Sub(op.Add(a.area(op), b.area(op)), shared)
    return op.Div(shared, op.Add(union, _EPSILON)), union


def enclosing(op: OpBuilder, a: Corners, b: Corners) -> Corners:
    """Return the smallest box around two."""
    return Corners(
        smaller(op, a.left, b.left),
        smaller(op, a.top, b.top),
        larger(op, a.right, b.right),
        larger(op, a.bottom, b.bottom),
    )


def generalized_iou(op: OpBuilder, a: Corners, b: Corners) -> ir.Value:
    """Return ``IoU - (|c| - |a or b|) / |c|``, ``c`` the smallest box around both."""
    iou, union = overlap(op, a, b)
    area = enclosing(op, a, b).area(op)
    return op.Sub(iou, op.Div(op.Sub(area, union), op.Add(area, _EPSILON)))


def distance_iou(op: OpBuilder, a: Corners, b: Corners, iou: ir.Value) -> ir.Value:
    """Return ``IoU - d^2 / c^2``: distance of the centers, diagonal of the box around both."""
    outer = enclosing(op, a, b)
    width, height = op.Sub(outer.right, outer.left), op.Sub(outer.bottom, outer.top)
    diagonal = op.Add(op.Add(op.Mul(width, width), op.Mul(height, height)), _EPSILON)
    x = op.Mul(op.Sub(op.Add(a.left, a.right), op.Add(b.left, b.right)), 0.5)
    y = op.Mul(op.Sub(op.Add(a.top, a.bottom), op.Add(b.top, b.bottom)), 0.5)
    return op.Sub(iou, op.Div(op.Add(op.Mul(x, x), op.Mul(y, y)), diagonal))


def complete_iou(op: OpBuilder, a: Corners, b: Corners) -> ir.Value:
    """Return ``DIoU - alpha v``, ``v`` the squared difference of the angles of the diagonals.

    ``alpha = v / (1 - IoU + v)`` is a constant of the backward pass.
    """
    iou, _ = overlap(op, a, b)
    angles = [
        op.Atan(op.Div(op.Sub(c.right, c.left), op.Add(op.Sub(c.bottom, c.top), _EPSILON)))
        for c in (a, b)
    ]
    d = op.Sub(*angles)
    v = op.Mul(op.Mul(d, d), 4 / math.pi**2)
    alpha = op.stop_gradient(op.Div(v, op.Add(op.Add(op.Sub(1.0, iou), v), _EPSILON)))
    return op.Sub(distance_iou(op, a, b, iou), op.Mul(alpha, v))


@LOSSES.named("iou")
@dataclasses.dataclass(frozen=True, kw_only=True)
class IoU(Loss):
    """``1 - IoU`` of boxes ``[..., 4]``; boxes that do not touch have no gradient.

    Args:
        format: ``"xyxy"`` (left, top, right, bottom), ``"xywh"`` or ``"cxcywh"`` (center, size).
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for one loss per box.
    """

    format: str = "xyxy"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in BOX_FORMATS:
            raise PrepareError(
                f"{type(self).__name__}: unknown format: {self.format!r} "
                f"{expected_one_of(self.format, BOX_FORMATS)}"
            )

    def per_element(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit one loss per box."""
        check_same_rank(self, prediction, *targets)
        if not S.rank_of(prediction) or D.shapes_differ(op.dims(prediction)[-1:], (4,)):
            raise ShapeError(
                f"{type(self).__name__} does not accept {S.describe_value(prediction)}\n"
                "hint: it expects boxes [..., 4]; transpose other layouts first"
            )
        a, b = (corners(op, x, self.format) for x in (prediction, *targets))
        return op.Sub(1.0, self.similarity(op, a, b))

    def similarity(self, op: OpBuilder, a: Corners, b: Corners) -> ir.Value:
        """Emit the IoU, or the variant of it that the loss is named after."""
        return overlap(op, a, b)[0]


@LOSSES.named("giou")
@dataclasses.dataclass(frozen=True, kw_only=True)
class GIoU(IoU):
    """``1 - GIoU`` of boxes: distant boxes have a gradient (``generalized_box_iou_loss``)."""

    def similarity(self, op: OpBuilder, a: Corners, b: Corners) -> ir.Value:
        """Emit the generalized IoU."""
        return generalized_iou(op, a, b)


@LOSSES.named("diou")
@dataclasses.dataclass(frozen=True, kw_only=True)
class DIoU(IoU):
    """``1 - DIoU`` of boxes: it adds the distance of the centers (``distance_box_iou_loss``)."""

    def similarity(self, op: OpBuilder, a: Corners, b: Corners) -> ir.Value:
        """Emit the distance IoU."""
        return distance_iou(op, a, b, overlap(op, a, b)[0])


@LOSSES.named("ciou")
@dataclasses.dataclass(frozen=True, kw_only=True)
class CIoU(IoU):
    """``1 - CIoU`` of boxes: it adds distance and aspect ratio (``complete_box_iou_loss``)."""

    def similarity(self, op: OpBuilder, a: Corners, b: Corners) -> ir.Value:
        """Emit the complete IoU."""
        return complete_iou(op, a, b)
