"""Every loss, with every reduction and option, against torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from onnxtrain import losses as L
from tests.losses.compare import compare, loss_model, run

rng = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def probability(*shape: int) -> np.ndarray:
    return rng.uniform(0.05, 0.95, shape).astype(np.float32) / 2


def signs(*shape: int) -> np.ndarray:
    return rng.choice([-1.0, 1.0], shape).astype(np.float32)


def distribution(*shape: int, axis: int = 1) -> np.ndarray:
    x = rng.uniform(0.1, 1.0, shape).astype(np.float32)
    return x / x.sum(axis, keepdims=True)


X, T = normal(4, 3), normal(4, 3)
WEIGHT = [0.5, 2.0, 1.5]

# name: loss class, options, torch's function, predictions, targets
Case = tuple[type[L.Loss], dict, Callable, Sequence[np.ndarray], Sequence[np.ndarray]]


def triplet(**options) -> Case:
    return (
        L.TripletMargin,
        options,
        F.triplet_margin_loss,
        [normal(4, 3), normal(4, 3), normal(4, 3)],
        [],
    )


def cosine(shape: tuple[int, ...], **options) -> Case:
    return (
        L.CosineEmbedding,
        options,
        F.cosine_embedding_loss,
        [normal(*shape), normal(*shape)],
        [signs(*shape[:-1])],
    )


def hinge(x, t, reduction="mean", margin=1.0):
    each = (margin - t * x).clamp_min(0)
    return each if reduction == "none" else getattr(each, reduction)()


LABELS = rng.integers(0, 3, 4)

CASES: dict[str, Case] = {
    "mse": (L.MSE, {}, F.mse_loss, [X], [T]),
    "mse-scalar": (L.MSE, {}, F.mse_loss, [normal()], [normal()]),
    "l1": (L.L1, {}, F.l1_loss, [X], [T]),
    "huber": (L.Huber, {}, F.huber_loss, [X], [T]),
    "huber-delta": (L.Huber, {"delta": 0.4}, F.huber_loss, [X], [T]),
    "smooth-l1": (L.SmoothL1, {}, F.smooth_l1_loss, [X], [T]),
    "smooth-l1-beta": (L.SmoothL1, {"beta": 0.3}, F.smooth_l1_loss, [X], [T]),
    "smooth-l1-beta-0": (L.SmoothL1, {"beta": 0.0}, F.smooth_l1_loss, [X], [T]),
    "bce": (L.BCE, {}, F.binary_cross_entropy, [probability(4, 3)], [probability(4, 3)]),
    "bce-weight": (
        L.BCE,
        {"weight": WEIGHT},
        F.binary_cross_entropy,
        [probability(4, 3)],
        [probability(4, 3)],
    ),
    "bce-logits": (
        L.BCEWithLogits,
        {},
        F.binary_cross_entropy_with_logits,
        [X],
        [probability(4, 3)],
    ),
    "bce-logits-zero": (
        L.BCEWithLogits,
        {},
        F.binary_cross_entropy_with_logits,
        [np.zeros((2, 3), np.float32)],
        [probability(2, 3)],
    ),
    "bce-logits-weights": (
        L.BCEWithLogits,
        {"weight": [[1.0], [2.0], [0.5], [0.1]], "pos_weight": WEIGHT},
        F.binary_cross_entropy_with_logits,
        [X],
        [probability(4, 3)],
    ),
    "kl-div": (L.KLDiv, {}, F.kl_div, [X], [distribution(4, 3)]),
    "kl-div-zeros": (L.KLDiv, {}, F.kl_div, [X], [np.eye(4, 3, dtype=np.float32)]),
    "kl-div-log": (L.KLDiv, {"log_target": True}, F.kl_div, [X], [np.log(distribution(4, 3))]),
    "cosine": cosine((5, 3)),
    "cosine-margin": cosine((5, 3), margin=0.3),
    "cosine-row": cosine((3,)),
    "hinge": (L.Hinge, {}, hinge, [X], [signs(4, 3)]),
    "hinge-margin": (L.Hinge, {"margin": 0.3}, hinge, [X], [signs(4, 3)]),
    "hinge-embedding": (L.HingeEmbedding, {}, F.hinge_embedding_loss, [X], [signs(4, 3)]),
    "hinge-embedding-margin": (
        L.HingeEmbedding,
        {"margin": 0.2},
        F.hinge_embedding_loss,
        [X],
        [signs(4, 3)],
    ),
    "multi-margin": (L.MultiMargin, {}, F.multi_margin_loss, [X], [LABELS]),
    "multi-margin-row": (L.MultiMargin, {}, F.multi_margin_loss, [X[0]], [LABELS[:1].reshape(())]),
    "multi-margin-weights": (
        L.MultiMargin,
        {"p": 2, "margin": 0.7, "weight": WEIGHT},
        F.multi_margin_loss,
        [X],
        [LABELS],
    ),
    "triplet": triplet(),
    "triplet-1": triplet(p=1.0, margin=0.4),
    "triplet-3-swap": triplet(p=3.0, swap=True),
    "triplet-inf": triplet(p=float("inf"), eps=1e-3),
}


def torch_options(options: dict) -> dict:
    """Return the options with arrays as tensors."""
    return {
        k: torch.tensor(v, dtype=torch.float64) if k.endswith("weight") else v
        for k, v in options.items()
    }


@pytest.mark.parametrize("target", ["cpu", "webgpu"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient(name: str, reduction: str, target: str) -> None:
    kind, options, function, predictions, targets = CASES[name]
    loss = kind(reduction=reduction, **options)
    options = torch_options(options)

    def oracle(*arguments):
        if kind is L.KLDiv and reduction == "mean":  # torch warns that it will change this mean
            return function(*arguments, reduction="sum", **options) / arguments[0].numel()
        return function(*arguments, reduction=reduction, **options)

    targets = [
        t.astype(np.int32) if t.dtype == np.int64 and target == "webgpu" else t for t in targets
    ]
    compare(loss, oracle, predictions, targets, target=target)


@pytest.mark.parametrize("name", ["mse", "bce-logits-weights", "multi-margin", "triplet", "cosine"])
def test_static_shapes_give_the_same(name: str) -> None:
    kind, options, function, predictions, targets = CASES[name]
    options = torch_options(options)
    compare(
        kind(**CASES[name][1]),
        lambda *a: function(*a, **options),
        predictions,
        targets,
        dynamic=False,
    )


def test_kl_div_batchmean() -> None:
    x, t = normal(4, 3, 2), distribution(4, 3, 2)
    compare(
        L.KLDiv(reduction="batchmean"),
        lambda a, b: F.kl_div(a, b, reduction="batchmean"),
        [x],
        [t],
    )


@pytest.mark.parametrize("target", ["cpu", "webgpu", "portable", "wasm", "cuda"])
def test_bce_with_logits_is_exact_for_any_logit(target: str) -> None:
    x = np.array([[1e4, -1e4, 60.0, -60.0, 0.0, 5.0]], np.float32)
    for t in (np.zeros_like(x), np.ones_like(x)):
        compare(
            L.BCEWithLogits(reduction="none"),
            lambda a, b: F.binary_cross_entropy_with_logits(a, b, reduction="none"),
            [x],
            [t],
            target=target,
            tol=1e-6,
        )


def test_bce_is_finite_at_the_ends() -> None:
    """Values as torch; the gradient, which torch puts at 1e12 there, is 0."""
    x = np.array([[0.0, 0.5, 0.0, 0.5]], np.float32)  # the model doubles it: 0, 1, 0, 1
    t = np.array([[0.0, 1.0, 1.0, 0.0]], np.float32)
    outputs = run(loss_model(L.BCE(reduction="none"), [x], [t]), {"x0": x, "t0": t})
    assert outputs["each"].tolist() == [[0.0, 0.0, 100.0, 100.0]]
    assert np.all(outputs["x0_grad"][0, 2:] == 0.0)
    assert np.all(np.isfinite(outputs["x0_grad"]))


@pytest.mark.parametrize("loss", [L.Huber(), L.SmoothL1(beta=0.5), L.L1()], ids=str)
def test_large_errors_stay_finite(loss: L.Loss) -> None:
    x, t = np.array([[1e30, -1e30]], np.float32), np.zeros((1, 2), np.float32)
    outputs = run(loss_model(loss, [x], [t]), {"x0": x, "t0": t})
    assert np.isfinite(outputs["loss"])
    np.testing.assert_allclose(outputs["x0_grad"], [[1.0, -1.0]], rtol=1e-6)


def test_triplet_of_equal_vectors_has_a_finite_gradient() -> None:
    x = normal(2, 3)
    outputs = run(
        loss_model(L.TripletMargin(eps=0.0), [x, x, x], []), dict.fromkeys(("x0", "x1", "x2"), x)
    )
    assert outputs["loss"] == 1.0
    assert np.all(outputs["x0_grad"] == 0.0)


# Operators that fail on WebGPU, run on the CPU there, or are expanded to a form that overflows.
AVOIDED = {
    "And",
    "ConstantOfShape",
    "Dropout",
    "LogSoftmax",
    "Max",
    "Min",
    "NegativeLogLikelihoodLoss",
    "OneHot",
    "Sign",
    "SoftmaxCrossEntropyLoss",
    "Softplus",
}


@pytest.mark.parametrize("name", [*CASES, "cross_entropy", "nll", "probabilities"])
def test_webgpu_forms_avoid_slow_operators(name: str) -> None:
    labels = LABELS.astype(np.int32)
    loss, predictions, targets = {
        "cross_entropy": (L.CrossEntropy(weight=WEIGHT, label_smoothing=0.1), [X], [labels]),
        "nll": (L.NLL(weight=WEIGHT), [X], [labels]),
        "probabilities": (L.CrossEntropy(probabilities=True), [X], [T]),
    }.get(name) or (CASES[name][0](**CASES[name][1]), CASES[name][3], CASES[name][4])
    targets = [t.astype(np.int32) if t.dtype == np.int64 else t for t in targets]
    model = loss_model(loss, predictions, targets, target="webgpu", dynamic=False)
    assert {n.op_type for n in model.graph.node} & AVOIDED == set()
