"""Mean average precision of boxes, with the definition of COCO.

For a class and an IoU threshold, the detections of all images are ranked by score. Each takes the
unmatched box of its image that it overlaps most, if their IoU reaches the threshold, else it is
wrong. AP is the mean over 101 recalls of the highest precision at this recall or a larger one; the
metric is the mean over classes and over the thresholds 0.5, 0.55, ... 0.95.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from onnxtrain.errors import PrepareError, ShapeError, expected_one_of

_RECALLS = np.linspace(0.0, 1.0, 101)


class Detections(NamedTuple):
    """Detected boxes of a batch of images, of which scores below 0 are not there."""

    boxes: np.ndarray
    """``[images, boxes, 4]``, in the format of the targets."""
    scores: np.ndarray
    """``[images, boxes]``."""
    labels: np.ndarray
    """``[images, boxes]``."""


Decode = Callable[[Mapping[str, np.ndarray]], Detections]
"""Returns the detections of a batch from the outputs of a model by name."""


class CocoMAP:
    """Mean average precision of boxes.

    Pass it to ``fit(metrics={"map": CocoMAP("detr")})`` or ``evaluate``. The targets are ``boxes``
    ``[N, M, 4]`` and ``labels`` ``[N, M]``; rows with label -1 are padding.

    >>> boxes = np.array([[[1.0, 1.0, 4.0, 4.0], [5.0, 5.0, 2.0, 2.0]]])
    >>> metric = CocoMAP(lambda y: Detections(y["boxes"], np.array([[0.9, 0.8]]), y["labels"]))
    >>> labels = np.array([[0, 1]])
    >>> metric.update({"boxes": boxes, "labels": labels}, {"boxes": boxes, "labels": labels})
    >>> metric.compute()
    1.0

    Args:
        decode: how outputs become detections: ``"detr"`` for logits ``[N, Q, C + 1]`` and boxes
            ``[N, Q, 4]``, whose last class is "no object"; ``"rt_detr"`` for the same with
            independent classes; ``"yolo"`` for one output ``[N, 4 + C, A]`` of boxes and
            probabilities before NMS; or a function of the outputs by name.
        format: of the boxes, in targets and outputs: ``"cxcywh"``, ``"xywh"`` or ``"xyxy"``.
        thresholds: IoUs; ``[0.5]`` gives AP50.
        max_detections: number of detections of a class that count in an image.
    """

    def __init__(
        self,
        decode: str | Decode,
        *,
        format: str = "cxcywh",
        thresholds: Sequence[float] = tuple(np.linspace(0.5, 0.95, 10).tolist()),
        max_detections: int = 100,
    ) -> None:
        if isinstance(decode, str) and decode not in DECODERS:
            raise PrepareError(f"unknown decode: {decode!r} {expected_one_of(decode, DECODERS)}")
        if format not in _TO_CORNERS:
            raise PrepareError(f"unknown format: {format!r} {expected_one_of(format, _TO_CORNERS)}")
        self._decode = DECODERS[decode] if isinstance(decode, str) else decode
        self._corners = _TO_CORNERS[format]
        self.thresholds = np.asarray(thresholds, np.float64)
        self.max_detections = max_detections
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self._ranked: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        self._actual: dict[int, int] = {}

    def update(self, predictions: Mapping[str, np.ndarray], targets: Any) -> None:
        """Match the detections of a batch."""
        if not isinstance(targets, Mapping) or not {"boxes", "labels"} <= targets.keys():
            raise PrepareError(
                "the targets 'boxes' [N, M, 4] and 'labels' [N, M] are needed\n"
                "hint: losses 'detr' and 'yolo' add them; a function as decode= serves others"
            )
        found = self._decode(predictions)
        for i, labels in enumerate(targets["labels"]):
            here = found.scores[i] >= 0
            predicted = found.labels[i][here]
            boxes = self._corners(np.asarray(found.boxes[i], np.float64)[here])
            actual = self._corners(np.asarray(targets["boxes"][i], np.float64))
            for label in np.union1d(labels[labels >= 0], predicted).tolist():
                mine = predicted == label
                order = np.argsort(-found.scores[i][here][mine], kind="stable")
                order = order[: self.max_detections]
                overlaps = box_iou(boxes[mine][order], actual[labels == label])
                hits = np.stack([_matched(overlaps, t) for t in self.thresholds])
                scores = found.scores[i][here][mine][order]
                self._ranked.setdefault(label, []).append((scores, hits))
                self._actual[label] = self._actual.get(label, 0) + int((labels == label).sum())

    def compute(self) -> float:
        """Return the mean over classes that the targets have; NaN without any."""
        values = [
            np.mean([self._average_precision(label, i) for i in range(len(self.thresholds))])
            for label, count in self._actual.items()
            if count
        ]
        return float(np.mean(values)) if values else float("nan")

    def _average_precision(self, label: int, threshold: int) -> float:
        ranked = self._ranked[label]
        order = np.argsort(-np.concatenate([s for s, _ in ranked]), kind="stable")
        hits = np.concatenate([h[threshold] for _, h in ranked])[order]
        right = hits.cumsum()
        precision = right / np.arange(1, len(hits) + 1)
        precision = np.maximum.accumulate(precision[::-1])[::-1]
        at = np.searchsorted(right / self._actual[label], _RECALLS)
        return float(np.append(precision, 0.0)[at].mean())


def _matched(overlaps: np.ndarray, threshold: float) -> np.ndarray:
    """Return which detections, the best first, have a box of their own."""
    free, hits = np.ones(overlaps.shape[1], bool), np.zeros(len(overlaps), bool)
    for i, row in enumerate(overlaps):
        candidates = np.where(free & (row >= min(threshold, 1 - 1e-10)), row, -1.0)
        if candidates.size and candidates.max() >= 0:
            hits[i], free[np.flatnonzero(candidates == candidates.max())[-1]] = True, False
    return hits


def box_iou(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the IoU of all pairs of boxes ``[n, 4]`` and ``[m, 4]``, left, top, right, bottom."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = np.clip(high - low, 0, None).prod(-1)
    areas = [(x[:, 2:] - x[:, :2]).prod(-1) for x in (a, b)]
    union = areas[0][:, None] + areas[1][None] - shared
    return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)


def _from_center(boxes: np.ndarray) -> np.ndarray:
    half = boxes[..., 2:] / 2
    return np.concatenate([boxes[..., :2] - half, boxes[..., :2] + half], -1)


def _from_corner(boxes: np.ndarray) -> np.ndarray:
    return np.concatenate([boxes[..., :2], boxes[..., :2] + boxes[..., 2:]], -1)


_TO_CORNERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "cxcywh": _from_center,
    "xywh": _from_corner,
    "xyxy": lambda boxes: boxes,
}


def _detr(outputs: Mapping[str, np.ndarray]) -> Detections:
    """Take the best class of each query, except "no object"."""
    logits, boxes = _logits_and_boxes(outputs)
    e = np.exp(logits - logits.max(-1, keepdims=True))
    p = (e / e.sum(-1, keepdims=True))[..., :-1]
    return Detections(boxes, p.max(-1), p.argmax(-1))


def _rt_detr(outputs: Mapping[str, np.ndarray]) -> Detections:
    """Take the best pairs of query and class, as many as there are queries."""
    logits, boxes = _logits_and_boxes(outputs)
    n, queries, classes = logits.shape
    p = 0.5 * (1.0 + np.tanh(0.5 * logits)).reshape(n, -1)
    best = np.argsort(-p, axis=1, kind="stable")[:, :queries]
    chosen = np.take_along_axis(boxes, (best // classes)[..., None], 1)
    return Detections(chosen, np.take_along_axis(p, best, 1), best % classes)


def _logits_and_boxes(outputs: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    boxes = [n for n, y in outputs.items() if y.ndim == 3 and y.shape[-1] == 4]
    others = [n for n, y in outputs.items() if y.ndim == 3 and n not in boxes]
    logits = [n for n in others if boxes and outputs[n].shape[:2] == outputs[boxes[0]].shape[:2]]
    if len(boxes) != 1 or len(logits) != 1:
        raise ShapeError(
            f"found no single pair of logits [N, Q, C] and boxes [N, Q, 4] among {_listed(outputs)}"
            "\nhint: CocoMAP(lambda outputs: Detections(boxes, scores, labels))"
        )
    return outputs[logits[0]].astype(np.float64), outputs[boxes[0]]


def _yolo(outputs: Mapping[str, np.ndarray]) -> Detections:
    """Take the best class of each anchor, then suppress what overlaps a better one of its class."""
    ys = [y for y in outputs.values() if y.ndim == 3 and y.shape[1] > 4]
    if len(ys) != 1:
        raise ShapeError(
            f"found no single output [N, 4 + C, A] among {_listed(outputs)}\n"
            "hint: CocoMAP(lambda outputs: Detections(boxes, scores, labels))"
        )
    y = ys[0].transpose(0, 2, 1)
    boxes, scores, labels = y[..., :4], y[..., 4:].max(-1), y[..., 4:].argmax(-1)
    kept = np.full(scores.shape, -1.0)
    for i in range(len(y)):
        chosen = suppress(_from_center(boxes[i].astype(np.float64)), scores[i], labels[i])
        kept[i, chosen] = scores[i, chosen]
    return Detections(boxes, kept, labels)


def suppress(
    boxes: np.ndarray,
    scores: np.ndarray,
    labels: np.ndarray,
    *,
    iou: float = 0.7,
    score: float = 0.001,
    most: int = 300,
) -> list[int]:
    """Return the boxes that non-maximum suppression keeps, the best first."""
    left = [int(i) for i in np.argsort(-scores, kind="stable")[:30_000] if scores[i] > score]
    kept: list[int] = []
    while left and len(kept) < most:
        best, rest = left[0], np.array(left[1:], int)
        kept.append(best)
        far = box_iou(boxes[[best]], boxes[rest])[0] <= iou
        left = rest[far | (labels[rest] != labels[best])].tolist()
    return kept


def _listed(outputs: Mapping[str, np.ndarray]) -> str:
    return ", ".join(f"{n} {list(y.shape)}" for n, y in outputs.items())


DECODERS: dict[str, Decode] = {"detr": _detr, "rt_detr": _rt_detr, "yolo": _yolo}
"""How outputs of well-known detectors become detections."""
