"""Losses and metrics written with Python operators, and losses of torch."""

from __future__ import annotations

import threading

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

import onnxtrain
from onnxtrain import losses as L
from onnxtrain.errors import LoadError, PrepareError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.torch import from_torch_loss
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


def test_losses_of_torch_are_named_in_errors() -> None:
    for given in (nn.MSELoss(), nn.functional.mse_loss):
        with pytest.raises(PrepareError, match=r"on torch tensors.*\nhint: .*from_torch_loss\("):
            trained(net(identity), given)
    with pytest.raises(PrepareError, match=r"no loss equals GaussianNLLLoss .*CrossEntropyLoss"):
        from_torch_loss(nn.GaussianNLLLoss())
    with pytest.raises(LoadError, match=r"Linear is a module of torch.*\nhint: .*from_torch\("):
        onnxtrain.build(nn.Linear(2, 3), loss="mse", optimizer="sgd")
    adam = torch.optim.Adam([nn.Parameter(torch.zeros(1))])
    with pytest.raises(PrepareError, match=r"hint: optimizer=onnxtrain\.optim\.Adam\(lr"):
        onnxtrain.build(net(identity), loss=L.MSE(), optimizer=adam)
