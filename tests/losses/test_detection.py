"""Losses of detectors against formulas in torch, with assignments by scipy and by loops."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment

import onnxtrain
from onnxtrain import losses as L
from onnxtrain.errors import LabelError, ShapeError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.losses.detection import hungarian
from onnxtrain.lowering.placement import nodes_off_gpu
from onnxtrain.training import CocoMAP
from tests.losses.compare import compare, loss_model, run, session_of
from tests.losses.small import FLOAT, model_of, weight
from tests.losses.test_losses import box_loss, sigmoid_focal

TARGETS = ["cpu", "cuda", "wasm", "webgpu"]
rng = np.random.default_rng(9)


# -- matching ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def matcher():
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g")
    op = OpBuilder(graph)
    cost = op.input("cost", ir.DataType.FLOAT, ["n", "m", "q"])
    given = op.input("given", ir.DataType.BOOL, ["n", "m"])
    y = op.Identity(hungarian(op, cost, given))
    y.name = "owner"
    graph.outputs.append(y)
    session = session_of(ir.to_proto(ir.Model(graph, ir_version=10)))
    return lambda cost, given: session.run(None, {"cost": cost, "given": given})[0]


def test_matching_is_the_cheapest(matcher) -> None:
    for trial in range(40):
        n, m = rng.integers(1, 5), rng.integers(1, 12)
        shape = (n, m, m + rng.integers(0, 6))
        cost = rng.integers(0, 4, shape) if trial % 2 else rng.standard_normal(shape)
        cost, given = cost.astype(np.float32), rng.uniform(size=(n, m)) < 0.7
        for owner, c, real in zip(matcher(cost, given), cost, given, strict=True):
            columns, rows = np.flatnonzero(owner >= 0), np.flatnonzero(real)
            assert sorted(owner[columns].tolist()) == rows.tolist()
            best = c[rows][linear_sum_assignment(c[rows])].sum()
            np.testing.assert_allclose(
                c[owner[columns].astype(int), columns].sum(), best, atol=1e-4
            )


def test_matching_ends_with_too_few_columns_and_bad_costs(matcher) -> None:
    cost = np.array([[[1.0, 2.0], [0.5, 9.0], [0.0, 1.0]]], np.float32)
    owner = matcher(cost, np.ones((1, 3), bool))
    assert sorted(owner[0].tolist()) == [0, 1]  # the third box has no column
    for bad in (np.nan, np.inf):
        cost[0, 1] = bad
        assert matcher(cost, np.ones((1, 3), bool)).shape == (1, 2)
    assert matcher(cost, np.zeros((1, 3), bool)).tolist() == [[-1, -1]]


# -- DETR ----------------------------------------------------------------------------------


def detr_case(classes: int = 4):
    """Return halves of logits and boxes of 3 images and 7 queries; labels and boxes."""
    logits = rng.standard_normal((3, 7, classes)).astype(np.float32)
    predicted = rng.uniform(0.2, 0.5, (3, 7, 4)).astype(np.float32) / 2
    labels = np.array([[2, 0, 1, -1], [-1, -1, -1, -1], [1, -1, 1, 2]])
    boxes = rng.uniform(0.2, 0.5, (3, 4, 4)).astype(np.float32)
    return [logits, predicted], [labels, boxes]


def detr(focal: bool, weights=(1.0, 5.0, 2.0)):
    giou = box_loss("giou")

    def oracle(logits, predicted, labels, boxes):
        classes, count = logits.shape[-1], int((labels >= 0).sum())
        one_hot = torch.zeros_like(logits)
        if not focal:
            one_hot[..., -1] = 1
        l1 = apart = 0.0
        for i in range(len(logits)):
            real = labels[i] >= 0
            target, known = boxes[i, real], labels[i, real]
            if focal:
                ends = [
                    sigmoid_focal(logits[i], torch.full_like(logits[i], t), "none") for t in (1, 0)
                ]
                score = (ends[0] - ends[1])[:, known]
            else:
                score = -logits[i].softmax(-1)[:, known]
            l1_cost = torch.cdist(predicted[i], target, p=1)
            pairs = (
                predicted[i][:, None].expand(-1, len(target), 4),
                target[None].expand(7, -1, 4),
            )
            giou_cost = giou(*pairs, "none", "cxcywh") - 1
            cost = weights[0] * score + weights[1] * l1_cost + weights[2] * giou_cost
            queries, chosen = linear_sum_assignment(cost.detach().numpy())
            one_hot[i, queries] = F.one_hot(known[chosen], classes).to(one_hot.dtype)
            l1 = l1 + (predicted[i, queries] - target[chosen]).abs().sum()
            apart = apart + giou(predicted[i, queries], target[chosen], "sum", "cxcywh")
        if focal:
            score = sigmoid_focal(logits, one_hot, "sum") / count
        else:
            no_object = torch.ones(classes, dtype=logits.dtype)
            no_object[-1] = 0.1
            score = F.cross_entropy(logits.flatten(0, 1), one_hot.argmax(-1).flatten(), no_object)
        return weights[0] * score + (weights[1] * l1 + weights[2] * apart) / count

    return oracle


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("focal", [False, True], ids=["cross entropy", "focal"])
def test_detr(focal: bool, target: str) -> None:
    predictions, (labels, boxes) = detr_case()
    if target == "webgpu":
        labels = labels.astype(np.int32)
    loss = L.DETR(focal=focal)
    compare(loss, detr(focal), predictions, [labels, boxes], target=target, dynamic=False)


def test_detr_weights() -> None:
    predictions, targets = detr_case()
    loss = L.DETR(focal=True, class_weight=2.0, l1_weight=1.0, giou_weight=3.0)
    compare(loss, detr(True, (2.0, 1.0, 3.0)), predictions, targets, dynamic=False)


def test_detr_of_images_without_boxes() -> None:
    """Only "no object" is left, and no column of labels is needed."""
    (logits, boxes), _ = detr_case()
    targets = [np.zeros((3, 0), np.int64), np.zeros((3, 0, 4), np.float32)]
    model = loss_model(L.DETR(), [logits, boxes], targets, dynamic=False)
    outputs = run(
        model, dict(zip(("x0", "x1", "t0", "t1"), [logits, boxes, *targets], strict=True))
    )
    expected = F.cross_entropy(torch.tensor(2 * logits).flatten(0, 1), torch.full((21,), 3))
    np.testing.assert_allclose(outputs["loss"], expected, rtol=1e-5)
    assert np.all(outputs["x1_grad"] == 0.0)


# -- YOLO ----------------------------------------------------------------------------------

BINS, SIDE = 5, 32
ANCHORS = 4 * 4 + 2 * 2 + 1


def yolo_case():
    """Return halves of distances and class logits of 2 images with 21 anchors; labels and boxes."""
    distances = rng.standard_normal((2, 4 * BINS, ANCHORS)).astype(np.float32)
    logits = rng.standard_normal((2, 3, ANCHORS)).astype(np.float32)
    labels = np.array([[1, 2, 1, -1], [0, -1, 0, 1]])
    boxes = np.concatenate([rng.uniform(10, 22, (2, 4, 2)), rng.uniform(9, 26, (2, 4, 2))], -1)
    boxes = boxes.astype(np.float32)
    boxes[0, 2] = boxes[0, 0]  # two equal boxes: the first has the anchors
    return [distances, logits], [labels, boxes]


def yolo(topk: int, gains=(7.5, 0.5, 1.5)):
    ciou = box_loss("ciou")

    def oracle(distances, logits, labels, boxes):
        grid = [
            ((x + 0.5) * s, (y + 0.5) * s, s)
            for s in (8, 16, 32)
            for y in range(SIDE // s)
            for x in range(SIDE // s)
        ]
        x, y, stride = torch.tensor(grid, dtype=torch.float64).T
        logp = distances.reshape(2, 4, BINS, -1).log_softmax(2)
        sides = (logp.exp() * torch.arange(BINS)[:, None]).sum(2) * stride
        low, high = torch.stack([x, y]) - sides[:, :2], torch.stack([x, y]) + sides[:, 2:]
        predicted = torch.cat([low, high], 1).transpose(1, 2)  # [N, A, 4]
        half = boxes[..., 2:] / 2
        actual = torch.cat([boxes[..., :2] - half, boxes[..., :2] + half], -1)
        target = torch.zeros_like(logits)
        terms = []
        for i in range(2):
            fit, measure = np.zeros((4, ANCHORS)), np.zeros((4, ANCHORS))
            taken = np.zeros((4, ANCHORS), bool)
            for j in range(4):
                if labels[i, j] < 0:
                    continue
                left, top, right, bottom = actual[i, j].tolist()
                for a in range(ANCHORS):
                    if left < x[a] < right and top < y[a] < bottom:
                        alike = 1 - ciou(actual[i, j], predicted[i, a], "none").item()
                        fit[j, a] = max(alike, 0.0)
                p = logits[i, labels[i, j]].sigmoid().detach().numpy()
                measure[j] = p**0.5 * fit[j] ** 6
                best = np.argsort(-measure[j], kind="stable")[:topk]
                taken[j, best[measure[j, best] > 0]] = True
            for a in range(ANCHORS):
                if taken[:, a].any():
                    taken[:, a] = np.arange(4) == np.where(taken[:, a], fit[:, a], -1).argmax()
            for j in range(4):
                for a in np.flatnonzero(taken[j]):
                    amount = measure[j, a] * fit[j, taken[j]].max() / measure[j, taken[j]].max()
                    target[i, labels[i, j], a] = amount
                    apart = ciou(predicted[i, a], actual[i, j], "none")
                    edges = torch.stack([x[a], y[a], -x[a], -y[a]]) - actual[i, j] * torch.tensor(
                        [1, 1, -1, -1]
                    )
                    edges = (edges / stride[a]).clamp(0, BINS - 1.01)
                    below = edges.long()
                    side = torch.arange(4)
                    near, far = logp[i, side, below, a], logp[i, side, below + 1, a]
                    share = edges - below
                    dfl = -((1 - share) * near + share * far).mean()
                    terms.append(amount * (gains[0] * apart + gains[2] * dfl))
        bce = F.binary_cross_entropy_with_logits(logits, target, reduction="sum")
        return (sum(terms) + gains[1] * bce) / target.sum().clamp_min(1)

    return oracle


@pytest.mark.parametrize("target", TARGETS)
def test_yolo(target: str) -> None:
    predictions, (labels, boxes) = yolo_case()
    if target == "webgpu":
        labels = labels.astype(np.int32)
    for topk in (3, 10):
        compare(
            *(L.YOLO(topk=topk), yolo(topk), predictions, [labels, boxes]),
            **{"target": target, "dynamic": False},
        )


def test_yolo_without_boxes() -> None:
    (distances, logits), _ = yolo_case()
    targets = [np.full((2, 1), -1), np.zeros((2, 1, 4), np.float32)]
    model = loss_model(L.YOLO(image_size=32), [distances, logits], targets, dynamic=False)
    feeds = dict(zip(("x0", "x1", "t0", "t1"), [distances, logits, *targets], strict=True))
    outputs = run(model, feeds)
    expected = 0.5 * F.softplus(torch.tensor(2 * logits)).sum()
    np.testing.assert_allclose(outputs["loss"], expected, rtol=1e-5)
    assert np.all(outputs["x0_grad"] == 0.0)


@pytest.mark.parametrize("kind", [L.DETR, L.YOLO])
def test_only_control_flow_leaves_the_gpu(kind: type[L.Loss]) -> None:
    predictions, targets = detr_case() if kind is L.DETR else yolo_case()
    model = loss_model(kind(), predictions, targets, target="cuda", dynamic=False)
    assert {n.op_type for n in nodes_off_gpu(model, "cuda")} <= {"Loop"}


def test_refusals() -> None:
    predictions, targets = yolo_case()

    def refused(loss: L.Loss, match: str, predictions=predictions, dynamic=False) -> None:
        with pytest.raises(ShapeError, match=match):
            loss_model(loss, predictions, targets, dynamic=dynamic)

    refused(L.YOLO(image_size=(64, 32)), r"has 21 anchors; an image of 64 x 32 .* has 42\nhint: ")
    refused(L.YOLO(), r"YOLO does not accept .*\nhint: it expects .* static", dynamic=True)
    three = [x[..., :3] for x in detr_case()[0]]
    refused(L.DETR(), r"DETR does not accept .*\[3,7,3\] as boxes", three)
    refused(L.DETR(), r"the number of classes .* is not known", detr_case()[0], dynamic=True)


# -- training ------------------------------------------------------------------------------


def detector() -> onnxtrain.Trainer:
    """Return a net of image [batch, 12] -> logits [batch, 3, 3] and boxes [batch, 3, 4]."""

    def build(op: OpBuilder) -> dict[str, ir.Value]:
        x = op.input("x", FLOAT, ["batch", 12])
        draw = np.random.default_rng(2).standard_normal
        hidden = op.Relu(op.MatMul(x, weight(op, "w", draw((12, 48)).astype(np.float32) / 3)))
        both = op.MatMul(hidden, weight(op, "v", draw((48, 21)).astype(np.float32) / 7))
        both = op.reshape(both, [-1, 3, 7])
        logits, boxes = op.Split(both, [3, 4], axis=2, _outputs=2)
        return {"logits": logits, "pred_boxes": op.Sigmoid(boxes)}

    artifacts = onnxtrain.build(model_of(build), loss="detr", optimizer="adamw:lr=0.02")
    return onnxtrain.Trainer(artifacts)


def scenes(n: int) -> dict[str, np.ndarray]:
    """Return images that contain the numbers of their one or two boxes."""
    draw = np.random.default_rng(3)
    boxes = draw.uniform(0.2, 0.6, (n, 2, 4)).astype(np.float32)
    labels = draw.integers(0, 2, (n, 2))
    labels[::3, 1] = -1
    rows = np.concatenate([boxes, (labels == 0)[..., None], (labels == 1)[..., None]], -1)
    rows[labels < 0] = 0
    return {"x": rows.reshape(n, 12).astype(np.float32), "labels": labels, "boxes": boxes}


def test_a_detector_learns_to_find_boxes() -> None:
    trainer, data = detector(), scenes(96)
    metrics = {"map": CocoMAP("detr", thresholds=[0.5])}
    before = trainer.evaluate(data, metrics=metrics).metrics["map"]
    trainer.fit(data, epochs=40, batch_size=32, progress=False)
    after = trainer.evaluate(data, metrics=metrics).metrics["map"]
    assert before < 0.2
    assert after > 0.6


def test_labels_that_are_not_classes_are_named() -> None:
    data = scenes(4)
    data["labels"][2, 0] = 2  # the third class of the model is "no object"
    with pytest.raises(LabelError, match=r"'labels' has 2 in row 2; the model has 2 classes"):
        detector().fit(data, epochs=1, batch_size=4, shuffle=False, progress=False)
