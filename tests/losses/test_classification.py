"""Cross entropy and negative log-likelihood against torch, in every layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from onnxtrain import losses as L
from onnxtrain.errors import PrepareError, ShapeError
from tests.losses.compare import compare, loss_model, run, session_of

rng = np.random.default_rng(11)
TARGETS = ["cpu", "webgpu"]
REDUCTIONS = ["mean", "sum", "none"]
WEIGHT = [0.5, 2.0, 1.5, 0.7, 1.0]
LAYOUTS = {
    "rows": ((6, 5), 1),
    "row": ((5,), 1),
    "image": ((2, 5, 3, 2), 1),
    "language": ((2, 3, 5), -1),
    "last-of-two": ((6, 5), -1),
    "first": ((5, 4), 0),
    "middle": ((2, 3, 5, 2), 2),
}
OPTIONS = {
    "plain": {},
    "no-ignore": {"ignore_index": None},
    "ignore": {"ignore_index": 2},
    "ignore-negative": {"ignore_index": -1},
    "weight": {"weight": WEIGHT},
    "smooth": {"label_smoothing": 0.2},
    "all": {"weight": WEIGHT, "ignore_index": 3, "label_smoothing": 0.1},
}


def draw(shape: tuple[int, ...], axis: int, target: str, ignore: int | None = None):
    axis = 0 if len(shape) == 1 else axis % len(shape)
    x = rng.standard_normal(shape).astype(np.float32)
    labels = rng.integers(0, shape[axis], shape[:axis] + shape[axis + 1 :])
    if ignore is not None and ignore < 0 and labels.ndim:
        labels.reshape(-1)[1] = ignore
    return x, np.asarray(labels, np.int32 if target == "webgpu" else np.int64)


def torch_loss(function, axis: int, reduction: str, options: dict):
    options = {k: v for k, v in options.items() if v is not None}
    if "weight" in options:
        options["weight"] = torch.tensor(options["weight"], dtype=torch.float64)

    def oracle(x, labels):
        if x.ndim > 1:
            x = x.movedim(axis, 1)
            if labels.is_floating_point():
                labels = labels.movedim(axis, 1)
        return function(x, labels, reduction=reduction, **options)

    return oracle


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layout", ["rows", "image", "language"])
def test_cross_entropy(layout: str, options: str, reduction: str, target: str) -> None:
    shape, axis = LAYOUTS[layout]
    settings = OPTIONS[options]
    x, labels = draw(shape, axis, target, settings.get("ignore_index"))
    loss = L.CrossEntropy(reduction=reduction, axis=axis, **settings)
    oracle = torch_loss(F.cross_entropy, axis, reduction, settings)
    compare(loss, oracle, [x], [labels], target=target, dynamic="weight" not in settings)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", ["plain", "ignore-negative", "weight"])
@pytest.mark.parametrize("layout", ["rows", "row", "image", "language"])
def test_nll(layout: str, options: str, reduction: str, target: str) -> None:
    shape, axis = LAYOUTS[layout]
    settings = OPTIONS[options]
    x, labels = draw(shape, axis, target, settings.get("ignore_index"))
    loss = L.NLL(reduction=reduction, axis=axis, **settings)
    oracle = torch_loss(F.nll_loss, axis, reduction, settings)
    compare(loss, oracle, [x], [labels], target=target)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str, dynamic: bool, reduction: str) -> None:
    shape, axis = LAYOUTS[layout]
    x, labels = draw(shape, axis, "cpu")
    oracle = torch_loss(F.cross_entropy, axis, reduction, {})
    compare(L.CrossEntropy(axis=axis, reduction=reduction), oracle, [x], [labels], dynamic=dynamic)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "settings", [{}, {"weight": WEIGHT, "label_smoothing": 0.3}], ids=["plain", "all"]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_probabilities(layout: str, settings: dict, reduction: str, target: str) -> None:
    shape, axis = LAYOUTS[layout]
    x, _ = draw(shape, axis, target)
    t = rng.uniform(0, 1, shape).astype(np.float32)
    loss = L.CrossEntropy(axis=axis, reduction=reduction, probabilities=True, **settings)
    oracle = torch_loss(F.cross_entropy, axis, reduction, settings)
    compare(loss, oracle, [x], [t], target=target)


def test_int32_labels_on_cpu() -> None:
    x, labels = draw((6, 5), 1, "cpu")
    for settings in OPTIONS.values():
        oracle = torch_loss(F.cross_entropy, 1, "mean", settings)
        compare(L.CrossEntropy(**settings), oracle, [x], [labels.astype(np.int32)])


@pytest.mark.parametrize("target", [*TARGETS, "portable", "wasm", "cuda"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_extreme_logits(smoothing: float, target: str) -> None:
    x = np.array(
        [[1e4, -1e4, 0.0], [-1e4, 1e4, 1e4], [88.0, -104.0, 3e3], [0.0, 0.0, 0.0]], np.float32
    )
    for labels in ([0, 1, 2, 0], [1, 0, 0, 2]):
        array = np.array(labels, np.int32 if target == "webgpu" else np.int64)
        settings = {"label_smoothing": smoothing}
        compare(
            L.CrossEntropy(reduction="none", **settings),
            torch_loss(F.cross_entropy, 1, "none", settings),
            [x],
            [array],
            target=target,
        )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "loss", [L.CrossEntropy(), L.CrossEntropy(label_smoothing=0.1), L.NLL()], ids=str
)
def test_all_labels_ignored(loss: L.Loss, target: str) -> None:
    """As torch: the mean of nothing is NaN, the sum 0; the gradient is 0."""
    x, _ = draw((3, 4), 1, target)
    labels = np.full(3, -100, np.int32 if target == "webgpu" else np.int64)
    feeds = {"x0": x, "t0": labels}
    outputs = run(loss_model(loss, [x], [labels], target=target), feeds)
    assert np.isnan(outputs["loss"])
    assert np.all(outputs["x0_grad"] == 0.0)
    expected = torch.tensor(x, requires_grad=True)
    F.cross_entropy(expected, torch.tensor(labels).long()).backward()
    assert torch.all(expected.grad == 0.0)
    total = type(loss)(reduction="sum")
    outputs = run(loss_model(total, [x], [labels], target=target), feeds)
    assert outputs["loss"] == 0.0
    assert np.all(outputs["x0_grad"] == 0.0)


def test_one_session_takes_any_batch() -> None:
    x, labels = draw((4, 3, 5), -1, "cpu")
    session = session_of(loss_model(L.CrossEntropy(axis=-1), [x], [labels]))
    for batch, length in ((4, 3), (1, 7), (9, 1)):
        x, labels = draw((batch, length, 5), -1, "cpu")
        loss, _, grad = session.run(None, {"x0": x, "t0": labels})
        expected = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        value = F.cross_entropy((2 * expected).movedim(-1, 1), torch.tensor(labels))
        value.backward()
        np.testing.assert_allclose(loss, value.item(), rtol=1e-5)
        np.testing.assert_allclose(grad, expected.grad.numpy(), atol=1e-6)


@pytest.mark.parametrize("label", [-1, 5, -5])
@pytest.mark.parametrize(
    "loss", [L.CrossEntropy(), L.CrossEntropy(ignore_index=None), L.NLL(), L.MultiMargin()], ids=str
)
def test_labels_out_of_range_are_refused(loss: L.Loss, label: int) -> None:
    x, labels = draw((3, 5), 1, "cpu")
    labels[1] = label
    session = session_of(loss_model(loss, [x], [labels]))
    with pytest.raises(Exception, match=r"(?i)out of range|indices element out of data bounds"):
        session.run(None, {"x0": x, "t0": labels})


@pytest.mark.parametrize(
    ("loss", "shapes", "error", "message"),
    [
        (
            L.CrossEntropy(axis=2),
            [(3, 5), (3,)],
            ShapeError,
            r"CrossEntropy\(axis=2\) does not accept",
        ),
        (L.CrossEntropy(), [(), ()], ShapeError, r"CrossEntropy\(axis=1\) does not accept"),
        (
            L.CrossEntropy(weight=[1.0, 2.0]),
            [(3, 5), (3,)],
            ShapeError,
            r"\(2,\) weights for 5 classes",
        ),
        (
            L.MultiMargin(),
            [(3, 5, 2), (3, 2)],
            ShapeError,
            "MultiMargin does not accept Mul: FLOAT",
        ),
        (L.TripletMargin(), [()], ShapeError, "TripletMargin does not accept"),
        (L.CTC(), [(3, 5)], ShapeError, "CTC does not accept"),
    ],
    ids=str,
)
def test_wrong_layouts(loss: L.Loss, shapes: list, error: type, message: str) -> None:
    x, *targets = (np.zeros(s, np.float32) for s in shapes)
    targets = [t.astype(np.int64) for t in targets]
    with pytest.raises(error, match=message):
        loss_model(loss, [x], targets, dynamic=False)


def test_wrong_options() -> None:
    with pytest.raises(PrepareError, match=r"label_smoothing must be in \[0, 1\]: 2.0"):
        L.CrossEntropy(label_smoothing=2.0)
    with pytest.raises(PrepareError, match="CrossEntropy: unknown reduction: 'average'"):
        L.CrossEntropy(reduction="average")
    with pytest.raises(PrepareError, match="MultiMargin: p must be 1 or 2: 3"):
        L.MultiMargin(p=3)
    with pytest.raises(PrepareError, match="Huber: delta must be positive: 0"):
        L.Huber(delta=0)
    with pytest.raises(PrepareError, match="SmoothL1: beta must not be negative: -1"):
        L.SmoothL1(beta=-1)
    with pytest.raises(PrepareError, match="TripletMargin: p must be positive: 0"):
        L.TripletMargin(p=0)
