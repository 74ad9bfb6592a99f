"""Losses of detectors: the set loss of DETR, and the loss of anchor-free YOLO.

Both first assign labeled boxes to predictions. The assignment has no gradient. It is part of the
graph, so that the same file trains in Python, C++ and JavaScript:

- :func:`hungarian` finds the cheapest matching of boxes and queries, for a batch in one Loop;
- :class:`YOLO` lets each box choose the anchors that fit it best (task alignment, TOOD).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import ShapeError
from onnxtrain.expand.activations import shifted_log_sum_exp
from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.shapes import dims as D
from onnxtrain.losses.classification import (
    BCEWithLogits,
    CrossEntropy,
    SigmoidFocal,
    in_range_labels,
)
from onnxtrain.losses.loss import FLOAT, INT64, LOSSES, Loss, TargetSpec, check_rank
from onnxtrain.losses.overlap import (
    Corners,
    complete_iou,
    corners,
    generalized_iou,
    larger,
)

_FAR = 1e30  # more than any cost
_NO_INDEX = float(2**24)


@dataclasses.dataclass(frozen=True)
class _Labeled:
    """Labeled boxes of a batch; one row of padding is added, so that there is at least one."""

    given: ir.Value
    """``[N, M]``, bool: whether a row is a box."""
    labels: ir.Value
    """``[N, M]``, float32."""
    boxes: ir.Value
    """``[N, M, 4]``."""

    def one_hot(self, op: OpBuilder, classes: int) -> ir.Value:
        """Return the classes of the boxes, ``[N, M, C]``; padding has none."""
        indices = op.const(np.arange(classes, dtype=np.float32))
        known = op.Where(self.given, self.labels, op.const(-1.0))
        same = op.Equal(op.Unsqueeze(known, [2]), indices)
        return op.Where(same, op.const(1.0), op.const(0.0))

    def count(self, op: OpBuilder) -> ir.Value:
        """Return the number of boxes of the batch, at least 1."""
        ones = op.Where(self.given, op.const(1.0), op.const(0.0))
        return op.Clip(op.ReduceSum(ones, keepdims=0), op.const(1.0))


def _labeled(op: OpBuilder, labels: ir.Value, boxes: ir.Value, classes: int) -> _Labeled:
    # The runtime refuses labels that are not classes; a comparison would not notice them.
    padding = op.Equal(labels, -1)
    index = in_range_labels(op, op.Where(padding, op.const(0, labels.dtype), labels))
    labels = op.Gather(op.const(np.arange(classes, dtype=np.float32)), index)
    labels = op.Where(padding, op.const(-1.0), labels)
    labels = op.Pad(labels, [0, 0, 0, 1], op.const(-1.0))
    boxes = op.Pad(boxes, [0, 0, 0, 0, 1, 0], op.const(0.0, boxes.dtype))
    return _Labeled(op.Not(op.Less(labels, 0.0)), labels, op.cast(boxes, FLOAT))


def _class_count(loss: Loss, x: ir.Value, axis: int) -> int:
    classes = (S.dims_of(x) or ())[axis]
    if not isinstance(classes, int):
        raise ShapeError(
            f"{type(loss).__name__}: the number of classes of {S.describe_value(x)} is not known\n"
            "hint: export the model with a static number of classes"
        )
    return classes


def _box_targets(prediction: ir.Value) -> list[TargetSpec]:
    batch = (S.dims_of(prediction) or (None,))[0]
    return [
        TargetSpec("labels", INT64, (batch, "boxes")),
        TargetSpec("boxes", FLOAT, (batch, "boxes", 4)),
    ]


# -- DETR ----------------------------------------------------------------------------------


@LOSSES.named("detr")
@dataclasses.dataclass(frozen=True, kw_only=True)
class DETR(Loss):
    """Set loss of detectors with queries: each labeled box is matched to one query.

    The predictions are class logits ``[N, Q, C]`` and boxes ``[N, Q, 4]``; the targets are
    ``labels`` ``[N, M]`` and ``boxes`` ``[N, M, 4]``. Boxes are center, width and height, as
    fractions of the image. Rows with label -1 are padding. The matching has the smallest sum of
    costs, which are weighted as the loss is. The loss is::

        class_weight * class + l1_weight * |difference| + giou_weight * (1 - GIoU)

    The last two are sums over matched boxes, divided by the number of boxes of the batch.

    Args:
        focal: as in Deformable DETR and RT-DETR, the classes are independent and the class term is
            :class:`SigmoidFocal`, divided by the number of boxes. Otherwise the last class is "no
            object" and the class term is a cross entropy, as in DETR.
        class_weight: factor of the class term.
        l1_weight: factor of the absolute differences.
        giou_weight: factor of the generalized IoU.
        no_object: weight of "no object" in the cross entropy.
    """

    focal: bool = False
    class_weight: float = 1.0
    l1_weight: float = 5.0
    giou_weight: float = 2.0
    no_object: float = 0.1

    predictions: ClassVar[int] = 2
    reductions: ClassVar[tuple[str, ...]] = ("mean",)

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return the predicted boxes, labels and boxes."""
        batch, queries, _ = self._dims(prediction)
        return [TargetSpec("pred_boxes", FLOAT, (batch, queries, 4)), *_box_targets(prediction)]

    def _dims(self, logits: ir.Value) -> Sequence[int | str | None]:
        check_rank(self, logits, (3,), "class logits [N, Q, C] and boxes [N, Q, 4], in this order")
        return S.dims_of(logits) or (None,) * 3

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the loss."""
        self._dims(prediction)
        logits, boxes = (op.cast(x, FLOAT) for x in (prediction, targets[0]))
        _, labels, actual = targets
        if D.shapes_differ(op.dims(boxes), (None, None, 4)):
            raise ShapeError(
                f"DETR does not accept {S.describe_value(boxes)} as boxes\n"
                "hint: LossTerm('detr', output=[logits, boxes]) with boxes [N, Q, 4]"
            )
        classes = _class_count(self, logits, 2)
        given = _labeled(op, labels, actual, classes if self.focal else classes - 1)
        detached = (op.stop_gradient(logits), op.stop_gradient(boxes))
        owner = hungarian(op, self._costs(op, *detached, given, classes), given.given)
        rows = op.cast(op.iota(op.size(given.labels, 1)), FLOAT)
        matched = op.Equal(op.Unsqueeze(owner, [2]), rows)  # [N, Q, M]
        matched = op.Where(matched, op.const(1.0), op.const(0.0))
        taken = op.ReduceSum(matched, [2], keepdims=0)  # [N, Q]
        count = given.count(op)
        loss = self._class_term(op, logits, matched, taken, given, classes, count)
        difference = op.Abs(op.Sub(boxes, op.MatMul(matched, given.boxes)))
        difference = op.Mul(op.ReduceSum(difference, [2], keepdims=0), self.l1_weight)
        pairs = (corners(op, b, "cxcywh") for b in (boxes, op.MatMul(matched, given.boxes)))
        apart = op.Mul(op.Sub(1.0, generalized_iou(op, *pairs)), self.giou_weight)
        each = op.Mul(op.Add(difference, apart), taken)
        return op.Add(loss, op.Div(op.ReduceSum(each, keepdims=0), count))

    def _costs(
        self, op: OpBuilder, logits: ir.Value, boxes: ir.Value, given: _Labeled, classes: int
    ) -> ir.Value:
        """Return the cost of each pair of box and query, ``[N, M, Q]``."""
        if self.focal:
            ends = (op.ones_like(logits), op.zeros_like(logits))
            focal = SigmoidFocal(reduction="none")
            cost = op.Sub(*(focal.per_element(op, logits, t) for t in ends))
        else:
            cost = op.Neg(op.Softmax(logits, axis=-1))
        cost = op.Mul(op.MatMul(given.one_hot(op, classes), op.mT(cost)), self.class_weight)
        a, b = op.Unsqueeze(given.boxes, [2]), op.Unsqueeze(boxes, [1])
        difference = op.ReduceSum(op.Abs(op.Sub(a, b)), [3], keepdims=0)
        alike = generalized_iou(op, *(corners(op, x, "cxcywh") for x in (a, b)))
        cost = op.Add(cost, op.Mul(difference, self.l1_weight))
        return op.Sub(cost, op.Mul(alike, self.giou_weight))

    def _class_term(
        self,
        op: OpBuilder,
        logits: ir.Value,
        matched: ir.Value,
        taken: ir.Value,
        given: _Labeled,
        classes: int,
        count: ir.Value,
    ) -> ir.Value:
        target = op.MatMul(matched, given.one_hot(op, classes))  # [N, Q, C]
        if self.focal:
            each = SigmoidFocal(reduction="sum").build(op, logits, target)
            return op.Mul(op.Div(each, count), self.class_weight)
        last = op.const(np.eye(classes, dtype=np.float32)[-1])
        target = op.Add(target, op.Mul(op.Unsqueeze(op.Sub(1.0, taken), [2]), last))
        weights = op.const(np.where(np.arange(classes) == classes - 1, self.no_object, 1.0), FLOAT)
        loss = CrossEntropy(probabilities=True, axis=-1, reduction="sum")
        total = loss.build(op, logits, op.Mul(target, weights))
        norm = op.ReduceSum(op.Mul(target, weights), keepdims=0)
        return op.Mul(op.Div(total, norm), self.class_weight)


@dataclasses.dataclass
class _Search:
    """The state of :func:`hungarian`: values of shape ``[N]`` and ``[N, Q]``, all float32."""

    row: ir.Value
    """``[N]``: the row to assign."""
    visited: ir.Value
    """``[N]``: the row at the end of the shortest path."""
    via: ir.Value
    """``[N]``: the column through which the path came to it, -1 at the start."""
    length: ir.Value
    """``[N]``: the length of the path to this column."""
    flip: ir.Value
    """``[N]``: the column to hand to the row before it on the path, -1 while searching."""
    potential: ir.Value
    """``[N, Q]``: the dual variable of each column."""
    owner: ir.Value
    """``[N, Q]``: the row that has the column, or -1."""
    distance: ir.Value
    """``[N, Q]``: the length of the shortest path to each column."""
    before: ir.Value
    """``[N, Q]``: the row before the column on this path."""
    closed: ir.Value
    """``[N, Q]``: 1 for columns whose distance is final."""

    def values(self) -> list[ir.Value]:
        """Return the values in order."""
        return [getattr(self, f.name) for f in dataclasses.fields(self)]


def hungarian(op: OpBuilder, cost: ir.Value, given: ir.Value) -> ir.Value:
    """Return the row that the cheapest matching gives to each column, -1 for none: ``[N, Q]``.

    Rows are assigned one after the other, each along the shortest augmenting path (Jonker and
    Volgenant). The Loop does one step for all matrices of the batch: it closes the nearest column,
    or moves one column of a path that has been found to the row before it.

    Args:
        op: the builder.
        cost: ``[N, M, Q]``, with at least one row.
        given: ``[N, M]``, bool: whether a row is to be assigned.
    """
    cost = op.Where(op.Unsqueeze(given, [2]), cost, op.const(0.0))
    batch, rows, columns = (op.size(cost, i) for i in range(3))
    positions = op.cast(op.iota(rows), FLOAT)
    last = op.ReduceMax(op.Where(given, positions, op.const(-1.0)), [1], keepdims=0)
    short = op.Mul(last, 0.0)
    wide = op.Mul(op.Squeeze(op.Slice(cost, [0], [1], [1]), [1]), 0.0)
    wide = op.Where(op.Equal(wide, 0.0), wide, op.const(0.0))  # a cost may be infinite
    first = _Search(
        row=short,
        visited=short,
        via=op.Sub(short, 1.0),
        length=short,
        flip=op.Sub(short, 1.0),
        potential=wide,
        owner=op.Sub(wide, 1.0),
        distance=op.Add(wide, _FAR),
        before=wide,
        closed=wide,
    )
    flat = op.reshape(cost, [-1, columns])
    offset = op.Mul(op.cast(op.iota(batch), FLOAT), op.count(positions))
    places = op.cast(op.iota(columns), FLOAT)

    number = op.const(0)
    body = op.body([number, op.const(True), *first.values()])
    state = _Search(*body.graph.inputs[2:])
    new = _step(body, state, flat, offset, places, last)
    more = body.ReduceMax(body.Sub(last, new.row), keepdims=0)
    body.graph.outputs.append(body.Not(body.Less(more, 0.0)))
    for x, start in zip(new.values(), first.values(), strict=True):
        x.shape = start.shape
        body.graph.outputs.append(x)
    going = op.Not(op.Less(op.ReduceMax(last, keepdims=0), 0.0))
    count = len(first.values())
    results = op.Loop(None, going, *first.values(), body=body.graph, _outputs=count)
    owner = _Search(*results).owner
    owner.shape = wide.shape
    valid = op.Where(given, op.const(1.0), op.const(0.0))
    same = op.Equal(op.Unsqueeze(owner, [2]), positions)
    kept = op.ReduceSum(op.Where(same, op.Unsqueeze(valid, [1]), op.const(0.0)), [2], keepdims=0)
    return op.Where(op.Greater(kept, 0.0), owner, op.const(-1.0))


def _step(
    op: OpBuilder,
    s: _Search,
    cost: ir.Value,
    offset: ir.Value,
    places: ir.Value,
    last: ir.Value,
) -> _Search:
    """Emit one step of the search of every matrix of the batch; see :func:`hungarian`."""
    minus, far = op.const(-1.0), op.const(_FAR)

    def column(x: ir.Value) -> ir.Value:
        return op.Unsqueeze(x, [1])

    def pick(at: ir.Value, x: ir.Value) -> ir.Value:
        return op.ReduceSum(op.Where(at, x, op.const(0.0)), [1], keepdims=0)

    # Search: distances through the visited row, then close the nearest column.
    searching = op.And(op.Less(s.flip, 0.0), op.Not(op.Greater(s.row, last)))
    index = op.cast(op.Add(offset, op.Where(searching, s.visited, op.const(0.0))), INT64)
    reduced = op.Sub(op.Gather(cost, index), s.potential)
    through = op.Sub(s.length, pick(op.Equal(places, column(s.via)), reduced))
    open_ = op.Less(s.closed, 0.5)
    reached = op.Where(open_, op.Add(reduced, column(through)), far)
    better = op.And(op.Less(reached, s.distance), column(searching))
    distance = op.Where(better, reached, s.distance)
    before = op.Where(better, column(s.visited), s.before)
    candidates = op.Where(open_, distance, far)
    nearest = op.ReduceMin(candidates, [1], keepdims=0)
    ties = op.Equal(candidates, column(nearest))
    chosen = op.ReduceMin(op.Where(ties, places, op.const(_NO_INDEX)), [1], keepdims=0)
    at = op.And(op.Equal(places, column(chosen)), column(searching))
    closed = op.Where(at, op.const(1.0), s.closed)
    owner_there = pick(at, s.owner)
    # No column is left: more rows than columns, or costs that are not finite.
    stuck = op.And(searching, op.Not(op.Less(nearest, 0.5 * _FAR)))
    moving = op.And(searching, op.Not(stuck))
    found = op.And(moving, op.Less(owner_there, 0.0))
    gain = op.Mul(closed, op.Sub(column(nearest), distance))
    potential = op.Where(column(found), op.Sub(s.potential, gain), s.potential)

    # Augment: the row before the column gets it, and gives up the one it had.
    flip = op.Where(found, chosen, s.flip)
    flipping = op.Not(op.Less(flip, 0.0))
    at = op.Equal(places, column(flip))
    taker = pick(at, before)
    had = op.And(op.Equal(s.owner, column(taker)), op.Not(at))
    given_up = op.ReduceMax(op.Where(had, places, minus), [1], keepdims=0)
    owner = op.Where(op.And(at, column(flipping)), column(taker), s.owner)
    assigned = op.And(flipping, op.Less(given_up, 0.0))

    done = op.Or(assigned, stuck)
    row = op.Where(done, op.Add(s.row, 1.0), s.row)
    return _Search(
        row=row,
        visited=op.Where(done, row, op.Where(moving, owner_there, s.visited)),
        via=op.Where(done, minus, op.Where(moving, chosen, s.via)),
        length=op.Where(done, op.const(0.0), op.Where(moving, nearest, s.length)),
        flip=op.Where(op.And(flipping, op.Not(done)), given_up, minus),
        potential=potential,
        owner=owner,
        distance=op.Where(column(done), far, distance),
        before=before,
        closed=op.Where(column(done), op.const(0.0), closed),
    )


# -- YOLO ----------------------------------------------------------------------------------


@LOSSES.named("yolo")
@dataclasses.dataclass(frozen=True, kw_only=True)
class YOLO(Loss):
    """Loss of anchor-free YOLO: task-aligned assignment, CIoU, distribution focal loss and BCE.

    The predictions are inner values of the file, before boxes are decoded: distances to the four
    sides ``[N, 4 * bins, A]``, as logits of a distribution over 0, 1, ... strides, and class logits
    ``[N, C, A]``. The ``A`` anchors are the centers of the cells of all levels, row by row. The
    targets are ``labels`` ``[N, M]``, -1 for padding, and ``boxes`` ``[N, M, 4]``: center,
    width and height in pixels.

    Each box takes the ``topk`` anchors inside of it with the largest ``p^alpha * CIoU^beta``, ``p``
    the probability of its class. An anchor that several boxes take belongs to the one that its
    prediction overlaps most. The class target of an anchor is this measure, scaled so that the best
    anchor of a box has its CIoU; box terms are weighted by it. All terms are divided by the sum
    of the targets. The loss does not grow with the batch, other than that of ultralytics.

    Args:
        image_size: height and width in pixels; by default the square with this number of anchors.
        strides: pixels per cell of each level.
        topk: number of anchors that a box takes.
        alpha: exponent of the class probability in the measure.
        beta: exponent of the CIoU in the measure.
        box_weight: factor of ``1 - CIoU``.
        class_weight: factor of the binary cross entropy of the classes.
        dfl_weight: factor of the distribution focal loss.
    """

    image_size: Sequence[int] | int | None = None
    strides: Sequence[int] = (8, 16, 32)
    topk: int = 10
    alpha: float = 0.5
    beta: float = 6.0
    box_weight: float = 7.5
    class_weight: float = 0.5
    dfl_weight: float = 1.5

    predictions: ClassVar[int] = 2
    reductions: ClassVar[tuple[str, ...]] = ("mean",)

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.image_size
        if size is not None:
            pair = (size, size) if isinstance(size, int) else tuple(size)
            object.__setattr__(self, "image_size", pair)
        object.__setattr__(self, "strides", tuple(self.strides))

    def targets(self, prediction: ir.Value) -> list[TargetSpec]:
        """Return the class logits, labels and boxes."""
        check_rank(self, prediction, (3,), "distances [N, 4 * bins, A] and class logits [N, C, A]")
        batch, _, anchors = S.dims_of(prediction) or (None,) * 3
        scores = TargetSpec("class_logits", FLOAT, (batch, "classes", anchors))
        return [scores, *_box_targets(prediction)]

    def build(self, op: OpBuilder, prediction: ir.Value, *targets: ir.Value) -> ir.Value:
        """Emit the loss."""
        distances, logits = (op.cast(x, FLOAT) for x in (prediction, targets[0]))
        _, labels, boxes = targets
        for x in (distances, logits):
            check_rank(self, x, (3,), "distances [N, 4 * bins, A] and class logits [N, C, A]")
        bins, x, y, stride = self._anchors(distances)
        classes = _class_count(self, logits, 1)
        given = _labeled(op, labels, boxes, classes)
        distances = op.reshape(distances, [-1, 4, bins, len(x)])
        z, lse = shifted_log_sum_exp(op, distances, 2)
        logp = op.Sub(z, lse)
        sides = op.const(np.arange(bins, dtype=np.float32).reshape(-1, 1))
        sides = op.ReduceSum(op.Mul(op.Exp(logp), sides), [2], keepdims=0)  # [N, 4, A]
        predicted = self._boxes(op, sides, x, y, stride)

        measure, owned = self._assign(
            op,
            Corners(*(op.stop_gradient(v) for v in predicted)),
            op.Sigmoid(op.stop_gradient(logits)),
            *(given, x, y, classes),
        )
        target = op.MatMul(op.mT(given.one_hot(op, classes)), measure)  # [N, C, A]
        weight = op.ReduceSum(measure, [1], keepdims=0)  # [N, A]
        norm = op.Clip(op.ReduceSum(weight, keepdims=0), op.const(1.0))
        bce = BCEWithLogits(reduction="sum").build(op, logits, target)
        actual = op.MatMul(op.mT(given.boxes), owned)  # [N, 4, A]
        actual = corners(op, op.Transpose(actual, perm=[0, 2, 1]), "cxcywh")
        apart = op.Sub(1.0, complete_iou(op, predicted, actual))
        dfl = self._distribution(op, logp, actual, x, y, stride, bins)
        each = op.Add(op.Mul(apart, self.box_weight), op.Mul(dfl, self.dfl_weight))
        total = op.ReduceSum(op.Mul(each, weight), keepdims=0)
        return op.Div(op.Add(total, op.Mul(bce, self.class_weight)), norm)

    def _anchors(self, distances: ir.Value) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """Return the number of bins, and the centers and strides of all anchors in pixels."""
        _, channels, count = S.dims_of(distances) or (None,) * 3
        if not isinstance(channels, int) or not isinstance(count, int) or channels % 4:
            raise ShapeError(
                f"YOLO does not accept {S.describe_value(distances)}\n"
                "hint: it expects distances [N, 4 * bins, A] with static sizes, then class logits; "
                "build(..., dims={...}) makes the image size static"
            )
        size = self.image_size
        if size is None:
            side = round(math.sqrt(count / sum(1 / s**2 for s in self.strides)))
            size = (side, side)
        assert not isinstance(size, int)
        centers = []
        for s in self.strides:
            y, x = np.mgrid[: size[0] // s, : size[1] // s]
            level = [(x + 0.5) * s, (y + 0.5) * s, np.full(x.shape, s)]
            centers.append(np.stack(level).reshape(3, -1))
        x, y, stride = np.concatenate(centers, 1).astype(np.float32)
        if len(x) != count:
            raise ShapeError(
                f"YOLO: {S.describe_value(distances)} has {count} anchors; an image of "
                f"{size[0]} x {size[1]} pixels with strides {', '.join(map(str, self.strides))} "
                f"has {len(x)}\nhint: pass image_size=(height, width) and strides="
            )
        return channels // 4, x, y, stride

    def _boxes(
        self, op: OpBuilder, sides: ir.Value, x: np.ndarray, y: np.ndarray, stride: np.ndarray
    ) -> Corners:
        """Return the predicted boxes in pixels, a tensor ``[N, A]`` for each side."""
        pixels = op.Mul(sides, stride)
        left, top, right, bottom = (
            op.Squeeze(op.Slice(pixels, [i], [i + 1], [1]), [1]) for i in range(4)
        )
        return Corners(op.Sub(x, left), op.Sub(y, top), op.Add(x, right), op.Add(y, bottom))

    def _assign(
        self,
        op: OpBuilder,
        predicted: Corners,
        p: ir.Value,
        given: _Labeled,
        x: np.ndarray,
        y: np.ndarray,
        classes: int,
    ) -> tuple[ir.Value, ir.Value]:
        """Return class targets and which box has an anchor, both ``[N, M, A]``."""
        zero, one = op.const(0.0), op.const(1.0)
        actual = Corners(*(op.Unsqueeze(v, [2]) for v in corners(op, given.boxes, "cxcywh")))
        predicted = Corners(*(op.Unsqueeze(v, [1]) for v in predicted))
        margins = (
            *(op.Sub(x, actual.left), op.Sub(y, actual.top)),
            *(op.Sub(actual.right, x), op.Sub(actual.bottom, y)),
        )
        inside = op.Unsqueeze(op.Where(given.given, one, zero), [2])
        for margin in margins:
            inside = op.Where(op.Greater(margin, 1e-9), inside, zero)
        fit = op.Mul(op.Clip(complete_iou(op, actual, predicted), zero), inside)
        measure = op.MatMul(given.one_hot(op, classes), p)
        measure = op.Mul(op.Pow(measure, self.alpha), op.Pow(fit, self.beta))
        best, _ = op.TopK(measure, [min(self.topk, len(x))], axis=2, _outputs=2)
        least = op.ReduceMin(best, [2], keepdims=1)
        taken = op.Where(op.Less(measure, least), zero, fit)
        taken = op.Where(op.Greater(measure, 0.0), taken, zero)
        # The box that fits best, the first of several, has the anchor.
        top = op.ReduceMax(taken, [1], keepdims=1)
        rows = op.Unsqueeze(op.cast(op.iota(op.size(given.labels, 1)), FLOAT), [1])
        ties = op.Where(op.Equal(taken, top), rows, op.const(_NO_INDEX))
        owner = op.Where(op.Greater(top, 0.0), op.ReduceMin(ties, [1], keepdims=1), op.const(-1.0))
        owned = op.Where(op.Equal(rows, owner), one, zero)
        measure, fit = op.Mul(measure, owned), op.Mul(fit, owned)
        scale = op.Div(
            op.ReduceMax(fit, [2], keepdims=1),
            larger(op, op.ReduceMax(measure, [2], keepdims=1), op.const(1e-30)),
        )
        return op.Mul(measure, scale), owned

    def _distribution(
        self,
        op: OpBuilder,
        logp: ir.Value,
        actual: Corners,
        x: np.ndarray,
        y: np.ndarray,
        stride: np.ndarray,
        bins: int,
    ) -> ir.Value:
        """Return the cross entropy of the distances with the two bins next to the true one."""
        true = [
            op.Clip(op.Div(d, stride), op.const(0.0), op.const(bins - 1 - 0.01))
            for d in (
                *(op.Sub(x, actual.left), op.Sub(y, actual.top)),
                *(op.Sub(actual.right, x), op.Sub(actual.bottom, y)),
            )
        ]
        true = op.Concat(*(op.Unsqueeze(d, [1, 2]) for d in true), axis=1)  # [N, 4, 1, A]
        indices = op.const(np.arange(bins, dtype=np.float32).reshape(-1, 1))
        share = op.Clip(op.Sub(1.0, op.Abs(op.Sub(indices, true))), op.const(0.0))
        each = op.Neg(op.ReduceSum(op.Mul(share, logp), [2], keepdims=0))
        return op.ReduceMean(each, [1], keepdims=0)
