"""Losses and metrics written with Python operators, and losses of torch."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onnxtrain
from onnxtrain import losses as L
from onnxtrain.autodiff.rule_registry import RULES, Rule
from onnxtrain.errors import LoadError, OnnxTrainError, PrepareError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.torch import from_torch_loss
from onnxtrain.torch.losses import TorchLoss
from tests.losses.small import FLOAT, W1, X
from tests.losses.test_logits import net, trained

T = np.arange(18, dtype=np.float32).reshape(6, 3) / 9
Y = 9 * X @ W1


def identity(op: OpBuilder, z: ir.Value) -> ir.Value:
    return op.Identity(z)


def test_python_operators_emit_nodes() -> None:
    def loss(op: OpBuilder, y: ir.Value) -> ir.Value:
        t = op.input("t", FLOAT, ["batch", 3])
        u = (y - t) ** 2 + 0.5 * abs(-y) / (1 + 2**t) - T[0] * y
        return op.ReduceMean((u @ T[:3]) * 2, keepdims=0)

    def error(op: OpBuilder, y: ir.Value) -> ir.Value:
        return op.ReduceMean(abs(y - 1), keepdims=0)

    result = trained(net(identity), loss, metrics=[error]).evaluate_batch(x=X, t=T)
    u = (Y - T) ** 2 + 0.5 * np.abs(Y) / (1 + 2**T) - T[0] * Y
    np.testing.assert_allclose(result.loss, ((u @ T[:3]) * 2).mean(), rtol=1e-5)
    np.testing.assert_allclose(result.metrics["error"], np.abs(Y - 1).mean(), rtol=1e-5)


def test_each_thread_builds_its_own_graph() -> None:
    barrier, results = threading.Barrier(2), {}

    def build(factor: float) -> None:
        def loss(op: OpBuilder, y: ir.Value) -> ir.Value:
            barrier.wait(60)  # both threads are inside their loss now
            return op.ReduceMean(y * factor + factor, keepdims=0)

        results[factor] = trained(net(identity), loss).evaluate_batch(x=X).loss

    threads = [threading.Thread(target=build, args=(f,)) for f in (2.0, 3.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for factor, loss in results.items():
        np.testing.assert_allclose(loss, (Y * factor + factor).mean(), rtol=1e-5)
    assert len(results) == 2


def test_operators_outside_a_loss_are_an_error() -> None:
    with pytest.raises((TypeError, ValueError), match=r"outside a loss|No magic handler"):
        ir.Value(name="a") * 2


@pytest.mark.parametrize(
    "given",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]), label_smoothing=0.1),
        nn.MultiMarginLoss(margin=0.5),
        nn.NLLLoss(reduction="sum"),
    ],
    ids=repr,
)
def test_from_torch_loss_keeps_the_options(given: nn.Module) -> None:
    labels = np.array([0, 2, 1, 1, 0, 2])
    expected = given(torch.tensor(Y), torch.tensor(labels))
    loss = trained(net(identity), from_torch_loss(given)).evaluate_batch(x=X, labels=labels).loss
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (F.mse_loss, L.MSE()),
        (
            functools.partial(F.cross_entropy, label_smoothing=0.1),
            L.CrossEntropy(label_smoothing=0.1),
        ),
        (nn.BCEWithLogitsLoss(reduction="sum"), L.BCEWithLogits(reduction="sum")),
        (F.binary_cross_entropy, L.BCE()),
        (nn.MultiLabelMarginLoss(), L.MultiLabelMargin()),
        (
            nn.MultiLabelSoftMarginLoss(weight=torch.tensor([1.0, 2.0])),
            L.MultiLabelSoftMargin(weight=[1.0, 2.0]),
        ),
        (nn.PoissonNLLLoss(full=True, reduction="sum"), L.PoissonNLL(full=True, reduction="sum")),
        (nn.GaussianNLLLoss(eps=0.5), L.GaussianNLL(eps=0.5)),
        (
            functools.partial(F.margin_ranking_loss, margin=0.5),
            L.MarginRanking(margin=0.5),
        ),
        (F.soft_margin_loss, L.SoftMargin()),
    ],
    ids=lambda given: getattr(given, "__name__", None) or type(given).__name__,
)
def test_losses_of_torch_become_those_that_equal_them(given: Any, expected: L.Loss) -> None:
    (term,) = L.resolve(given)
    assert term.loss == expected


def focal(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    ce = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - torch.exp(-ce)) ** 2 * ce).mean()


def quantile(y, target, share):  # type: ignore[no-untyped-def]
    return torch.maximum(share * (target - y), (share - 1) * (target - y)).mean()


LABELS = np.array([0, 2, 1, 1, 0, 2])
SHARE = np.full(6, 0.3, np.float32)


class Logistic(nn.Module):
    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.soft_margin_loss(x, target)


@pytest.mark.parametrize("target", ["cpu", "wasm", "webgpu", "cuda"])
@pytest.mark.parametrize(
    ("given", "feeds"),
    [
        (from_torch_loss(focal), {"labels": LABELS}),
        (
            from_torch_loss(quantile, targets={"share": "float[batch, 1]"}),
            {"target": T, "share": SHARE[:, None]},
        ),
        (from_torch_loss(Logistic()), {"target": T}),
    ],
    ids=["focal", "quantile", "module"],
)
def test_a_loss_written_with_torch(target: str, given: Any, feeds: dict[str, np.ndarray]) -> None:
    artifacts = onnxtrain.build(net(identity), loss=given, optimizer="sgd:lr=1.0", target=target)
    assert target in {m.target for m in artifacts.manifest.models}
    if target in ("webgpu", "cuda"):
        return  # no such device here
    function = given.function if isinstance(given, TorchLoss) else given
    w = torch.tensor(9 * W1, requires_grad=True)
    function(torch.tensor(X) @ w, *map(torch.tensor, feeds.values())).backward()
    assert w.grad is not None
    gradient = onnxtrain.Trainer(artifacts).gradients(x=X, **feeds)["w"]
    np.testing.assert_allclose(gradient, w.grad.numpy(), rtol=1e-4, atol=1e-5)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 2 * grads[0]


def several_labels(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.multilabel_margin_loss(y, target)


def doubled(y: torch.Tensor) -> torch.Tensor:
    return Straight.apply(y).mean()


def test_wrong_losses_of_torch() -> None:
    def refused(loss: Any, match: str, **targets: str) -> None:
        with pytest.raises(OnnxTrainError, match=match):
            trained(net(identity), from_torch_loss(loss, targets=targets) if targets else loss)

    refused(several_labels, r"FLOAT\[batch,3\]: Runtime.*\nhint: .*int64\[batch\]")
    refused(focal, r"no target mask\nhint: its targets are labels", mask="bool[batch]")
    refused(focal, r"not a type of a target: 'long'", labels="long")
    refused(doubled, r"cannot export doubled:\n.*gradient .* differs .*autograd.Function")
    refused(nn.Bilinear(2, 2, 1), r"has parameters, which a loss does not train: weight, bias")


def test_gradients_of_losses_are_compared_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    half = Rule("Softplus", lambda op, dy, x, **_: op.Mul(dy, 0.5))
    monkeypatch.setitem(RULES, "Softplus", half)
    with pytest.raises(PrepareError, match=r"the gradient of the loss logistic differs .* by 0\."):
        trained(net(identity), logistic)


def logistic(y: torch.Tensor) -> torch.Tensor:
    return F.softplus(y).mean()


def test_objects_of_torch_are_named_in_errors() -> None:
    with pytest.raises(LoadError, match=r"Linear is a module of torch.*\nhint: .*from_torch\("):
        onnxtrain.build(nn.Linear(2, 3), loss="mse", optimizer="sgd")
    adam = torch.optim.Adam([nn.Parameter(torch.zeros(1))])
    with pytest.raises(PrepareError, match=r"hint: optimizer=onnxtrain\.optim\.Adam\(lr"):
        onnxtrain.build(net(identity), loss=L.MSE(), optimizer=adam)
