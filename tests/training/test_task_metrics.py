"""Metrics of boxes, masks and transcripts: beside pycocotools, scikit-learn and formulas."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from sklearn import metrics as sk

import onnxtrain
from onnxtrain.errors import OnnxTrainError, PrepareError, ShapeError
from onnxtrain.training import (
    CharErrorRate,
    CocoMAP,
    Detections,
    DiceScore,
    MeanIoU,
    Trainer,
    WordErrorRate,
)
from onnxtrain.training.detection_metrics import suppress
from onnxtrain.training.metrics import edit_distance
from tests.artifacts.models import finished, graph, weight

rng = np.random.default_rng(4)


# -- boxes ---------------------------------------------------------------------------------

COCO = json.loads((Path(__file__).parent / "coco_map.json").read_text())


def padded(rows: list, fill: float = 0.0) -> np.ndarray:
    """Return rows of different lengths as one array."""
    most = max(map(len, rows))
    like = np.shape(next(r for r in rows if len(r))[0])
    return np.array([[*r, *[np.full(like, fill).tolist()] * (most - len(r))] for r in rows])


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_map_equals_pycocotools(batch: int) -> None:
    images = COCO["images"]
    arrays = {
        "boxes": padded([i["boxes"] for i in images]),
        "labels": padded([i["labels"] for i in images], -1).astype(np.int64),
        "detected": padded([i["detected"] for i in images]),
        "scores": padded([i["scores"] for i in images], -1),
        "classes": padded([i["detected_labels"] for i in images], -1).astype(np.int64),
    }

    def decode(outputs):
        return Detections(outputs["detected"], outputs["scores"], outputs["classes"])

    for name, options in (
        ("map", {}),
        ("map_50", {"thresholds": [0.5]}),
        ("map_75", {"thresholds": [0.75]}),
    ):
        metric = CocoMAP(decode, format="xywh", **options)
        for start in range(0, len(images), batch):
            part = {n: a[start : start + batch] for n, a in arrays.items()}
            metric.update(part, part)
        assert metric.compute() == pytest.approx(COCO[name], abs=1e-12)
        metric.reset()
        assert np.isnan(metric.compute())


def test_decoders_of_detectors() -> None:
    """Two images with one box of class 1; the first is detected, the second as class 0."""
    boxes = np.array([[[0.5, 0.5, 0.2, 0.2]], [[0.3, 0.3, 0.2, 0.2]]])
    targets = {"boxes": boxes, "labels": np.array([[1], [1]])}
    queries = np.concatenate([boxes, boxes + 0.4], 1)  # the second query is no object
    logits = np.array([[[0.0, 3.0, 0.0], [0, 0, 9.0]], [[3.0, 0.0, 0.0], [0, 0, 9.0]]])
    half = CocoMAP("detr")
    half.update({"hidden": np.zeros((2, 7, 8)), "logits": logits, "pred_boxes": queries}, targets)
    assert half.compute() == pytest.approx(51 / 101)  # precision 1 up to recall 0.5
    half = CocoMAP("rt_detr")
    half.update({"logits": logits[..., :2] + [[0, 0], [1, 0]], "boxes": queries}, targets)
    assert half.compute() == pytest.approx(51 / 101)
    anchors = np.concatenate([queries[:, :1], queries[:, :1] + 0.001, queries[:, 1:]], 1)
    p = np.array([[[0.1, 0.9], [0.1, 0.8], [0, 0]], [[0.9, 0.1], [0.8, 0.1], [0, 0]]])
    half = CocoMAP("yolo")
    half.update({"output0": np.concatenate([anchors, p], -1).transpose(0, 2, 1)}, targets)
    assert half.compute() == pytest.approx(51 / 101)


def test_suppression_keeps_the_best_of_a_class() -> None:
    boxes = np.array([[0, 0, 10, 10], [0, 0, 10, 9], [0, 0, 10, 9.5], [20, 20, 30, 30.0]])
    scores, labels = np.array([0.5, 0.9, 0.8, 0.0005]), np.array([0, 0, 1, 0])
    assert suppress(boxes, scores, labels) == [1, 2]
    assert suppress(boxes, scores, labels, iou=0.95) == [1, 2, 0]


def test_refused_boxes() -> None:
    with pytest.raises(PrepareError, match=r"unknown decode: 'dert' .*detr"):
        CocoMAP("dert")
    with pytest.raises(PrepareError, match=r"unknown format: 'xxyy'"):
        CocoMAP("detr", format="xxyy")
    with pytest.raises(PrepareError, match=r"targets 'boxes' \[N, M, 4\] and 'labels'"):
        CocoMAP("detr").update({}, np.zeros(3))
    targets = {"boxes": np.zeros((1, 1, 4)), "labels": np.zeros((1, 1), np.int64)}
    for decode in ("detr", "yolo"):
        with pytest.raises(ShapeError, match=r"among y \[3, 2\]\nhint: CocoMAP\(lambda"):
            CocoMAP(decode).update({"y": np.zeros((3, 2))}, targets)


# -- masks ---------------------------------------------------------------------------------


def test_masks_of_classes_equal_scikit_learn() -> None:
    logits, labels = rng.standard_normal((6, 4, 5, 3)), rng.integers(0, 3, (6, 5, 3))
    labels[:, 0] = 255
    iou, dice = MeanIoU(), DiceScore()
    for part in (slice(0, 4), slice(4, 6)):
        iou.update(logits[part], labels[part])
        dice.update(logits[part], labels[part])
    known = labels != 255
    a, b = labels[known], logits.argmax(1)[known]
    assert iou.compute() == pytest.approx(sk.jaccard_score(a, b, average="macro"))
    assert dice.compute() == pytest.approx(sk.f1_score(a, b, average="macro"))


def segmenter(loss: str) -> Trainer:
    """Return a trainer of one layer: x [batch, 3, 4, 4] -> y of the same shape."""
    op = graph()
    x = op.input("x", ir.DataType.FLOAT, ["batch", 3, 4, 4])
    values = rng.standard_normal((3, 3, 1, 1)).astype(np.float32)
    artifacts = onnxtrain.build(
        finished(op, y=op.Conv(x, weight(op, "w", values))), loss=loss, optimizer="sgd"
    )
    return Trainer(artifacts)


def test_masks_in_evaluate() -> None:
    x = rng.standard_normal((7, 3, 4, 4)).astype(np.float32)
    labels = rng.integers(0, 3, (7, 4, 4))
    trainer = segmenter("dice")
    got = trainer.evaluate(x, labels, metrics=["miou", "dice"], batch_size=4).metrics
    classes = trainer.predict(x)["y"].argmax(1)
    expected = sk.jaccard_score(labels.ravel(), classes.ravel(), average="macro")
    assert got["miou"] == pytest.approx(expected)
    assert got["dice"] == pytest.approx(
        sk.f1_score(labels.ravel(), classes.ravel(), average="macro")
    )
    masks = rng.integers(0, 2, (7, 3, 4, 4)).astype(np.float32)
    trainer = segmenter("sigmoid_dice")
    got = trainer.evaluate(x, masks, metrics=["miou"], batch_size=4).metrics
    both = (a.transpose(1, 0, 2, 3).reshape(3, -1) for a in (masks, trainer.predict(x)["y"] > 0))
    pairs = zip(*both, strict=True)
    assert got["miou"] == pytest.approx(np.mean([sk.jaccard_score(a, b) for a, b in pairs]))


# -- transcripts ---------------------------------------------------------------------------


def test_edit_distance() -> None:
    def slow(a: str, b: str) -> int:
        if not a or not b:
            return len(a) + len(b)
        return min(slow(a[1:], b) + 1, slow(a, b[1:]) + 1, slow(a[1:], b[1:]) + (a[0] != b[0]))

    words = ["", "a", "abc", "bca", "aabb", "cab", "bbb"]
    assert all(edit_distance(a, b) == slow(a, b) for a in words for b in words)


def test_error_rates_of_texts() -> None:
    cer, wer = CharErrorRate(), WordErrorRate()
    for metric in (cer, wer):
        assert np.isnan(metric.compute())
        metric.update(["hello world", "a b"], ["hallo word", "a"])
    assert cer.compute() == pytest.approx(4 / 11)  # a for e, l, and " b"
    assert wer.compute() == pytest.approx(3 / 3)


def test_error_rates_of_ctc() -> None:
    """Classes: blank, space, and two letters."""
    paths = np.array([[2, 2, 0, 2, 1, 3, 0], [3, 0, 1, 1, 2, 2, 2]])
    outputs = {"y": np.eye(4)[paths].transpose(1, 0, 2)}
    targets = {
        "labels": np.array([[2, 2, 1, 3], [3, 1, 3, 0]]),
        "input_lengths": np.array([7, 5]),
        "target_lengths": np.array([4, 3]),
    }
    cer, wer = CharErrorRate(), WordErrorRate(separator=1)
    for metric in (cer, wer):
        metric.update(outputs, targets)
    assert cer.compute() == pytest.approx(1 / 7)
    assert wer.compute() == pytest.approx(1 / 4)
    swapped = CharErrorRate(batch_first=True)
    swapped.update({"y": outputs["y"].transpose(1, 0, 2)}, targets)
    assert swapped.compute() == cer.compute()
    with pytest.raises(ShapeError, match=r"7 sequences .* 2 in .*\n.*Rate\(batch_first=False\)"):
        swapped.update(outputs, targets)
    with pytest.raises(PrepareError, match="pass separator="):
        WordErrorRate().update(outputs, targets)
    with pytest.raises(PrepareError, match="targets of the loss 'ctc'"):
        CharErrorRate().update(outputs, {"labels": paths})


def test_cer_by_name_in_evaluate() -> None:
    op = graph()
    x = op.input("x", ir.DataType.FLOAT, ["batch", 6, 4])
    scores = op.MatMul(x, weight(op, "w", np.eye(4, dtype=np.float32)))
    y = op.Transpose(op.LogSoftmax(scores), perm=[1, 0, 2])
    trainer = Trainer(onnxtrain.build(finished(op, y=y), loss="ctc", optimizer="sgd"))
    paths = np.array([[1, 0, 2, 0, 3, 3], [1, 1, 1, 2, 2, 2], [3, 0, 0, 0, 0, 0]])
    rows = {
        "x": np.eye(4, dtype=np.float32)[paths],
        "labels": np.array([[1, 2, 3], [1, 2, 3], [3, 0, 0]]),
        "input_lengths": np.full(3, 6),
        "target_lengths": np.array([3, 3, 1]),
    }
    assert trainer.evaluate(rows, metrics=["cer"], batch_size=2).metrics["cer"] == 1 / 7
    named = trainer.evaluate(rows, metrics=["cer:blank=0", "wer:separator=2"]).metrics
    assert named == {"cer": 1 / 7, "wer": pytest.approx(1 / 5)}
    with pytest.raises(OnnxTrainError, match=r"unexpected .*'words'\nhint: its options are sep"):
        trainer.evaluate(rows, metrics=["wer:words=1"])
    with pytest.raises(OnnxTrainError, match=r"missing .*'decode'\nhint: its options are decode"):
        trainer.evaluate(rows, metrics=["coco_map"])
