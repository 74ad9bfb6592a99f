"""Metrics against torch, beside different losses."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F

from onnxtrain import losses as L
from onnxtrain.autodiff.gradients import load_normalized
from onnxtrain.errors import PrepareError, ShapeError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.losses import LossTerm, attach_loss
from tests.losses.small import FLOAT, INT64, W1, W2, X, classifier, model_of, run, two_heads

rng = np.random.default_rng(2)
LABELS = rng.integers(0, 3, 6)
LOGITS = torch.tensor(X @ W1)


def sequence(layout: list) -> ir.Model:
    return load_normalized(model_of(lambda op: {"y": op.Tanh(op.input("x", FLOAT, layout))})).model


@pytest.mark.parametrize("target", ["cpu", "webgpu"])
def test_all_of_them_beside_cross_entropy(target: str) -> None:
    attached = attach_loss(
        classifier(),
        L.CrossEntropy(weight=[1.0, 2.0, 3.0], label_smoothing=0.1),
        metrics=["accuracy", "top_2", "perplexity"],
        target=target,
    )
    assert [y.name for y in attached.model.graph.outputs] == [
        "loss",
        "accuracy",
        "top_2",
        "perplexity",
        "logits",
    ]
    assert list(attached.metrics) == ["accuracy", "top_2", "perplexity"]
    labels = LABELS.astype(np.int32) if target == "webgpu" else LABELS
    outputs = run(attached, x=X, labels=labels)
    best = LOGITS.argmax(1).numpy()
    two = LOGITS.topk(2, 1).indices.numpy()
    assert outputs["accuracy"] == pytest.approx(np.mean(best == LABELS))
    assert outputs["top_2"] == pytest.approx(np.mean(np.any(two == LABELS[:, None], 1)))
    expected = F.cross_entropy(LOGITS, torch.tensor(LABELS)).exp()
    assert outputs["perplexity"] == pytest.approx(expected.item(), rel=1e-5)
    for name in attached.metrics:
        assert outputs[name].shape == ()
        assert outputs[name].dtype == np.float32


def test_language_model_with_padding() -> None:
    attached = attach_loss(
        sequence(["b", "s", 5]),
        L.CrossEntropy(axis=-1, ignore_index=0),
        metrics=["accuracy", "perplexity", L.TopK(2)],
    )
    x = rng.standard_normal((3, 4, 5)).astype(np.float32)
    labels = rng.integers(0, 5, (3, 4))
    labels[0] = 0
    outputs = run(attached, x=x, labels=labels)
    y, t = torch.tanh(torch.tensor(x)).reshape(-1, 5), torch.tensor(labels).reshape(-1)
    counts = t != 0
    assert outputs["accuracy"] == pytest.approx((y.argmax(1) == t)[counts].float().mean().item())
    expected = F.cross_entropy(y, t, ignore_index=0).exp().item()
    assert outputs["perplexity"] == pytest.approx(expected, rel=1e-5)
    hits = (y.topk(2, 1).indices == t[:, None]).any(1)
    assert outputs["top_2"] == pytest.approx(hits[counts].float().mean().item())


def test_images() -> None:
    attached = attach_loss(sequence(["b", 4, "h", "w"]), "cross_entropy", metrics=["accuracy"])
    x, labels = rng.standard_normal((2, 4, 3, 5)).astype(np.float32), rng.integers(0, 4, (2, 3, 5))
    outputs = run(attached, x=x, labels=labels)
    assert outputs["accuracy"] == pytest.approx(np.mean(x.argmax(1) == labels))


@pytest.mark.parametrize(("loss", "threshold"), [("bce_with_logits", 0.0), ("bce", 0.5)])
def test_accuracy_beside_binary_losses(loss: str, threshold: float) -> None:
    attached = attach_loss(sequence(["b", 3]), loss, metrics=["accuracy"])
    x = rng.uniform(0.1, 2.0, (7, 3)).astype(np.float32) * (1 if loss == "bce" else -1)
    x[:3] *= 1 if loss == "bce" else -1
    t = rng.integers(0, 2, (7, 3)).astype(np.float32)
    outputs = run(attached, x=x, target=t)
    assert outputs["accuracy"] == pytest.approx(np.mean((np.tanh(x) > threshold) == (t > 0.5)))


def test_accuracy_with_probabilities_as_target() -> None:
    loss = L.CrossEntropy(probabilities=True)
    attached = attach_loss(classifier(), loss, metrics=["accuracy"])
    t = rng.uniform(0, 1, (6, 3)).astype(np.float32)
    outputs = run(attached, x=X, target=t)
    assert outputs["accuracy"] == pytest.approx(np.mean((X @ W1).argmax(1) == t.argmax(1)))


def test_perplexity_beside_nll() -> None:
    attached = attach_loss(classifier(), "nll", metrics=["perplexity"])
    outputs = run(attached, x=X * 0.1, labels=LABELS)
    expected = F.nll_loss(torch.tensor(X * 0.1 @ W1), torch.tensor(LABELS)).exp().item()
    assert outputs["perplexity"] == pytest.approx(expected, rel=1e-5)


def test_mae_beside_mse() -> None:
    attached = attach_loss(classifier(), "mse", metrics=["mae", L.MAE(name="again")])
    t = rng.standard_normal((6, 3)).astype(np.float32)
    outputs = run(attached, x=X, target=t)
    assert (
        outputs["mae"] == outputs["again"] == pytest.approx(np.mean(np.abs(X @ W1 - t)), rel=1e-5)
    )


def test_nothing_counts() -> None:
    attached = attach_loss(classifier(), "cross_entropy", metrics=["accuracy"])
    assert np.isnan(run(attached, x=X, labels=np.full(6, -100))["accuracy"])


def test_several_losses_need_a_word() -> None:
    terms = [LossTerm("cross_entropy", "a"), LossTerm("cross_entropy", "b")]
    with pytest.raises(
        PrepareError, match=r"metric 'accuracy': the losses read several outputs: a, b"
    ):
        attach_loss(two_heads(), terms, metrics=["accuracy"])
    metrics = [L.Accuracy(output="a", name="a_right"), L.Accuracy(output="b", name="b_right")]
    attached = attach_loss(two_heads(), terms, metrics=metrics)
    outputs = run(attached, x=X, labels_1=LABELS, labels_2=LABELS % 2)
    assert outputs["a_right"] == pytest.approx(np.mean((X @ W1).argmax(1) == LABELS))
    assert outputs["b_right"] == pytest.approx(np.mean((X @ W2).argmax(1) == LABELS % 2))


def test_beside_a_function() -> None:
    def loss(op: OpBuilder, logits: ir.Value) -> ir.Value:
        labels = op.input("y", INT64, ["batch"])
        return L.CrossEntropy().build(op, logits, labels)

    def largest(op: OpBuilder, logits: ir.Value) -> ir.Value:
        return op.ReduceMax(logits, keepdims=0)

    attached = attach_loss(classifier(), loss, metrics=[L.Accuracy(target="y"), largest])
    outputs = run(attached, x=X, y=LABELS)
    assert outputs["accuracy"] == pytest.approx(np.mean((X @ W1).argmax(1) == LABELS))
    assert outputs["largest"] == pytest.approx(np.max(X @ W1))
    with pytest.raises(PrepareError, match="metric 'accuracy' has no target to compare with"):
        attach_loss(classifier(), loss, metrics=["accuracy"])


def test_an_output_of_the_model() -> None:
    def build(op: OpBuilder) -> dict[str, ir.Value]:
        y = op.Tanh(op.input("x", FLOAT, ["batch", 4]))
        return {"y": y, "size": op.ReduceMean(y, keepdims=0)}

    attached = attach_loss(
        load_normalized(model_of(build)).model, LossTerm("mse", "y"), metrics=["size"]
    )
    assert [y.name for y in attached.model.graph.outputs] == ["loss", "size", "y"]


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("acuracy", "unknown metric: 'acuracy'\nhint: did you mean accuracy"),
        ("top_9", "top_9 of 3 classes: logits"),
        (L.Accuracy(output="hidden"), "unknown output: 'hidden'"),
        (L.Accuracy(target="label"), "unknown input: 'label'\nhint: use one of x, labels"),
        (7, "not a metric: int"),
        (L.Accuracy(name="loss"), "two metrics are named 'loss'"),
    ],
    ids=str,
)
def test_refusals(metric: L.MetricLike, message: str) -> None:
    with pytest.raises(PrepareError, match=message):
        attach_loss(classifier(), "cross_entropy", metrics=[metric])


def test_more_refusals() -> None:
    with pytest.raises(PrepareError, match="top_k: k must be at least 1: 0"):
        L.TopK(0)
    with pytest.raises(PrepareError, match="two metrics are named 'mae'"):
        attach_loss(classifier(), "mse", metrics=["mae", "mae"])

    def per_element(op: OpBuilder, logits: ir.Value) -> ir.Value:
        return op.Tanh(logits)

    with pytest.raises(ShapeError, match="the metric 'per_element' is not a scalar"):
        attach_loss(classifier(), "mse", metrics=[per_element])
    with pytest.raises(
        PrepareError, match="metric 'mae' needs one target, but the loss has positive"
    ):
        attach_loss(classifier(), "triplet_margin", metrics=["mae"])


def test_a_metric_that_could_look_at_two_outputs() -> None:
    def loss(op: OpBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
        op.input("y", INT64, ["batch"])
        return op.ReduceMean(op.Mul(op.ReduceSum(a, [1]), b), keepdims=0)

    with pytest.raises(
        PrepareError, match=r"metric 'accuracy': the model has several outputs: a, b"
    ):
        attach_loss(two_heads(), loss, metrics=[L.Accuracy(target="y")])
